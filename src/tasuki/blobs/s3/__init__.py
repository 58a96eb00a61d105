"""Blobs in an S3-compatible bucket. Imported where an address begins with `s3://`; needs boto3.

store.py      `S3Blobs`, its writer and its reader
requests.py   one boto3 client: addresses, retries, errors
presign.py    presigned URLs, by which peers move bytes to and from the bucket
"""
