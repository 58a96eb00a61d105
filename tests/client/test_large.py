"""Large inputs and results: in chunks, verified, never whole in the server's memory."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
import zipfile
from pathlib import Path

import pytest

from tasuki.core.job import InputFile
from tasuki.errors import Conflict, NotFound
from tests.support.processes import ServerProcess, opened, rss_bytes, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
MIB = 1 << 20
LARGE_BYTES = 30 * MIB


class Highest:
    """Watches how much memory a process uses while something happens."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.before = self.bytes = rss_bytes(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.bytes = max(self.bytes, rss_bytes(self._pid))

    def __enter__(self) -> Highest:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        return self.bytes - self.before


def test_large_input_and_large_result_of_a_command_pass_with_bounded_memory(server: ServerProcess, tmp_path: Path) -> None:
    # Given a command that copies its input file to its outputs, and a file of 30 MB
    path = tmp_path / "input.bin"
    path.write_bytes(os.urandom(LARGE_BYTES))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    arguments = ("--subject", "copy.>", "--exec", "copy=/bin/cp {file} out/copy.bin", "--data", str(tmp_path / "worker"))
    with start_worker(server, *arguments, command=True), server.client() as client, Highest(server.pid) as memory:
        # When it is run
        job = client.submit(subject="copy.one", exec="copy", files=[path], retries=0)
        ended = job.outcome(timeout=30)
        assert ended.state == "SUCCEEDED", ended
        saved = tmp_path / "result.zip"
        size = client.wait(client.aio.save_result(ended, saved))
    # Then the file came back, and the server never held it
    with zipfile.ZipFile(saved) as archive:
        assert size == saved.stat().st_size
        copy = next(name for name in archive.namelist() if name.endswith("copy.bin"))
        assert hashlib.sha256(archive.read(copy)).hexdigest() == sha256
    assert memory.grown < 24 * MIB
    assert not list(tmp_path.glob(".*.part"))


def test_large_result_of_a_handler_comes_back_with_bounded_memory(server: ServerProcess) -> None:
    with server.client() as client, Highest(server.pid) as memory:
        data = client.submit(subject="big", payload=str(LARGE_BYTES).encode()).result(timeout=30)
    assert len(data) == LARGE_BYTES
    assert memory.grown < 24 * MIB


def test_handlers_get_payloads_and_files_of_any_size(server: ServerProcess, tmp_path: Path) -> None:
    # Given a payload and a file that are too large to come with the job, and a small file
    payload, large, small = os.urandom(MIB), tmp_path / "large.bin", tmp_path / "small.txt"
    large.write_bytes(os.urandom(LARGE_BYTES))
    small.write_bytes(b"small")
    with server.client() as client, Highest(server.pid) as memory:
        # When a handler reads them piece by piece
        job = client.submit(subject="inputs", payload=payload, files=[large, small], job_id="inputs-1")
        found = json.loads(job.result(timeout=30))
        # Then they are the submitted ones, and nothing of them is left at the worker
        folder = Path(found.pop("folder"))
        contents = {"payload": payload, "large.bin": large.read_bytes(), "small.txt": b"small"}
        assert found == {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
        until(lambda: not folder.exists(), what="the inputs are removed")
        # And the same job again is the same job
        assert client.submit(subject="inputs", payload=payload, files=[large, small], job_id="inputs-1").existed
        with pytest.raises(Conflict, match="differs in: files"):
            client.submit(subject="inputs", payload=payload + b"!", files=[large, small], job_id="inputs-1")
    assert memory.grown < 24 * MIB


def test_same_file_is_sent_only_once(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "once.bin"
    path.write_bytes(os.urandom(2 * MIB))
    sent: list[int] = []
    with server.client() as client:
        client.wait(client.aio.put_file(path, sent.append))
        assert sent[-1] == 2 * MIB
        sent.clear()
        client.wait(client.aio.put_file(path, sent.append))
        assert sent == []


def test_upload_goes_on_after_the_server_was_killed_in_the_middle_of_it(tmp_path: Path) -> None:
    from tests.support.processes import start_server

    path = tmp_path / "large.bin"
    path.write_bytes(os.urandom(LARGE_BYTES))
    reached = threading.Event()
    go_on = threading.Event()

    def progress(sent: int) -> None:
        if sent > 5 * MIB and not reached.is_set():
            reached.set()
            go_on.wait(10)

    with start_server(tmp_path) as server, server.client() as client:
        refs: list[object] = []
        upload = threading.Thread(target=lambda: refs.append(client.wait(client.aio.put_file(path, progress))), daemon=True)
        upload.start()
        assert reached.wait(10)
        server.kill()
        go_on.set()
        server.restart()
        upload.join(20)
        assert refs
        [blob] = (server.folder.blobs / refs[0].sha256[:2]).glob(f"{refs[0].sha256[2:]}*")
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == refs[0].sha256


def test_job_that_names_a_blob_which_the_server_has_not_is_refused(server: ServerProcess) -> None:
    lost = InputFile("lost.bin", sha256="6" * 64, size_bytes=100_000)
    with server.client() as client, pytest.raises(NotFound, match="6" * 64):
        client.submit(subject="missing.one", exec="copy", files=[lost], retries=0)


def test_empty_file_and_inline_file_reach_the_command(server: ServerProcess, tmp_path: Path) -> None:
    small, empty = tmp_path / "small.txt", tmp_path / "empty.txt"
    small.write_bytes(b"small")
    empty.write_bytes(b"")
    arguments = ("--subject", "list.>", "--exec", "list=/bin/cat {files}", "--data", str(tmp_path / "worker"))
    with start_worker(server, *arguments, command=True), server.client() as client:
        result = client.submit(subject="list.one", exec="list", files=[small, empty], retries=0).result(timeout=30)
    assert zipfile.ZipFile(io.BytesIO(result)).read("stdout.log") == b"small"


def test_worker_that_dies_during_its_download_leaves_no_task_behind(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "input.bin"
    path.write_bytes(os.urandom(LARGE_BYTES))
    blob = hashlib.sha256(path.read_bytes()).hexdigest()

    def is_open() -> bool:
        return any(blob[2:] in target.name for target in opened(server.pid))

    arguments = ("--subject", "dying.>", "--exec", "copy=/bin/cp {file} out/copy.bin", "--data", str(tmp_path / "worker"))
    with start_worker(server, *arguments, command=True) as worker, server.client() as client:
        client.submit(subject="dying.one", exec="copy", files=[path], max_losses=0, watch=False)
        until(lambda: list((tmp_path / "worker").rglob("input.bin")), what="the download has begun")
        worker.kill()
        until(lambda: not is_open(), what="the server has closed the blob")
