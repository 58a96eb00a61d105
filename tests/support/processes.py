"""Real processes for tests: servers, workers, and what the tests want to know of them from outside.

    with start_server(tmp_path) as server, start_worker(server) as worker:
        with server.client() as client:
            assert client.submit(subject="math.square", payload=b"7").result(timeout=30) == b"49"

`start_server` runs `python -m tasuki server` on a folder of its own and a free port, with SQLite or with `store=` a database that
several servers share; `start_servers` runs several. `start_worker` runs the handlers of `tests/support/handlers.py`, or with
`command=True` the `tasuki worker` of the command line. All return when the process is ready, and leaving the `with` block
kills it; a test that dies before leaves nothing behind either. Most are forked by a process that has imported everything
(`nursery.py`); with `fresh=True` they have an interpreter of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tasuki import AsyncClient, Client
from tasuki.config import DataFolder
from tasuki.core.access import token_sha256
from tasuki.core.address import parse_url
from tasuki.server.assembly import make_secret
from tests.support import nursery
from tests.support.nursery import SOURCE as SOURCE
from tests.support.nursery import ForkedProcess, clean_environment
from tests.support.ports import free_port
from tests.support.sqlite_files import with_tables
from tests.support.waiting import until

HANDLERS = Path(__file__).with_name("handlers.py")
READY_TIMEOUT_S = 20.0
END_TIMEOUT_S = 30.0
POLL_S = 0.01
TASUKI = (sys.executable, "-m", "tasuki")

T = TypeVar("T")
_started: set[subprocess.Popen[Any] | ForkedProcess] = set()


@atexit.register
def _kill_leftovers() -> None:
    for process in _started:
        if process.poll() is None:
            process.kill()


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process, from /proc."""
    resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(pid: int) -> int:
    """Return the most resident memory that a process has had so far; 0 for one that has ended."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def opened(pid: int) -> list[Path]:
    """Return the targets of the descriptors of a process."""
    targets = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            targets.append(descriptor.readlink())
    return targets


def open_sockets(pid: int) -> int:
    """Return the number of open sockets of a process; it may open further files of its store at any time."""
    return sum(target.name.startswith("socket:") for target in opened(pid))


def peer_ports(pid: int, port: int) -> set[int]:
    """Return the ports at the other ends of the connections that a process has at its own port, over IPv4."""
    held = {target.name for target in opened(pid)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [(*(int(place.rpartition(":")[2], 16) for place in row[1:3]), f"socket:[{row[9]}]") for row in rows]
    return {theirs for ours, theirs, name in ports if ours == port and name in held}


def open_files(pid: int) -> int:
    """Return the number of open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - a Path for each of thousands says nothing more


class ChildProcess:
    """A process of the test. Its output (stdout and stderr) goes to the file `log`; leaving the `with` block kills it."""

    kind = "worker"
    """Word for messages."""

    def __init__(
        self, command: Iterable[str | os.PathLike[str]], log: Path, env: Mapping[str, str], *, fresh: bool = False, **options: Any
    ) -> None:
        """`fresh`: with an interpreter of its own. Most are forked from one that has imported everything (`nursery.py`)."""
        self.command = [os.fspath(part) for part in command]
        self._is_fresh = fresh
        self.log = log
        self.env = {**clean_environment(), **env}
        self._options = options
        self._log_start = 0
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[Any] | ForkedProcess:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            streams = {"stdout": log.fileno(), "stderr": log.fileno()}
            if self._is_fresh or self._options:
                options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **streams, **self._options}
                process: subprocess.Popen[Any] | ForkedProcess = subprocess.Popen(self.command, env=self.env, **options)
            else:
                process = nursery.start(self.command, env=self.env, **streams)
        _started.add(process)
        return process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def output(self, *, all_starts: bool = False) -> str:
        """Return all output of the process since its latest start, or since its first one."""
        with self.log.open("rb") as log:
            log.seek(0 if all_starts else self._log_start)
            return log.read().decode("utf-8", "replace")

    def wait_for_output(self, text: str, timeout: float = READY_TIMEOUT_S) -> str:
        """Wait until the process has written `text`, and return the whole output; fails at once if the process ends first."""

        def seen() -> str:
            ended = not self.running
            output = self.output()
            if text in output:
                return output
            assert not ended, f"{self.command} ended with {self.process.returncode} before it wrote {text!r}:\n{output}"
            return ""

        return until(seen, timeout, f"{self.command} writes {text!r}")

    def rss_bytes(self) -> int:
        return rss_bytes(self.pid)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = END_TIMEOUT_S) -> int:
        """Wait for the end; return the exit code, negative for a signal."""
        code = self.process.wait(timeout)
        _started.discard(self.process)
        return code

    def kill(self) -> None:
        """Kill the process, and wait until it is gone. Harmless if it is gone already."""
        if self.running:
            self.process.kill()
        self.wait()

    def start_again(self) -> None:
        """Run the same command once more, after killing the process if it still runs."""
        self.kill()
        self.process = self._spawn()

    def stop(self, timeout: float = END_TIMEOUT_S) -> int:
        """Send SIGTERM, and wait for the orderly end; return the exit code."""
        if self.running:
            self.process.terminate()
        return self.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)  # a stopped process must hear of its end too
        self.kill()


class ServerProcess(ChildProcess):
    """A running `tasuki server`. Make one with `start_server`."""

    kind = "server"

    def __init__(self, data: Path, arguments: Iterable[str], env: Mapping[str, str], tcp: str, log: Path, **options: Any) -> None:
        self.data = data
        self._arguments = list(arguments)
        self.url = self.unix_url = self.http_url = ""
        super().__init__(self._command_for(tcp), log, env, **options)
        self._await_ready()

    def _command_for(self, tcp: str) -> list[str]:
        return [*TASUKI, "server", "--data", os.fspath(self.data), "--tcp", tcp, *self._arguments]

    def _await_ready(self) -> None:
        try:
            output = self.wait_for_output("ready ")
        except BaseException:
            self.kill()
            raise
        addresses = [line.split()[1] for line in output.splitlines() if line.startswith("listening ")]
        self.url = next((address for address in addresses if not address.startswith("unix:")), "")
        self.unix_url = next((address for address in addresses if address.startswith("unix:")), "")
        self.http_url = next((address for address in addresses if address.startswith("http")), "")

    @property
    def port(self) -> int:
        return parse_url(self.url)[0].port

    @property
    def folder(self) -> DataFolder:
        return DataFolder(self.data)

    @property
    def token(self) -> str:
        """The folder's own admin token."""
        return self.folder.token_file.read_text().strip()

    def led(self, *, all_starts: bool = False) -> list[int]:
        """Return the epochs under which this server led, since its latest start or since its first one."""
        return [int(epoch) for epoch in re.findall(r"leads, under epoch (\d+)", self.output(all_starts=all_starts))]

    @property
    def leads(self) -> bool:
        """The server has logged that it leads, and no end of that since."""
        output = self.output()
        return output.count("leads, under epoch") > output.count("leads no more")

    def restart(self, *, same_port: bool = True, env: Mapping[str, str] | None = None) -> None:
        """Start the server again on the same folder, store (and port); it is killed first if it still runs.

        `env` replaces what the first start was given in addition to the environment.
        """
        self.command = self._command_for(f"127.0.0.1:{self.port if same_port else 0}")
        if env is not None:
            self.env = {**clean_environment(), **env}
        self.start_again()
        self._await_ready()

    def tasuki(self, *arguments: str, timeout: float = READY_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run `tasuki ARGUMENTS` against this server over TCP, with its admin token."""
        env = {**clean_environment(), "TASUKI_URL": self.url, "TASUKI_TOKEN": self.token, "NO_COLOR": "1"}
        return nursery.run([*TASUKI, *arguments], env=env, timeout=timeout)

    def client(self, url: str | None = None, **options: Any) -> Client:
        """Return a client over TCP with the admin token, unless told otherwise."""
        return Client(url or self.url, **self._client_options(options))

    def async_client(self, url: str | None = None, **options: Any) -> AsyncClient:
        """Return an async client over TCP with the admin token, unless told otherwise."""
        return AsyncClient(url or self.url, **self._client_options(options))

    def _client_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"token": self.token, "connect_timeout_s": 10.0, **options}

    def create_token(self, kind: str, *, scope: Iterable[str] = (), expires_at: float | None = None) -> str:
        """Create a token of a kind (admin, client, worker); return the secret."""
        return self.create_named_token(kind, scope=scope, expires_at=expires_at)[1]

    def create_named_token(self, kind: str, *, scope: Iterable[str] = (), expires_at: float | None = None) -> tuple[str, str]:
        """Create a token; return (token_id, secret)."""
        token_id, secret = secrets.token_hex(6), make_secret(kind)
        row = {
            "token_id": token_id,
            "kind": kind,
            "sha256": token_sha256(secret),
            "scope": list(scope),
            "expires_at": expires_at,
        }
        with self.client() as client:
            client.wait(client.aio.call("token.create", **row))
        return token_id, secret


class WorkerProcess(ChildProcess):
    """A running worker. Make one with `start_worker`."""


def start_server(
    tmp_path: Path,
    *arguments: str,
    store: str = "",
    blobs: str = "",
    data: str = "data",
    env: Mapping[str, str] | None = None,
    tcp: str = "",
    log: Path | None = None,
    **options: Any,
) -> ServerProcess:
    """Start `tasuki server` on the folder `data` in `tmp_path`; returns when it listens.

    `store` and `blobs` are URLs for what is kept elsewhere, `arguments` further ones of the command line. `env` is added to
    the environment (TASUKI_FAULT, …), `options` go to ChildProcess (`fresh=`) and Popen (`user=`, `preexec_fn=`, …).
    """
    places = [*(("--store", store) if store else ()), *(("--blobs", blobs) if blobs else ())]
    log = log or tmp_path / ("server.log" if data == "data" else f"{data}.log")
    folder = DataFolder(tmp_path / data)
    # With options the folder may have to be another user's; a store may also be named in the environment.
    if not (store or options or folder.root.exists() or "TASUKI_STORE" in (env or {})):
        with_tables(folder.database)
    return ServerProcess(folder.root, [*places, *arguments], env or {}, tcp or f"127.0.0.1:{free_port()}", log, **options)


@contextlib.contextmanager
def start_servers(tmp_path: Path, count: int, *arguments: str, **options: Any) -> Iterator[list[ServerProcess]]:
    """Start several servers at once, each with a folder of its own; leaving the block kills them."""
    with contextlib.ExitStack() as stack, futures.ThreadPoolExecutor(count) as pool:
        starting = [pool.submit(start_server, tmp_path, *arguments, data=f"server-{n}", **options) for n in range(1, count + 1)]
        futures.wait(starting)
        for started in starting:
            if started.exception() is None:
                stack.enter_context(started.result())
        yield [started.result() for started in starting]


def url_of(servers: Sequence[ServerProcess]) -> str:
    """Return one address that lists all servers."""
    if len(servers) == 1:
        return servers[0].url
    return "tcp://" + ",".join(server.url.removeprefix("tcp://") for server in servers)


def start_worker(
    server: ServerProcess | Sequence[ServerProcess] | str,
    *arguments: str,
    command: bool = False,
    script: Path = HANDLERS,
    token: str | None = None,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    wait: bool = True,
    **options: Any,
) -> WorkerProcess:
    """Start a worker of a server (or of several, or of a URL); returns when it is connected, unless `wait` is False.

    By default it runs a script of handlers, called as `python script URL arguments…`, which must let the worker's log go
    to stderr at level INFO (see tests/support/handlers.py). With `command=True` it is `tasuki worker --to URL arguments…`.
    `options` are those of `start_server`.
    """
    servers = [server] if isinstance(server, ServerProcess) else [] if isinstance(server, str) else list(server)
    url = server if isinstance(server, str) else url_of(servers)
    log = log or (servers[0].data.with_name(f"worker-{secrets.token_hex(4)}.log") if servers else None)
    assert log is not None, "a worker that is started by URL needs a log file"
    if token is None and servers:
        token = servers[0].create_token("worker")
    start = [*TASUKI, "worker", "--to", url] if command else [sys.executable, script, url]
    worker = WorkerProcess([*start, *arguments], log, {**({"TASUKI_TOKEN": token} if token else {}), **(env or {})}, **options)
    if wait:
        try:
            worker.wait_for_output("connected ")
        except BaseException:
            worker.kill()
            raise
    return worker


def alive(pid: int | str) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
