"""Bytes by sha256: inputs, results, old logs.

`blob.py` is the contract, `folder.py` keeps blobs in a folder, `s3.py` in a bucket (with `s3_requests.py` and `s3_transfer.py`;
`s3_presign.py` lets others use it by urls); `opening.py` chooses by url. `zips.py` writes and reads result archives. All of it is
synchronous I/O: an event loop calls it in a thread.
"""
