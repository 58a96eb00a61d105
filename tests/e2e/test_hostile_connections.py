"""Thousands of hostile connections of every kind at once: operator and worker are served, no lease is lost, memory is bounded."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasuki.core.address import parse_url
from tests.support import attacker
from tests.support.certificates import TestAuthority
from tests.support.processes import ServerProcess, start_server, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

EACH = 2000
SERVED_S = 1.0
MEMORY_MAX_BYTES = 300 * 1024 * 1024
ROUND_S = 0.25
RAMP_MAX_S = 90.0  # until all connections were opened, on a machine that has other work; else a few seconds


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


@contextmanager
def attacked(server: ServerProcess, **options: Any) -> Iterator[dict[str, int]]:
    """Attack while the block lasts; the dictionary then has the number of connections of each kind."""
    options |= {"http": parse_url(server.http_url)[0].port, "tcp": server.port}
    opened: dict[str, int] = {}
    command = [sys.executable, attacker.__file__, json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield opened
            said, _ = process.communicate(timeout=20.0)
            opened.update(json.loads(said))
        finally:
            process.kill()


def token_of(server: ServerProcess, kind: str, *scope: str) -> str:
    """Return a token made over the unix socket, for which no CA is needed."""
    url, server.url = server.url, server.unix_url
    try:
        return server.create_token(kind, scope=scope)
    finally:
        server.url = url


def served_within(server: ServerProcess) -> float:
    """Return how long an operator needs who connects to the unix socket and has the worker run a job."""
    began = time.monotonic()
    with server.client(server.unix_url) as operator:
        assert operator.submit(subject="math.square", payload=b"3").result(20.0) == b"9"
    return time.monotonic() - began


def withstand(tmp_path: Path, kinds: Iterable[str], attack_s: float, *, tls: bool = False) -> None:
    arguments, ca = ["--http", "127.0.0.1:0"], []
    if tls:
        authority = TestAuthority(tmp_path / "ca")
        cert, key = authority.issue()
        arguments += ["--tls-cert", cert, "--tls-key", key]
        ca = ["--tls-ca", authority.ca]
    gate, delays_s, memory_bytes = tmp_path / "gate", [], []
    with ExitStack() as stack:
        # Given a worker that runs a job, and a job that waits
        server = stack.enter_context(start_server(tmp_path, *arguments, preexec_fn=few_files))
        stack.enter_context(start_worker(server, "--lease-ttl", "5", *ca, token=token_of(server, "worker")))
        operator = stack.enter_context(server.client(server.unix_url))
        running = operator.submit(subject="wait", payload=str(gate).encode())
        waiting = operator.submit(subject="a.nobody", watch=False).job_id
        until(lambda: operator.status(running.job_id)["state"] == "RUNNING")
        # When it is attacked
        options = {"tls": tls, "token": token_of(server, "client", "a.>"), "job_id": waiting}
        all_opened = tmp_path / "all-opened"
        began = time.monotonic()
        with attacked(server, **options, kinds=dict.fromkeys(kinds, EACH), all_opened=str(all_opened)) as opened:
            while time.monotonic() - began < attack_s or not all_opened.exists():
                assert time.monotonic() - began < attack_s + RAMP_MAX_S, "the attacker is too slow"
                delays_s.append(served_within(server))
                memory_bytes.append(server.rss_bytes())
                time.sleep(max(0.0, ROUND_S - delays_s[-1]))
        # Then operator and worker were served all the time, and the running job has its lease still
        print(opened, f"{max(delays_s):.2f} s, {max(memory_bytes) / 1e6:.0f} MB")
        assert max(delays_s) <= SERVED_S, sorted(delays_s)[-5:]
        assert max(memory_bytes) < MEMORY_MAX_BYTES
        gate.touch()
        assert running.result(10.0) == b"the gate is open"
        assert operator.status(running.job_id)["attempt"] == 1


PLAIN = [kind for kind in attacker.FIRST if kind != "half TLS"]


def test_two_thousand_hostile_connections_of_each_kind(tmp_path: Path) -> None:
    withstand(tmp_path, PLAIN, 5.0)


def test_two_thousand_handshakes_that_do_not_end(tmp_path: Path) -> None:
    withstand(tmp_path, ["silent", "half TLS"], 3.0, tls=True)


@pytest.mark.soak
def test_a_minute_of_hostile_connections_of_all_kinds(tmp_path: Path) -> None:
    withstand(tmp_path, attacker.FIRST, 60.0, tls=True)
