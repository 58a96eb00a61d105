"""Bytes by sha256: inputs, results, old logs.

`blob.py` is the contract, `folder.py` keeps blobs in a folder, `zips.py` writes and reads result archives. All of it is
synchronous file I/O: an event loop calls it in a thread.
"""
