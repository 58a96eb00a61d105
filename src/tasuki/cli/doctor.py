"""`tasuki doctor`: checks everything that tasuki needs on this machine, and says what to do about each problem."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tasuki.cli.command import Destination, command, connection_options, option
from tasuki.cli.connect import are_named, find_server, is_store, listening, open_agents_client, owner_of
from tasuki.cli.output import ExitCode, Output, table, visible
from tasuki.client.aio import AsyncClient
from tasuki.client.embedded import answers
from tasuki.config import DISK_FLOOR_BYTES, DISK_FLOOR_INODES, DataFolder, data_folder, default_url
from tasuki.core.address import shown_address
from tasuki.core.failover.events import WAY_IN
from tasuki.core.failover.nodes import NodeState, Ranked
from tasuki.errors import TasukiError

OK, WARN, FAIL = "ok", "warn", "fail"
PYTHON_OLDEST = (3, 11)
SQLITE_OLDEST = (3, 35, 0)  # RETURNING
CLOCK_OLDEST = 1_735_689_600  # 2025-01-01: a machine that believes in an earlier day has no clock
CONNECT_TIMEOUT_S = 3.0
KEYS_SHOWN = 20

T = TypeVar("T")
UNUSED_BYTES = 256 * 2**20  # less unused space in a database is not worth a compaction


class Finding(NamedTuple):
    """The result of one check."""

    state: str
    message: str
    way_out: str = ""
    """Ignored if the state is OK."""


@command(
    "doctor",
    examples=[
        "tasuki doctor",
        "tasuki doctor --data /srv/tasuki",
        "tasuki doctor --to tcp://host:7000 --json",
        "tasuki doctor --to agents:http://n1:7090,http://n2:7090",
        "tasuki doctor --store redis://127.0.0.1:6379/0      # would it keep what it is given?",
    ],
)
@connection_options(
    "Server or node agents (agents:…) to look at. Default: TASUKI_URL, else the one that runs on the data folder."
)
@option(
    "--store",
    metavar="URL",
    envvar="TASUKI_STORE",
    help="Look at this store too: redis://… and its settings, or postgresql://….",
)
def doctor(output: Output, place: Destination, store: str | None) -> int:
    """The token is checked too, and a shared store if one is named. Starts nothing; exit 1 if a check fails."""
    folder = data_folder(place.data)
    owner = owner_of(folder)
    findings = {
        "python": _python(),
        "sqlite": _sqlite(),
        "clock": _clock(),
        "keeper": _keeper(),
        "limits": _limits(),
        "data folder": _folder(folder),
        "disk": _disk(folder),
        "database": _database(folder),
        "token file": _token_file(folder),
        "owner": Finding(OK, f"{owner} owns the database" if owner else "no server runs on this folder"),
        "socket": _socket(folder),
        "server": _server(place, folder),
        **(_agents(place) if are_named(place) else {}),
        **(_shared(store) if store else {}),
    }
    ways_out = {check: "" if found.state == OK else found.way_out for check, found in findings.items()}

    def human() -> Iterator[str]:
        yield from table(("STATE", "CHECK", "FOUND"), ((found.state, check, found.message) for check, found in findings.items()))
        yield from (f"  {check}: {way_out}" for check, way_out in ways_out.items() if way_out)

    data = [{"check": check, **found._asdict(), "way_out": ways_out[check]} for check, found in findings.items()]
    output.show(data, human)
    return ExitCode.FAILED if any(found.state == FAIL for found in findings.values()) else ExitCode.OK


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= PYTHON_OLDEST
    return Finding(OK if good else FAIL, f"{version} at {sys.executable}", "install Python 3.11 or newer")


def _keeper() -> Finding:
    from tasuki.worker.keeper.keeper import level_here

    found = level_here()
    return Finding(WARN if found.level == "group" else OK, f"level {found.level}: {found.detail}", "run workers on Linux")


def _limits() -> Finding:
    """Check how `memory_mb` and `processes` of an exec would be kept here; the worker logs at its start how they are."""
    if sys.platform != "linux":
        message = "memory_mb and processes are not kept for a job as a whole: this is not Linux"
        return Finding(WARN, message, "run workers on Linux")
    from tasuki.worker.keeper.cgroup import NoCgroup, delegated, lacking

    try:
        base = delegated()
        missing = lacking(base)
        if missing:
            raise NoCgroup(f"{base} is handed no controller {' and '.join(missing)}")
    except (NoCgroup, OSError) as error:
        return Finding(OK, f"memory_mb and processes are looked at 20 times a second: {error}")
    return Finding(OK, f"memory_mb and processes are kept by a cgroup of each job, if no others live in {base}")


def _sqlite() -> Finding:
    import sqlite3

    good = sqlite3.sqlite_version_info >= SQLITE_OLDEST
    return Finding(OK if good else FAIL, sqlite3.sqlite_version, "use a Python that is linked with SQLite 3.35 or newer")


def _clock() -> Finding:
    now = time.time()
    good = now > CLOCK_OLDEST
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    return Finding(OK if good else FAIL, text, "set the machine's clock, best with NTP")


def _folder(folder: DataFolder) -> Finding:
    root = folder.root
    there = _nearest(root)
    problem = _write_problem(there)
    if problem:
        what = f"{root} cannot be {'written to' if there == root else 'made'}: {problem}"
        return Finding(FAIL, what, "choose another with --data")
    if there != root:
        return Finding(OK, f"{root} (not there yet; the first server makes it)")
    return Finding(OK, str(root))


def _nearest(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _write_problem(folder: Path) -> str:
    """Return why nothing can be written there, or "". A file is made, because rights alone do not show a read-only disk."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _disk(folder: DataFolder) -> Finding:
    found = os.statvfs(_nearest(folder.root))
    free = found.f_bavail * found.f_frsize
    text = f"{free // 2**20} MiB free, {found.f_favail} inodes"
    if free < DISK_FLOOR_BYTES or (found.f_files and found.f_favail < DISK_FLOOR_INODES):
        return Finding(FAIL, text, f"below {DISK_FLOOR_BYTES // 2**20} MiB the server refuses new jobs; make room")
    low = free < 10 * DISK_FLOOR_BYTES
    return Finding(WARN if low else OK, text, "make room soon" if low else "")


def _database(folder: DataFolder) -> Finding:
    if not folder.database.exists():
        return Finding(OK, f"{folder.database} (not there yet; the first server makes it)")
    from tasuki.stores.sql.sqlite_backup import space_of

    try:
        space = space_of(folder.database)
    except TasukiError as error:
        return Finding(WARN, f"{folder.database}: {error.message}", "ask its owner")
    text = f"{space.size_bytes / 2**20:.1f} MiB, {space.unused_bytes / 2**20:.1f} MiB of it unused"
    large = space.unused_bytes >= max(UNUSED_BYTES, space.size_bytes / 2)
    return Finding(WARN if large else OK, text, "stop its server and give the space back: tasuki compact")


def _token_file(folder: DataFolder) -> Finding:
    path = folder.token_file
    try:
        found = path.stat()
    except FileNotFoundError:
        return Finding(OK, f"{path} (not there yet; the first server makes it)")
    except OSError as error:
        return Finding(WARN, f"{path}: {error.strerror}", "it belongs to another user; use a token of your own")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        return Finding(FAIL, f"{path} can be read by others (mode {mode:04o})", f"chmod 600 {path}, revoke it, restart")
    return Finding(OK, f"{path} (mode {mode:04o})")


def _socket(folder: DataFolder) -> Finding:
    try:
        path = folder.socket
        if answers(path):
            return Finding(OK, f"unix://{path} answers")
    except TasukiError as error:
        return Finding(FAIL, error.message, "use a shorter --data folder of your own")
    if owner_of(folder):
        places = ", ".join(map(str, listening(folder))) or "nowhere that it noted"
        return Finding(WARN, f"the server does not answer on unix://{path}; it listens on {places}", "connect there with --to")
    return Finding(OK, "not open (no server)")


def _server(place: Destination, folder: DataFolder) -> Finding:
    """Connect as a client would, but never start a server for it."""

    if is_store(named := place.to or default_url()):
        return _store(str(named))
    if are_named(place):
        return Finding(OK, "none is named; node agents need none")
    try:
        url, token = find_server(place)
        if url is None and answers(folder.socket):
            url = f"unix://{folder.socket}"
        if url is None:
            return Finding(OK, "none; `tasuki run` starts an embedded one", "")

        async def look() -> tuple[str, float]:
            async with AsyncClient(url, token=token, tls_ca=place.tls_ca, connect_timeout_s=CONNECT_TIMEOUT_S) as client:
                assert client.welcome is not None
                kind = client.welcome.kind
                whom = "as its own user, without a token" if kind == "node" else f"with a token of kind {kind}"
                began = time.perf_counter()
                await client.call("find", limit=1)
                return f"{client.welcome.server_id}, {whom}", time.perf_counter() - began

        who, took_s = asyncio.run(look())
    except TasukiError as error:
        return Finding(FAIL, f"{error.code}: {error.message}", "start one with `tasuki up`, or check --to and the token")
    return Finding(OK, f"{shown_address(url)}: {who}, answers in {took_s * 1000:.1f} ms")


def _agents(place: Destination) -> dict[str, Finding]:
    """Check each node agent as a client does before a run: certificate, token, health, free slots."""

    async def look() -> list[Ranked]:
        async with open_agents_client(place) as client:
            return await client.ranking()

    def found(node: Ranked) -> Finding:
        if node.refusal is not None:
            return Finding(FAIL, node.last_answer, f"{WAY_IN}, or --tls-ca with its CA")
        if node.standing is NodeState.FULL or node.full:
            return Finding(WARN, f"full: {node.last_answer}", "wait, or start the agent with more --slots")
        if node.standing is NodeState.LEFT_OUT and node.steady:
            return Finding(
                WARN, f"well again, left out for {node.left_out_s:.0f} s more", "wait; it is used before, if no other is free"
            )
        healthy = node.standing is NodeState.FREE
        return Finding(OK if healthy else FAIL, node.last_answer, "start its agent, or see its log; check the address")

    try:
        return {node.node: found(node) for node in asyncio.run(look())}
    except TasukiError as error:
        return {"node agents": Finding(FAIL, f"{error.code}: {error.message}", "check --to and the token")}


def _shared(url: str) -> dict[str, Finding]:
    """Check a shared store, and in Redis what other programs may have written into it."""
    from tasuki.server.assembly import is_redis

    found = {"store": _store(url)}
    if is_redis(url) and found["store"].state != FAIL:
        found["store keys"] = _keys(url)
    return found


def _store(url: str) -> Finding:
    """Check a shared store; reads only, and makes nothing."""
    from tasuki.server.assembly import check_store, is_redis, open_postgresql_reader

    try:
        check_store(url)
        if is_redis(url):
            return _redis(url)
        reader = open_postgresql_reader(url)
        try:
            epoch, holder = reader.epoch()
        finally:
            reader.close()
    except TasukiError as error:
        return Finding(FAIL, f"{error.code}: {error.message}", "check --store, and whether it runs")
    return Finding(OK, f"PostgreSQL answers; epoch {epoch}, held by {holder or 'nobody'}")


def _asked(url: str, look: Callable[[Any, str], T]) -> T:
    """Return what `look` finds in a Redis, which gets a client and the server's name."""
    import redis

    from tasuki.stores.redis.connection import connect, name_of, translate

    where, client = name_of(url), connect(url, CONNECT_TIMEOUT_S)
    try:
        client.ping()
        return look(client, where)
    except redis.RedisError as error:
        raise translate(error, where, None) from None
    finally:
        client.close()


def _keys(url: str) -> Finding:
    """Check the keys for wrong types, leases in no index, and jobs in no queue."""
    from tasuki.stores.redis.key_check import check_keys

    try:
        found = _asked(url, lambda client, where: check_keys(client))
    except TasukiError as error:
        return Finding(FAIL, f"{error.code}: {error.message}", "check whether it runs, and the rights of its user")
    much = f"{found.looked_at} keys" + ("" if found.is_complete else ", and there are more")
    if not found.problems:
        return Finding(OK, f"{much}: all are as they should be")
    more = [f"and {len(found.problems) - KEYS_SHOWN} more"] if len(found.problems) > KEYS_SHOWN else []
    lines = ("docs/operate/redis.md describes how keys are spoilt", *map(visible, found.problems[:KEYS_SHOWN]), *more)
    return Finding(WARN, f"{much}: {len(found.problems)} keys or jobs are not as they should be", "\n    ".join(lines))


def _redis(url: str) -> Finding:
    """Check the settings of Redis, as a server does when it starts."""
    from tasuki.stores.redis.connection import look_at_settings, name_of

    where, found = name_of(url), _asked(url, look_at_settings)
    if found.problems:
        return Finding(WARN, f"{where}: {'; '.join(found.problems)}", "docs/operate/redis.md has the settings")
    if found.unknown:
        return Finding(WARN, f"{where}: could not check {', '.join(found.unknown)}", "ask its operator")
    return Finding(OK, f"{where} answers, and keeps what it is given")
