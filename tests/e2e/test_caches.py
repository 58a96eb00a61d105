"""Files of caches, with real processes: put to workers over TCP and HTTP, used by jobs, and what dies on the way."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tasuki import Client
from tasuki.cli.output import ExitCode
from tasuki.core.job import InputFile
from tests.conftest import Require
from tests.e2e.stage import SOON_S, in_background, stdout_of, wait_until_met
from tests.support.disks import small_disk
from tests.support.processes import ServerProcess, WorkerProcess, start_server, start_servers, start_worker, url_of
from tests.support.s3_service import S3Service
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

MIB = 1024 * 1024
DISK_BYTES = 96 * MIB  # of a small disk; a worker keeps 64 MiB of it free
READ = 'read=/bin/sh -c \'cat "$0"; stat -c %h,%a "$0"\' {file}'
LINKS = "links=/usr/bin/stat -c '%h %a %s' {file}"
BOTH = "both=/bin/cat {files}"
SPOIL = 'spoil=/bin/sh -c \'chmod u+w "$0"; echo spoilt > "$0"\' {file}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start_server(tmp_path_factory.mktemp("caches"), "--lease-ttl", "3", "--http", "127.0.0.1:0", "--insecure") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def disk(tmp_path: Path, require: Require) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES, require) as disk:
        yield disk


def worker(server: ServerProcess, folder: Path, name: str, subject: str, *arguments: str, **options: Any) -> WorkerProcess:
    more = (
        "--worker-id",
        name,
        "--subject",
        f"{subject}.>",
        "--data",
        str(folder / name),
        "--exec",
        READ,
        "--exec",
        SPOIL,
        "--exec",
        LINKS,
        "--exec",
        BOTH,
    )
    return start_worker(options.pop("to", server), *more, *arguments, command=True, log=folder / f"{name}.log", **options)


def assets(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / "assets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "assets"


def put(server: ServerProcess, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `tasuki cache put --json`; return its exit code and the status of each worker."""
    done = server.tasuki("cache", "put", "--json", *arguments, timeout=120.0)
    return done.returncode, {one["worker_id"]: one["status"] for one in json.loads(done.stdout)["workers"]}


def output(client: Client, exec_: str, subject: str, file: InputFile) -> list[str]:
    return stdout_of(client.submit(exec=exec_, subject=subject, files=[file], retries=0).result(SOON_S)).splitlines()


def test_workers_over_tcp_and_http_get_the_files_and_jobs_are_given_links(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    folder = assets(tmp_path, **{"a.txt": "one", "deep/b.txt": "two", "empty": ""})
    http = {"to": server.http_url, "token": server.create_token("worker")}
    with (
        worker(server, tmp_path, "tcp", "first"),
        worker(server, tmp_path, "http", "first", "--cache", str(tmp_path / "elsewhere"), **http),
        worker(server, tmp_path, "other", "second"),
    ):
        assert put(server, "scene", str(folder), "--target", "first.>") == (0, {"tcp": "OK", "http": "OK"})
        assert put(server, "scene", str(folder), "--target", "first.>") == (0, {"tcp": "SKIPPED", "http": "SKIPPED"})
        for cache in (tmp_path / "tcp" / "cache", tmp_path / "elsewhere"):
            kept = {str(path.relative_to(cache)): path.read_text() for path in cache.glob("scene/**/*") if path.is_file()}
            assert kept == {"scene/assets/a.txt": "one", "scene/assets/deep/b.txt": "two", "scene/assets/empty": ""}
        ran = server.tasuki("run", "--subject", "first.tcp", "--file", "scene:assets/deep/b.txt", "read")
        assert ran.stdout.startswith("two3,444"), ran.stderr  # in .blobs, below its name, and in the run folder
        late = InputFile("b", cache=("scene", "assets/deep/b.txt"))
        assert output(client, "read", "second.other", late) == ["two2,444"]
        # Names are not overwritten, and what is there stays.
        changed = server.tasuki("cache", "put", "scene", str(assets(tmp_path, **{"a.txt": "changed"})), "--target", "first.>")
        assert changed.returncode == ExitCode.FAILED
        assert changed.stdout.count("FAILED  CACHE_CONFLICT: ") == 2
        [listed] = json.loads(server.tasuki("cache", "list", "--json").stdout)
        assert [listed[name] for name in ("cache_id", "files", "size_bytes", "target")] == ["scene", 3, 6, "first.>"]
        unknown = server.tasuki("submit", "--subject", "first.tcp", "--file", "scene:nothing", "read")
        assert "scene:nothing" in unknown.stderr
        assert unknown.returncode == ExitCode.NOT_FOUND
        assert "removed scene (3 files)" in server.tasuki("cache", "rm", "scene").stdout
        until(lambda: not (tmp_path / "tcp" / "cache" / "scene").exists(), SOON_S, "the worker removes the cache")
        assert list((tmp_path / "tcp" / "cache" / ".blobs").iterdir()) == []


def test_one_command_names_a_file_of_a_cache_and_one_of_its_own_folder(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "input.txt").write_text("from here")
    monkeypatch.chdir(tmp_path)
    with worker(server, tmp_path, "w", "mixed"):
        assert put(server, "mixed", str(assets(tmp_path, a="from the cache, ")), "--target", "mixed.>") == (0, {"w": "OK"})
        ran = server.tasuki("run", "--subject", "mixed.w", "--file", "mixed:assets/a", "--file", "./input.txt", "both")
        assert (ran.returncode, ran.stdout) == (0, "from the cache, from here"), ran.stderr


def test_a_job_that_writes_into_its_input_harms_no_other_job(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    folder, gate, runs = assets(tmp_path, a="right"), tmp_path / "gate", tmp_path / "runs"
    slow = f"""slow=/bin/sh -c 'echo run >> {runs}; until [ -e {gate} ]; do sleep 0.02; done; cat "$0"' {{file}}"""
    with worker(server, tmp_path, "w", "spoils", "--slots", "2", "--exec", slow):
        assert put(server, "spoiled", str(folder), "--target", "spoils.>") == (0, {"w": "OK"})
        job: dict[str, Any] = {
            "subject": "spoils.w",
            "files": [InputFile("a", cache=("spoiled", "assets/a"))],
            "retries": 0,
            "max_losses": 0,
        }
        reader = client.submit(exec="slow", **job)
        until(runs.exists, SOON_S, "the other job has the file")
        client.submit(exec="spoil", **job).result(SOON_S)  # run again with a copy of its own, as the other one
        gate.touch()
        assert stdout_of(reader.result(SOON_S)) == "right"
        assert runs.read_text().split() == ["run", "run"]
        assert reader.status().attempt == 1
        assert output(client, "read", "spoils.w", job["files"][0])[0].startswith("right")


@pytest.mark.parametrize("subject", ["read", "plain.read"])
def test_a_handler_whose_input_another_one_writes_into_is_run_again(
    server: ServerProcess, client: Client, tmp_path: Path, subject: str
) -> None:
    folder, gate = assets(tmp_path, a="right"), tmp_path / "gate"
    runs = tmp_path / "gate.runs"
    with start_worker(server, "--plain", "--worker-id", "handlers"):
        assert put(server, subject, str(folder), "--target", subject) == (0, {"handlers": "OK"})
        files = [InputFile("a", cache=(subject, "assets/a"))]
        reader = client.submit(subject=subject, payload=str(gate).encode(), files=files, retries=0)
        until(runs.exists, SOON_S, "the other job has the file")
        client.submit(subject="spoil", files=files, retries=0).result(SOON_S)
        gate.touch()
        assert reader.result(SOON_S) == b"right"
        assert [line.split()[:2] for line in runs.read_text().splitlines()] == [[reader.job_id, "1"]] * 2


def test_a_worker_that_is_killed_at_half_goes_on_when_it_is_back(server: ServerProcess, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(MIB) * 192)
    victim = worker(server, tmp_path, "victim", "kills")
    cache = tmp_path / "victim" / "cache"
    command = ("large", str(large), "--target", "kills.>")
    with worker(server, tmp_path, "witness", "kills"), in_background(put, server, *command) as end:
        with victim:
            until(lambda: any(part.stat().st_size > MIB for part in cache.glob(".incoming/*.part")), 60.0, "some of it is there")
            victim.kill()
        with worker(server, tmp_path, "victim", "kills"):
            assert end.result(120.0) == (0, {"victim": "OK", "witness": "OK"})
            assert (cache / "large" / "large").read_bytes() == large.read_bytes()


def test_of_two_puts_of_one_id_at_once_the_same_files_are_both_there_and_others_are_refused(
    server: ServerProcess, tmp_path: Path
) -> None:
    same = [assets(tmp_path / "one", a="same", b="first"), assets(tmp_path / "two", a="same", c="second")]
    other = assets(tmp_path / "three", a="another")
    with worker(server, tmp_path, "w", "twice"):
        target = ("--target", "twice.>")
        with ExitStack() as stack:
            ends = [stack.enter_context(in_background(put, server, "twice", str(folder), *target)) for folder in same]
            assert [end.result(120.0)[0] for end in ends] == [0, 0]
        with ExitStack() as stack:
            command = ("cache", "put", "twice", str(other), *target)
            ends = [stack.enter_context(in_background(server.tasuki, *command)) for _ in range(2)]
            assert all("CACHE_CONFLICT" in end.result(120.0).stdout for end in ends)
        cache = tmp_path / "w" / "cache" / "twice" / "assets"
        assert {path.name: path.read_text() for path in cache.iterdir()} == {"a": "same", "b": "first", "c": "second"}


def test_files_are_put_while_jobs_use_others_of_the_cache(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    with worker(server, tmp_path, "w", "busy", "--slots", "4"):
        put(server, "grows", str(assets(tmp_path, **{"0": "text 0"})), "--target", "busy.>")
        jobs = []
        for number in range(1, 6):
            file = InputFile("a", cache=("grows", f"assets/{number - 1}"))
            jobs += [client.submit(exec="read", subject="busy.w", files=[file], retries=0) for _ in range(8)]
            told = put(server, "grows", str(assets(tmp_path, **{str(number): f"text {number}"})), "--target", "busy.>")
            assert told == (0, {"w": "OK"})
        texts = [stdout_of(job.result(SOON_S))[:6] for job in jobs]
        assert texts == [f"text {number}" for number in range(5) for _ in range(8)]


def test_a_worker_without_room_fails_alone_and_the_requirement_decides(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(2 * MIB))
    with worker(server, tmp_path, "roomy", "room"), worker(server, tmp_path, "tight", "room", "--cache-max", "1MiB"):
        command = ("full", str(large), "--target", "room.>")
        assert put(server, *command, "--require", "1") == (0, {"roomy": "OK", "tight": "FAILED"})
        done = server.tasuki("cache", "put", *command, timeout=120.0)
        assert done.returncode == ExitCode.FAILED
        assert "DISK_FULL" in done.stdout
        # Its jobs get a copy of their own.
        file = InputFile("a", cache=("full", "large"))
        for name, links in (("tight", 1), ("roomy", 3)):
            job = client.submit(exec="links", subject=f"room.{name}", files=[file], retries=0)
            assert stdout_of(job.result(SOON_S)).split() == [str(links), "444", str(2 * MIB)]


def test_a_full_disk_fails_its_worker_alone_and_harms_nothing_there(server: ServerProcess, tmp_path: Path, disk: Path) -> None:
    cache = disk / "cache"
    filler = disk / "filler"
    large = tmp_path / "large"
    large.write_bytes(os.urandom(4 * MIB))
    with worker(server, tmp_path, "roomy", "disk"), worker(server, tmp_path, "full", "disk", "--cache", str(cache)):
        assert put(server, "small", str(assets(tmp_path, a="kept")), "--target", "disk.>") == (0, {"roomy": "OK", "full": "OK"})
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        command = ("big", str(large), "--target", "disk.>")
        done = server.tasuki("cache", "put", "--json", *command, timeout=120.0)
        told = {one["worker_id"]: one for one in json.loads(done.stdout)["workers"]}
        assert done.returncode == ExitCode.FAILED
        assert {name: one["status"] for name, one in told.items()} == {"roomy": "OK", "full": "FAILED"}
        assert "DISK_FULL" in json.dumps(told["full"])
        assert not (cache / "big").exists()
        filler.unlink()
        # The worker goes on, and what it had is as it was, or was evicted and is fetched again.
        assert put(server, *command) == (0, {"roomy": "SKIPPED", "full": "OK"})
        assert (cache / "big" / "large").read_bytes() == large.read_bytes()
        assert put(server, "small", str(tmp_path / "assets"), "--target", "disk.>")[0] == 0
        assert (cache / "small" / "assets" / "a").read_text() == "kept"


def test_a_file_that_is_put_replaces_no_file_that_a_running_job_uses(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    gate, started = tmp_path / "gate", tmp_path / "started"
    used, other = tmp_path / "used", tmp_path / "other"
    for path in (used, other):
        path.write_bytes(os.urandom(MIB // 2) + b"end")
    slow = f"""hash=/bin/sh -c 'touch {started}; until [ -e {gate} ]; do sleep 0.02; done; sha256sum < "$0"' {{file}}"""
    with worker(server, tmp_path, "w", "evicts", "--exec", slow, "--cache-max", "1MiB"):
        assert put(server, "used", str(used), "--target", "evicts.>") == (0, {"w": "OK"})
        job = client.submit(exec="hash", subject="evicts.w", files=[InputFile("a", cache=("used", "used"))], retries=0)
        until(started.exists, SOON_S, "the job has the file")
        full = server.tasuki("cache", "put", "other", str(other), "--target", "evicts.>", timeout=120.0)
        assert full.returncode == ExitCode.FAILED
        assert "FAILED  DISK_FULL" in full.stdout
        gate.touch()
        assert stdout_of(job.result(SOON_S)).split()[0] == hashlib.sha256(used.read_bytes()).hexdigest()
        runs = tmp_path / "w" / "runs"
        until(lambda: not list(runs.glob("*/[!.]*")), SOON_S, "the job's folder is removed")
        assert put(server, "other", str(other), "--target", "evicts.>") == (0, {"w": "OK"})
        assert (tmp_path / "w" / "cache" / "other" / "other").read_bytes() == other.read_bytes()
        assert not (tmp_path / "w" / "cache" / "used" / "used").exists()


def test_a_client_over_http_puts_files(server: ServerProcess, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(20 * MIB))  # more than one request carries
    with worker(server, tmp_path, "tcp", "web"):
        command = ("web", str(large), "--target", "web.>", "--to", server.http_url)
        assert put(server, *command) == (0, {"tcp": "OK"})
        assert (tmp_path / "tcp" / "cache" / "web" / "large").read_bytes() == large.read_bytes()
        assert put(server, *command) == (0, {"tcp": "SKIPPED"})
        assert [one["cache_id"] for one in json.loads(server.tasuki("cache", "list", "--json", "--to", server.http_url).stdout)]
        assert "(1 files)" in server.tasuki("cache", "rm", "web", "--to", server.http_url).stdout


def test_workers_of_two_servers_get_the_files_though_one_is_killed(tmp_path: Path, postgres_url: str, s3: S3Service) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(MIB) * 96)
    options: dict[str, Any] = {"store": postgres_url, "blobs": s3.url(), "env": s3.environment}
    with ExitStack() as stack:
        servers = stack.enter_context(start_servers(tmp_path, 2, "--lease-ttl", "3", "--lead-ttl", "2", **options))
        wait_until_met(servers)
        victim, survivor = servers
        for name, place in (("first", servers), ("second", servers[::-1]), ("alone", [survivor])):
            stack.enter_context(worker(victim, tmp_path, name, "pair", to=place))
        everybody = {"first", "second", "alone"}
        for server in servers:
            until(
                lambda s=server: {one["worker_id"] for one in json.loads(s.tasuki("workers", "--json").stdout)} == everybody,
                SOON_S,
            )
        small = ("small", str(assets(tmp_path, a="small")), "--target", "pair.>")
        assert put(victim, *small) == (0, dict.fromkeys(everybody, "OK"))
        code, told = put(survivor, *small)
        assert (code, told.keys()) == (0, everybody)
        command = ("large", str(large), "--target", "pair.>", "--to", url_of(servers))
        end = stack.enter_context(in_background(put, survivor, *command))
        parts = tmp_path / "first" / "cache" / ".incoming"
        until(lambda: any(part.stat().st_size > MIB for part in parts.glob("*.part")), 60.0, "some of it is there")
        victim.kill()
        code, told = end.result(120.0)
        assert code == 0
        # Who had all of it when the client came to the other server has been SKIPPED there.
        assert {name: status.replace("SKIPPED", "OK") for name, status in told.items()} == dict.fromkeys(everybody, "OK")
        for name in everybody:
            assert (tmp_path / name / "cache" / "large" / "large").read_bytes() == large.read_bytes()
