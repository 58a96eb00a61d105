"""Bytes by sha256: inputs, results, old logs. Imported by server, agent, dispatcher, worker and client; imports only `core`.

Data flows from a stream into a `BlobWriter` of a store, which verifies and publishes it, and out by a `BlobReader`, which
verifies it again. All calls block on I/O: an event loop makes them on a thread.

    blob.py         the contract of a blob store, and the checks that stores share
    folder.py       a store in a folder                  s3/     a store in a bucket, and presigned URLs for it
    open_blobs.py   opens one of them by its address     zip/    result archives
    files.py        durable writes, resumable part files, free space: used wherever a file must survive
"""
