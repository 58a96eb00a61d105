"""Following the logs of real jobs: every byte that is kept, once, in order, whatever happens to connections and servers."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.client.logs import LogFollower, LogPart
from tasuki.errors import InvalidInput, NotFound
from tests.e2e.stage import HERE, SOON_S, sqlite_only
from tests.e2e.talk import step
from tests.support.processes import ChildProcess, ServerProcess, WorkerProcess, rss_bytes, start_server, start_worker
from tests.support.waiting import until

SIZE_BYTES = 300_000  # of a step and stream: more than one piece
END_S = 30.0


class Talk:
    """A job of talk.py, and what it will have written."""

    def __init__(self, folder: Path, steps: int, size_bytes: int = SIZE_BYTES) -> None:
        self.folder = folder
        self.steps = steps
        self.size_bytes = size_bytes

    def submit(self, client: Client, job_id: str = "talk", **fields: object) -> None:
        args = (str(self.folder), str(self.steps), str(self.size_bytes))
        client.submit(job_id=job_id, subject="job.assign.talk", exec="talk", args=args, **fields)

    def go(self, *numbers: int) -> None:
        for number in numbers:
            (self.folder / f"go.{number}").touch()

    def fail(self, attempt: int) -> None:
        (self.folder / f"fail.{attempt}").touch()

    def written(self, stream: str, steps: int | None = None, attempt: int = 1) -> bytes:
        steps = self.steps if steps is None else steps
        return b"".join(step(stream, number, self.size_bytes, attempt) for number in range(steps))


class Following:
    """A client that follows both streams of a job in threads of its own, and what it has seen."""

    def __init__(self, client: Client, job_id: str = "talk") -> None:
        self.parts: dict[str, list[LogPart]] = {"stdout": [], "stderr": []}
        self._client = client
        self._job_id = job_id
        self._threads = [threading.Thread(target=client.wait, args=(self._read(stream),), daemon=True) for stream in self.parts]
        for thread in self._threads:
            thread.start()

    async def _read(self, stream: str) -> None:
        async for part in LogFollower(self._client.aio, self._job_id, stream).parts():
            self.parts[stream].append(part)

    def seen(self, stream: str) -> bytes:
        return b"".join(part.text for part in list(self.parts[stream]))

    def wait_for(self, talk: Talk, steps: int) -> None:
        """Until the follower has seen these steps of both streams, while the job goes on."""

        def seen() -> bool:
            return all(len(self.seen(stream)) == steps * talk.size_bytes for stream in self.parts)

        until(seen, END_S, f"{steps} steps are seen")

    def to_the_end(self) -> None:
        for thread in self._threads:
            thread.join(END_S)
        assert not any(thread.is_alive() for thread in self._threads), "the follower has not come to the end"


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    return Talk(tmp_path, steps=5)


def talk_worker(server: ServerProcess | Sequence[ServerProcess] | str, *arguments: str, **options: object) -> WorkerProcess:
    command = f"talk={sys.executable} {HERE / 'talk.py'} {{args}}"
    shell = "sh=/bin/sh -c {args}"
    return start_worker(server, "--exec", command, "--exec", shell, *arguments, command=True, **options)  # type: ignore[arg-type]


@contextlib.contextmanager
def relay_to(server: ServerProcess, log: Path) -> Iterator[tuple[ChildProcess, str]]:
    command = [sys.executable, HERE / "relay.py", "127.0.0.1", str(server.port)]
    with ChildProcess(command, log, {}) as relay:
        yield relay, f"tcp://127.0.0.1:{relay.wait_for_output(chr(10)).split()[1]}"


def test_a_follower_sees_all_once_though_every_line_is_cut_and_the_server_dies(talk: Talk, tmp_path: Path) -> None:
    with (
        start_server(tmp_path) as server,  # with a lease that outlives a restart
        relay_to(server, tmp_path / "client-relay.log") as (client_relay, client_url),
        relay_to(server, tmp_path / "worker-relay.log") as (worker_relay, worker_url),
        talk_worker(worker_url, token=server.create_token("worker"), log=tmp_path / "worker.log"),
        server.client(client_url) as client,
    ):
        talk.submit(client)
        following = Following(client)
        talk.go(0)
        following.wait_for(talk, 1)
        client_relay.signal(signal.SIGUSR1)
        talk.go(1)
        following.wait_for(talk, 2)
        worker_relay.signal(signal.SIGUSR1)
        talk.go(2)
        following.wait_for(talk, 3)
        server.kill()
        talk.go(3)
        server.restart()
        following.wait_for(talk, 4)
        client_relay.signal(signal.SIGUSR1)
        worker_relay.signal(signal.SIGUSR1)
        talk.go(4)
        following.to_the_end()

        for stream in ("stdout", "stderr"):
            assert following.seen(stream) == talk.written(stream)
            assert {part.attempt for part in following.parts[stream]} == {1}


def test_a_follower_of_one_server_reads_from_a_worker_of_the_other(pair: list[ServerProcess], tmp_path: Path) -> None:
    talk = Talk(tmp_path, steps=5, size_bytes=2_000)  # the result is no blob: these servers share none
    token = pair[0].create_token("worker")
    with talk_worker(pair[0].url, token=token, log=talk.folder / "worker.log"), pair[1].client() as client:
        talk.submit(client)
        following = Following(client)
        talk.go(0)
        following.wait_for(talk, 1)
        talk.go(1, 2, 3, 4)
        following.to_the_end()

        for stream in ("stdout", "stderr"):
            assert following.seen(stream) == talk.written(stream)


@sqlite_only
def test_a_new_attempt_begins_at_its_start_and_the_failed_one_was_seen_to_its_end(
    server: ServerProcess, client: Client, talk: Talk
) -> None:
    with talk_worker(server):
        talk.submit(client, retries=1, backoff_s=1.0)
        following = Following(client)
        talk.go(0)
        following.wait_for(talk, 1)
        talk.fail(1)
        until(lambda: client.status("talk").attempt == 2, END_S, "the second attempt begins")
        talk.go(1, 2, 3, 4)
        following.to_the_end()

    first = b"".join(part.text for part in following.parts["stdout"] if part.attempt == 1)
    second = b"".join(part.text for part in following.parts["stdout"] if part.attempt == 2)
    assert (first == talk.written("stdout", 1), second == talk.written("stdout", attempt=2)) == (True, True)


@pytest.fixture(scope="module")
def shared_worker(shared_server: ServerProcess) -> Iterator[WorkerProcess]:
    caps = ("--log-head", "1000", "--log-tail", "500", "--slots", "4")
    with talk_worker(shared_server, *caps) as worker:
        yield worker


def shell(client: Client, job_id: str, script: str, **fields: object) -> None:
    client.submit(job_id=job_id, subject="job.assign.sh", exec="sh", args=(script,), **fields)


@pytest.mark.usefixtures("shared_worker")
class TestWithOneWorker:
    """Cases without a death: one server and one worker for all of them."""

    def test_a_cut_log_is_marked_and_its_offsets_count_what_is_missing(self, shared_client: Client) -> None:
        shell(shared_client, "cut", "yes 0123456789abcde | head -c 100000; printf end")
        shared_client.job("cut").result(END_S)
        written = b"0123456789abcde\n" * 6250 + b"end"

        whole = b"".join(shared_client.logs("cut"))
        inside = b"".join(shared_client.logs("cut", offset=2003))
        last = b"".join(shared_client.logs("cut", offset=len(written) - 10, follow=False))

        assert whole == written[:1000] + b"\n[tasuki: 98503 bytes were cut here]\n" + written[-500:]
        assert inside == b"\n[tasuki: 97500 bytes were cut here]\n" + written[-500:]
        assert last == written[-10:]

    def test_what_there_is_now_of_a_running_job(self, shared_client: Client, tmp_path: Path) -> None:
        shell(shared_client, "now", f"echo begun; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo ended")
        until(lambda: list(shared_client.logs("now", follow=False)) == [b"begun\n"], SOON_S, "its first line is there")
        (tmp_path / "go").touch()
        shared_client.job("now").result(END_S)

        assert b"".join(shared_client.logs("now", follow=False)) == b"begun\nended\n"

    def test_the_tail_of_a_running_and_of_an_ended_job(self, shared_client: Client, tmp_path: Path) -> None:
        shell(shared_client, "tail", f"seq 100; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done")

        def last() -> bytes:
            async def read() -> bytes:
                follower = LogFollower(shared_client.aio, "tail", tail_bytes=7)
                return b"".join([part.text async for part in follower.parts(follow=False)])

            return shared_client.wait(read())

        until(lambda: last() == b"99\n100\n", SOON_S, "the last bytes are there")
        (tmp_path / "go").touch()
        shared_client.job("tail").result(END_S)

        assert last() == b"99\n100\n"

    def test_somebody_elses_job_has_no_logs(self, shared_server: ServerProcess, shared_client: Client) -> None:
        shell(shared_client, "mine", "echo secret")
        shared_client.job("mine").result(END_S)
        stranger = shared_server.create_token("client")

        with shared_server.client(token=stranger) as other, pytest.raises(NotFound, match="not yours"):
            list(other.logs("mine"))

    @pytest.mark.parametrize(
        ("params", "named"),
        [
            ({"offset": -1}, "offset must be 0"),
            ({"offset": 1 << 63}, "offset must be 0"),
            ({"stream": "stdlog"}, "stream must be stdout, stderr or progress"),
            ({"wait_s": 26.0}, "wait_s must be 0 to 25"),
            ({"wait_s": float("nan")}, "wait_s must be 0 to 25"),
            ({"max_bytes": 0}, "max_bytes must be 1"),
            ({"max_bytes": 1 << 30}, "max_bytes must be 1"),
            ({"offset": "here"}, "offset"),
            ({"attempt": -1}, "attempt must be 0"),
        ],
    )
    def test_impossible_questions_are_refused(self, shared_client: Client, params: dict[str, object], named: str) -> None:
        with pytest.raises(InvalidInput, match=named):
            shared_client.wait(shared_client.aio.call("logs", job_id="any", **params))

    def test_a_job_of_a_handler_has_no_logs(self, shared_client: Client) -> None:
        shared_client.submit(job_id="handled", subject="nobody.takes.this")

        with pytest.raises(NotFound, match="handler"):
            list(shared_client.logs("handled"))

    def test_a_running_program_of_an_app_can_be_followed(
        self, shared_server: ServerProcess, shared_client: Client, tmp_path: Path
    ) -> None:
        script = tmp_path / "app.sh"
        script.write_text(
            f"echo one; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo two; "
            f'while [ ! -e {tmp_path}/end ]; do sleep 0.02; done; echo "{{}}" > $TASUKI_OUT/result.json'
        )
        with start_worker(shared_server, "--app", "zpe", "--exec", f"zpe=/bin/sh {script}", command=True):
            job = shared_client.submit(job_id="of-an-app", subject="job.assign.zpe", payload=b"{}")
            until(lambda: shared_client.status("of-an-app").state == "RUNNING", SOON_S, "it runs")
            pieces = shared_client.logs("of-an-app")
            assert next(pieces) == b"one\n"

            (tmp_path / "go").touch()
            assert next(pieces) == b"two\n"

            (tmp_path / "end").touch()  # an app's job leaves no log: what was not read by now is gone
            assert b"".join(pieces) == b""
            assert job.result(timeout=SOON_S) == b"{}"
        for follow in (True, False):
            with pytest.raises(NotFound, match=r"'of-an-app' has no logs: .* an app's"):
                list(shared_client.logs("of-an-app", follow=follow))

    def test_the_output_of_a_program_of_an_app_that_failed_is_kept(
        self, shared_server: ServerProcess, shared_client: Client
    ) -> None:
        program = "zpe=/bin/sh -c 'echo said; echo trouble >&2; exit 3'"
        with start_worker(shared_server, "--app", "zpe", "--exec", program, command=True):
            job = shared_client.submit(job_id="app-failed", subject="job.assign.zpe", payload=b"{}", retries=0)
            assert job.outcome(END_S).state == "FAILED"

        for follow in (True, False):
            assert b"".join(shared_client.logs("app-failed", follow=follow)) == b"said\n"
            assert b"".join(shared_client.logs("app-failed", stream="stderr", follow=follow)) == b"trouble\n"

    def test_progress_is_shown_and_decides_nothing(self, shared_client: Client, tmp_path: Path) -> None:
        script = (
            f'echo "progress 0.25 a quarter" >&$TASUKI_PROGRESS_FD; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 3'
        )
        shell(shared_client, "progress", script, retries=0)

        def told() -> tuple[float | None, str]:
            view = shared_client.status("progress")
            return view.progress, view.progress_text

        until(lambda: told() == (0.25, "a quarter"), 3 * SOON_S, "its progress is stored")
        assert "It reports that it is 25% done (a quarter)." in shared_client.explain("progress").because
        (tmp_path / "go").touch()
        assert shared_client.job("progress").outcome(END_S).outcome.exit_code == 3

    def test_a_flood_of_progress_does_not_hold_the_job_up(self, shared_client: Client, shared_worker: WorkerProcess) -> None:
        before = rss_bytes(shared_worker.pid)
        shell(shared_client, "flood", "yes 'progress 0.5 again' | head -c 50000000 >&3; echo done")

        shared_client.job("flood").result(END_S)

        assert b"".join(shared_client.logs("flood")) == b"done\n"
        assert rss_bytes(shared_worker.pid) - before < 30_000_000

    def test_binary_output_comes_through_unchanged(self, shared_client: Client) -> None:
        every_byte = "".join(f"\\{number:03o}" for number in range(256))
        shell(shared_client, "binary", f"printf '{every_byte}'")

        assert b"".join(shared_client.logs("binary")) == bytes(range(256))
