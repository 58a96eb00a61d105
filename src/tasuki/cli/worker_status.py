"""`tasuki worker status`: how the workers of a data folder are, from what they say of themselves and from what lies on disk.

Asks no server: it works when there is none to be reached, which is when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from tasuki.cli import exit_codes, options
from tasuki.cli.command import command
from tasuki.cli.output import Output, plain, table, when
from tasuki.cli.systemd import systemctl

if TYPE_CHECKING:
    from tasuki.worker.status import Status

RUNNING, DRAINING, ALONE, GONE = "running", "draining", "not connected", "not running"
UNITS = "tasuki-worker*.service"


def add_to(below: typer.Typer) -> None:
    """Register the command."""
    examples = ["tasuki worker status", "tasuki worker status --data ~/render --json"]
    command(below, "status", examples=examples)(status)


class WorkerReport(NamedTuple):
    """One worker. `said` is None if only its results are left."""

    worker_id: str
    said: Status | None
    results_waiting: int

    @property
    def state(self) -> str:
        if self.said is None or not self.said.alive:
            return GONE
        if self.said.connection.connected_since is None:
            return ALONE
        return DRAINING if self.said.draining else RUNNING


def status(data: options.Data = None, json: options.Json = False) -> int:
    """How the workers of this data folder are.

    Exit code 0: one runs and is connected, and none is not; 5: one is not connected; 3: none runs.
    """
    from tasuki.config import data_folder

    root = data_folder(data).root
    found, aside, tokens, services = workers_of(root), kept_aside(root), list(tokens_of(root)), list(services_here())
    described = {
        "data": str(root),
        "workers": [_described(one) for one in found],
        "results_kept_aside": aside,
        "tokens": tokens,
        "services": services,
    }
    Output(json=json).show(described, lambda: _told(root, found, aside, tokens, services))
    states = {one.state for one in found} - {GONE}
    return exit_codes.NOT_FOUND if not states else exit_codes.UNAVAILABLE if ALONE in states else exit_codes.OK


# ---------------------------------------------------------------------------------------------------- what there is


def workers_of(root: Path) -> list[WorkerReport]:
    """Those that have said something, and those whose results wait."""
    from tasuki.worker.status import read_all

    waiting = _results_waiting(root)
    said = [WorkerReport(one.worker_id, one, waiting.pop(one.worker_id, 0)) for one in read_all(root)]
    return [*said, *(WorkerReport(worker_id, None, count) for worker_id, count in waiting.items() if count)]


def _results_waiting(root: Path) -> dict[str, int]:
    from tasuki.worker.outbox import OUTBOX_FOLDER

    folder = root / OUTBOX_FOLDER
    if not folder.is_dir():
        return {}
    return {one.name: sum(1 for _ in one.glob("*.ending")) for one in sorted(folder.iterdir()) if one.is_dir()}


def kept_aside(root: Path) -> int:
    """Results that were refused, and are kept for people."""
    from tasuki.worker.outbox import REJECTED_FOLDER

    folder = root / REJECTED_FOLDER
    return sum(1 for one in folder.iterdir() if not one.name.startswith(".")) if folder.is_dir() else 0


def tokens_of(root: Path) -> Iterator[dict[str, Any]]:
    """Of the workers that are enrolled; without the secrets."""
    from tasuki.errors import ConfigError
    from tasuki.worker.credentials import FOLDER, read_credential

    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            credential = read_credential(path)
        except ConfigError as error:
            yield {"server": "", "worker_id": "", "token_id": "", "expires_at": None, "problem": error.message}
            continue
        if credential is not None:
            token = credential.token
            yield {
                "server": credential.server,
                "worker_id": credential.worker_id,
                "token_id": token.token_id,
                "expires_at": token.expires_at,
                "problem": "" if token.left_s(time.time()) > 0 else "it has expired: enrol this worker again",
            }


def services_here() -> Iterator[dict[str, str]]:
    """Units of `tasuki worker install`, as systemd sees them; of which data folder they are, it does not know."""
    said = systemctl("list-units", "--all", "--plain", "--no-legend", "--no-pager", UNITS)
    for line in said.text.splitlines() if said is not None and said.code == 0 else ():
        words = line.split(None, 4)
        if len(words) >= 4:
            yield {"unit": words[0], "active": words[2], "sub": words[3]}


# ---------------------------------------------------------------------------------------------------- how it is told


def _described(found: WorkerReport) -> dict[str, Any]:
    import msgspec

    said: dict[str, Any] = {} if found.said is None else msgspec.to_builtins(found.said)
    return {**said, "worker_id": found.worker_id, "state": found.state, "results_waiting": found.results_waiting}


def _told(
    root: Path, found: list[WorkerReport], aside: int, tokens: list[dict[str, Any]], services: list[dict[str, str]]
) -> Iterator[str]:
    if not found:
        yield f"no worker has run on {root}; --data says another folder"
    for one in found:
        yield from _worker_lines(one)
    if aside:
        yield f"{aside} result(s) that were refused are kept in {root / 'kept-aside'}"
    for token in tokens:
        named = f"token {token['token_id']} for {token['server']}: " if token["token_id"] else ""
        yield f"{named}{token['problem'] or 'valid until ' + when(token['expires_at']) + ', renewed before'}"
    for service in services:
        yield f"service {service['unit']}: {service['active']} ({service['sub']})"


def _worker_lines(found: WorkerReport) -> Iterator[str]:
    said = found.said
    wait = f"{found.results_waiting} result(s) wait on disk"
    if said is None or found.state == GONE:
        ended = (
            ""
            if said is None
            else f" since {when(said.ended_at)}"
            if said.ended_at
            else f" (pid {said.pid} is gone without a word)"
        )
        offered = "; its next start offers them" if found.results_waiting else ""
        yield f"{found.worker_id}: not running{ended}; {wait}{offered}"
        if said is not None and said.error:
            yield f"  it ended with: {plain(said.error)}"
        return
    connection = said.connection
    yield f"{found.worker_id}: {found.state}, pid {said.pid}, since {when(said.since)}"
    if connection.connected_since is not None:
        yield f"  connected to {connection.address or connection.server} since {when(connection.connected_since)}"
    elif connection.error_at is not None:
        tried = f"tried {connection.tries} time(s), last at {when(connection.error_at)}"
        yield f"  no connection to {connection.server}, {tried}: {plain(connection.error)}"
    else:
        yield f"  connecting to {connection.server}"
    yield f"  {said.running} job(s) run; {wait}"
    if said.jobs:
        rows = ((job.job_id, job.attempt, job.subject, when(job.since)) for job in said.jobs)
        yield from (f"  {line}" for line in table(("JOB", "ATTEMPT", "SUBJECT", "SINCE"), rows))
