"""Requests to an S3-compatible server: one client, retries of temporary failures, clear messages for permanent ones.

boto3 signs and sends; its own retries are off. The retries here wait longer (an S3 server that restarts is away for half a
minute, and a job's result should not be lost for that), with growing jittered pauses, and end at once when the store is closed.
Credentials come from the usual AWS environment and files, and are never part of an address.
"""

from __future__ import annotations

import base64
import functools
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import parse_qsl, urlsplit

from tasuki.blobs.blob import name_of
from tasuki.core.address import shown_address
from tasuki.core.backoff import Backoff
from tasuki.errors import ConfigError, DiskFull, NotFound, TasukiError, Unavailable

logger = logging.getLogger("tasuki.blobs")

RETRY_S = 120.0  # how long one request is retried; a server that is restarted or moved is back by then
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0  # of silence: a loaded server takes seconds to make 8 MiB durable
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
CONNECTIONS = 32  # kept open: one per blob thread, and one per download that is under way

_GONE = {"NoSuchKey", "404", "NotFound"}
_OF_ONE_KEY = {"get_object", "head_object", "copy_object", "upload_part_copy"}
_OTHER_BYTES = {"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "507"}
_PASSING = {
    "BadDigest",  # the bytes were damaged on their way, and the server refused them
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
}
_WAYS_OUT = {
    "NoSuchBucket": "create the bucket there, or correct its name in the url",
    "AccessDenied": "give these credentials the right to read, write, delete and list in it, and to abort uploads",
    # A HEAD has only this number. AWS also answers it for a missing key to a user that may not list.
    "403": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the profile), and that they may read and list in it",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID (or the profile): this server does not know the key",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY (or the profile), and that no proxy rewrites the request",
    "ExpiredToken": "the session's credentials have expired; get new ones",
    "RequestTimeTooSkewed": "set this machine's clock: it differs from the server's by more than is allowed",
    "PermanentRedirect": "the bucket is in another region; put region=… into the url",
    "AuthorizationHeaderMalformed": "the bucket is in another region; put region=… into the url",
    "404": "what answers there is no S3 server with this bucket; check the endpoint and the bucket in the url",
    "405": "what answers there is no S3 server; check the endpoint in the url",
}

T = TypeVar("T")


class S3Address(NamedTuple):
    """Address of a bucket: `s3://bucket/prefix?endpoint=https://host:port&region=…`."""

    bucket: str
    prefix: str
    """Empty, or ends with a slash."""
    endpoint: str | None
    region: str | None

    def key(self, sha256: str, generation: int) -> str:
        """Return the key of the object of this blob."""
        return f"{self.prefix}{sha256[:2]}/{name_of(sha256, generation)}"

    def __str__(self) -> str:
        return f"bucket {self.bucket!r} at {self.endpoint or 'AWS'}"


def parse_s3_url(url: str) -> S3Address:
    """Parse an address; ConfigError if it is none, or has credentials in it: URLs end up in process lists and logs."""
    parts = urlsplit(url)
    if "@" in parts.netloc or ":" in parts.netloc:  # the second: a / in the secret ends the netloc before its @
        raise ConfigError(
            "an s3:// url must not contain credentials; put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or into a profile (AWS_PROFILE)"
        )
    if parts.scheme != "s3" or not parts.netloc:
        raise ConfigError(f"not an S3 address: {shown_address(url)!r}; use s3://bucket/prefix?endpoint=https://host:port")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(options) - {"endpoint", "region"})
    if unknown:
        raise ConfigError(
            f"an s3:// url has endpoint and region, not {', '.join(unknown)}; credentials come from the environment"
        )
    endpoint = options.get("endpoint")
    if endpoint is not None:
        found = urlsplit(endpoint)
        if found.scheme not in ("http", "https") or not found.hostname or "@" in found.netloc:
            raise ConfigError("endpoint in an s3:// url must be http://host:port or https://host:port, without credentials")
    prefix = parts.path.strip("/")
    return S3Address(parts.netloc, f"{prefix}/" if prefix else "", endpoint, options.get("region"))


def s3_digest(sha256: str) -> str:
    """Return a sha256 as S3 writes it."""
    return base64.b64encode(bytes.fromhex(sha256)).decode()


@functools.cache
def _model_loader() -> Any:
    """Return the loader of boto3's service models, which takes a quarter of a second: one for all clients of a process."""
    from botocore.session import get_session

    return get_session().get_component("data_loader")


class S3Requests:
    """All requests of one blob store. Used by many threads at once, as boto3's clients may be."""

    def __init__(self, address: S3Address, *, retry_s: float = RETRY_S) -> None:
        self.address = address
        self.retry_s = retry_s
        self._stop = threading.Event()
        try:
            import boto3
            import botocore.exceptions as failures
            from botocore.config import Config
            from botocore.session import get_session
        except ImportError as error:
            raise ConfigError("blobs in S3 need boto3: pip install 'tasuki[s3]'") from error
        self._failures = failures
        config = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=CONNECTIONS,
            signature_version="s3v4",  # also for presigned URLs, where boto3 still defaults to the older one
            # With an endpoint of one's own there is seldom a DNS name per bucket. On AWS there is; "auto", the default, would
            # sign urls for the global endpoint, which redirects to the bucket's region.
            s3={"addressing_style": "path" if address.endpoint else "virtual"},
            # Many S3-compatible servers do not know the trailing checksums that boto3 adds; requests here have their own.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            core = get_session()
            core.register_component("data_loader", _model_loader())
            session = boto3.session.Session(botocore_session=core)
            # Without a region boto3 refuses to sign; servers with an endpoint of their own mostly do not look at it.
            region = address.region or session.region_name or "us-east-1"
            self._client = session.client("s3", endpoint_url=address.endpoint, region_name=region, config=config)
        except (failures.BotoCoreError, ValueError) as error:
            self._refuse(error, "opening", "check the url of the blobs and the AWS settings")

    def close(self) -> None:
        """End all retries. Requests under way end by their own timeouts."""
        self._stop.set()

    def send(self, operation: str, *, retry_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Send a request to the bucket, with retries. NotFound if there is no such key (or upload)."""
        return self.with_retries(lambda: self.once(operation, **arguments), operation, retry_s)

    def once(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send a request once, for use inside `with_retries`, which handles boto3's errors."""
        answer: dict[str, Any] = getattr(self._client, operation)(Bucket=self.address.bucket, **arguments)
        return answer

    def complete_upload(self, key: str, upload_id: str | None, parts: list[dict[str, Any]]) -> None:
        self.send("complete_multipart_upload", Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts})

    def cut_short(self, found_bytes: int, wanted_bytes: int) -> Exception:
        """Return the error to raise inside `with_retries` when an answer ended too early."""
        error: Exception = self._failures.IncompleteReadError(actual_bytes=found_bytes, expected_bytes=wanted_bytes)
        return error

    def with_retries(self, attempt: Callable[[], T], what: str, retry_s: float | None = None) -> T:
        """Call until it works, or fails permanently, or time is up (Unavailable)."""
        ends_at = time.monotonic() + (self.retry_s if retry_s is None else retry_s)
        backoff = Backoff(FIRST_PAUSE_S, LAST_PAUSE_S, random.random)
        while True:
            if self._stop.is_set():
                raise self._closing()
            try:
                return attempt()
            except (self._failures.BotoCoreError, self._failures.ClientError) as error:
                passing = self._judge(error, what)
                if time.monotonic() >= ends_at:
                    raise passing from error
                logger.warning("%s; trying again", passing)
            wait_s = min(backoff.next_s(), max(0.0, ends_at - time.monotonic()))
            if self._stop.wait(wait_s):
                raise self._closing()

    def refuses(self, operation: str, retry_s: float, **arguments: Any) -> bool:
        """Return whether the bucket refuses bytes that do not match their checksum. If not, it has stored them."""

        def attempt() -> bool:
            try:
                self.once(operation, **arguments)
            except self._failures.ClientError as error:
                if error.response.get("Error", {}).get("Code") in _OTHER_BYTES:
                    return True
                raise
            return False

        return self.with_retries(attempt, operation, retry_s)

    def presigned(self, operation: str, expires_s: float, **arguments: Any) -> str:
        """Return a URL that permits exactly this request for that long. Nothing is sent."""
        parameters = {"Bucket": self.address.bucket, **arguments}
        try:
            return str(self._client.generate_presigned_url(operation, Params=parameters, ExpiresIn=max(1, int(expires_s))))
        except self._failures.BotoCoreError as error:
            self._refuse(error, f"signing {operation}", "check the AWS credentials of this server")

    # ------------------------------------------------------------------------------------------------ errors

    def _judge(self, error: Exception, what: str) -> TasukiError:
        """Raise a permanent error; return the message for a temporary one."""
        if isinstance(error, self._failures.ClientError):
            return self._judge_answer(error, what)
        if isinstance(error, self._failures.SSLError) and any(
            text in str(error) for text in ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL")
        ):
            self._refuse(error, what, "check http or https in the endpoint, and the server's certificate (AWS_CA_BUNDLE)")
        if isinstance(
            error, (self._failures.HTTPClientError, self._failures.ConnectionError, self._failures.IncompleteReadError)
        ):
            return Unavailable(f"{self.address} does not answer {what}: {error}")
        if isinstance(error, (self._failures.NoCredentialsError, self._failures.PartialCredentialsError)):
            self._refuse(error, what, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE")
        self._refuse(error, what, "check the url of the blobs and the AWS settings")

    def _judge_answer(self, error: Any, what: str) -> TasukiError:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        said = f"{self.address} answered {what} with {code or status}"
        if code in _FULL or status == 507:
            return DiskFull(f"{said}; free space there")
        if code in _PASSING or status >= 500 or status == 429:
            return Unavailable(f"{said}; it seems overloaded or restarting")
        is_about_one_key = what in _OF_ONE_KEY and code in _GONE
        if is_about_one_key or code == "NoSuchUpload":
            raise NotFound(said) from error
        self._refuse(error, what, _WAYS_OUT.get(code) or _WAYS_OUT.get(str(status)) or "see its log")

    def _refuse(self, error: Exception, what: str, way_out: str) -> NoReturn:
        raise ConfigError(f"{self.address} cannot be used ({what}): {error}; {way_out}") from error

    def _closing(self) -> Unavailable:
        return Unavailable(f"{self.address}: this server is going down; send it again")
