"""Large caches: 500 MB to four workers, one of which is killed at half and one of which is behind HTTPS; 10,000 files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.stage import in_background
from tests.support.certificates import TestAuthority
from tests.support.processes import (
    ChildProcess,
    ServerProcess,
    WorkerProcess,
    clean_environment,
    peak_bytes,
    start_server,
    start_worker,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.e2e]

MIB = 1024 * 1024
SIZE_MIB = 500
FILES = 10_000
PUT_S = 600.0
GROWTH_MAX_BYTES = 64 * MIB  # at the peak, of the server and each worker
CLIENT_MAX_BYTES = 128 * MIB


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def put(server: ServerProcess, *arguments: str) -> tuple[int, dict[str, str]]:
    done = server.tasuki("cache", "put", "--json", *arguments, timeout=PUT_S)
    return done.returncode, {one["worker_id"]: one["status"] for one in json.loads(done.stdout)["workers"]}


def put_watched(server: ServerProcess, *arguments: str) -> tuple[int, dict[str, str], int]:
    """Do a `put`; return the most memory that the client took, too."""
    env = {**clean_environment(), "TASUKI_URL": server.url, "TASUKI_TOKEN": server.token}
    command = [sys.executable, "-m", "tasuki", "cache", "put", "--json", *arguments]
    peak = 0
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while True:
            peak = max(peak, peak_bytes(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.02)
                break
        answer = json.loads(process.stdout.read())
    return code, {one["worker_id"]: one["status"] for one in answer["workers"]}, peak


def test_500_mb_reach_four_workers_one_of_which_dies_at_half_and_one_of_which_is_behind_https(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path / "ca")
    cert, key = authority.issue()
    large = tmp_path / "large"
    with large.open("wb") as file:
        for _ in range(SIZE_MIB):
            file.write(os.urandom(MIB))
    with start_server(tmp_path, "--http", "127.0.0.1:0", "--tls-cert", cert, "--tls-key", key) as server, ExitStack() as stack:

        def worker(name: str, *arguments: str, to: str | None = None) -> WorkerProcess:
            options = (
                "--exec",
                "true=/bin/true",
                "--worker-id",
                name,
                "--subject",
                "render.>",
                "--data",
                str(tmp_path / name),
                "--tls-ca",
                authority.ca,
            )
            token = server.tasuki("token", "create", "--kind", "worker", "--tls-ca", authority.ca).stdout.strip()
            return start_worker(to or server.url, *options, *arguments, command=True, token=token, log=tmp_path / f"{name}.log")

        watched: dict[str, ChildProcess] = {name: stack.enter_context(worker(name)) for name in ("first", "second")}
        watched |= {"nat": stack.enter_context(worker("nat", to=server.http_url)), "server": server}
        before_bytes = {name: process.rss_bytes() for name, process in watched.items()}
        with in_background(put_watched, server, "large", str(large), "--target", "render.>", "--tls-ca", authority.ca) as end:
            with worker("victim") as victim:
                cache = tmp_path / "victim" / "cache" / ".incoming"
                half = SIZE_MIB * MIB // 2
                until(lambda: any(part.stat().st_size > half for part in cache.glob("*.part")), PUT_S, "half of it is there")
                victim.kill()
            watched["victim"] = stack.enter_context(worker("victim"))
            before_bytes["victim"] = watched["victim"].rss_bytes()
            code, told, client_bytes = end.result(PUT_S)
            assert (code, told) == (0, dict.fromkeys(("first", "second", "nat", "victim"), "OK"))
        wanted = sha256_of(large)
        for name in ("first", "second", "nat", "victim"):
            assert sha256_of(tmp_path / name / "cache" / "large" / "large") == wanted
        growth = {name: peak_bytes(process.pid) - before_bytes[name] for name, process in watched.items()}
        print({name: f"+{size_bytes // MIB} MiB" for name, size_bytes in growth.items()}, f"client {client_bytes // MIB} MiB")
        assert max(growth.values()) < GROWTH_MAX_BYTES
        assert 0 < client_bytes < CLIENT_MAX_BYTES


def test_10_000_files_are_put_found_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number:05}").write_text("" if number % 10 == 0 else f"file {number}")
    with start_server(tmp_path) as server:
        options = ("--exec", "true=/bin/true", "--worker-id", "w", "--subject", "render.>", "--data", str(tmp_path / "w"))
        with start_worker(server, *options, command=True, log=tmp_path / "w.log"):
            assert put(server, "many", str(folder), "--target", "render.>") == (0, {"w": "OK"})
            kept = tmp_path / "w" / "cache" / "many" / "many"
            assert sorted(path.name for path in kept.iterdir()) == [f"{number:05}" for number in range(FILES)]
            assert (kept / "00000").read_bytes() == b""
            assert (kept / "09999").read_text() == "file 9999"
            assert put(server, "many", str(folder), "--target", "render.>") == (0, {"w": "SKIPPED"})
            assert f"removed many ({FILES} files)" in server.tasuki("cache", "rm", "many").stdout
            until(lambda: not kept.exists(), 60.0, "the worker removes the cache")
