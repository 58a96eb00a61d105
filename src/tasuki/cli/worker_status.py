"""`tasuki worker status`: the workers of a data folder, from their status files and the results that wait on disk.

Asks no server: people ask when none can be reached.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasuki.cli.command import command, data_option
from tasuki.cli.output import ExitCode, Output, plain, table, when
from tasuki.cli.worker_service import systemctl

if TYPE_CHECKING:
    from tasuki.worker.status import Status

RUNNING, DRAINING, ALONE, GONE = "running", "draining", "not connected", "not running"
UNITS = "tasuki-worker*.service"


class WorkerReport(NamedTuple):
    """One worker; without a status if only its results are left."""

    worker_id: str
    status: Status | None
    results_waiting: int

    @property
    def state(self) -> str:
        """Return one of RUNNING, DRAINING, ALONE and GONE."""
        if self.status is None or not self.status.alive:
            return GONE
        if self.status.connection.connected_since is None:
            return ALONE
        return DRAINING if self.status.draining else RUNNING


@command("worker status", examples=["tasuki worker status", "tasuki worker status --data ~/render --json"])
@data_option
def status(output: Output, data: Path | None) -> int:
    """Show how the workers of this data folder are.

    Exit code 0: one runs and is connected, and none is not; 5: one is not connected; 3: none runs.
    """
    from tasuki.config import data_folder

    root = data_folder(data).root
    found, rejected, tokens, services = workers_of(root), count_rejected(root), list(tokens_of(root)), list(services_here())
    described = {
        "data": str(root),
        "workers": [_described(one) for one in found],
        "results_kept_aside": rejected,
        "tokens": tokens,
        "services": services,
    }
    output.show(described, lambda: _lines(root, found, rejected, tokens, services))
    states = {one.state for one in found} - {GONE}
    return ExitCode.NOT_FOUND if not states else ExitCode.UNAVAILABLE if ALONE in states else ExitCode.OK


def workers_of(root: Path) -> list[WorkerReport]:
    """Return the workers that have a status, and those whose results wait."""
    from tasuki.worker.status import read_all

    waiting = _results_waiting(root)
    found = [WorkerReport(one.worker_id, one, waiting.pop(one.worker_id, 0)) for one in read_all(root)]
    return [*found, *(WorkerReport(worker_id, None, count) for worker_id, count in waiting.items() if count)]


def _results_waiting(root: Path) -> dict[str, int]:
    from tasuki.worker.outbox import OUTBOX_FOLDER

    folder = root / OUTBOX_FOLDER
    if not folder.is_dir():
        return {}
    return {one.name: sum(1 for _ in one.glob("*.ending")) for one in sorted(folder.iterdir()) if one.is_dir()}


def count_rejected(root: Path) -> int:
    """Return how many results were refused, and are kept for people."""
    from tasuki.worker.outbox import REJECTED_FOLDER

    folder = root / REJECTED_FOLDER
    return sum(1 for one in folder.iterdir() if not one.name.startswith(".")) if folder.is_dir() else 0


def tokens_of(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the tokens of the enrolled workers, without the secrets."""
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
    """Yield the units of `tasuki worker install`, of all data folders, as systemd sees them."""
    answer = systemctl("list-units", "--all", "--plain", "--no-legend", "--no-pager", UNITS)
    for line in answer.text.splitlines() if answer is not None and answer.code == 0 else ():
        words = line.split(None, 4)
        if len(words) >= 4:
            yield {"unit": words[0], "active": words[2], "sub": words[3]}


def _described(found: WorkerReport) -> dict[str, Any]:
    import msgspec

    reported: dict[str, Any] = {} if found.status is None else msgspec.to_builtins(found.status)
    return {**reported, "worker_id": found.worker_id, "state": found.state, "results_waiting": found.results_waiting}


def _lines(
    root: Path, found: list[WorkerReport], rejected: int, tokens: list[dict[str, Any]], services: list[dict[str, str]]
) -> Iterator[str]:
    if not found:
        yield f"no worker has run on {root}; --data says another folder"
    for one in found:
        yield from _worker_lines(one)
    if rejected:
        yield f"{rejected} result(s) that were refused are kept in {root / 'kept-aside'}"
    for token in tokens:
        named = f"token {token['token_id']} for {token['server']}: " if token["token_id"] else ""
        yield f"{named}{token['problem'] or 'valid until ' + when(token['expires_at']) + ', renewed before'}"
    for service in services:
        yield f"service {service['unit']}: {service['active']} ({service['sub']})"


def _worker_lines(found: WorkerReport) -> Iterator[str]:
    reported = found.status
    wait = f"{found.results_waiting} result(s) wait on disk"
    if reported is None or found.state == GONE:
        ended = ""
        if reported is not None:
            ended = f" since {when(reported.ended_at)}" if reported.ended_at else f" (pid {reported.pid} is gone without a word)"
        offered = "; its next start offers them" if found.results_waiting else ""
        yield f"{found.worker_id}: not running{ended}; {wait}{offered}"
        if reported is not None and reported.error:
            yield f"  it ended with: {plain(reported.error)}"
        return
    connection = reported.connection
    yield f"{found.worker_id}: {found.state}, pid {reported.pid}, since {when(reported.since)}"
    if connection.connected_since is not None:
        yield f"  connected to {connection.address or connection.server} since {when(connection.connected_since)}"
    elif connection.error_at is not None:
        tried = f"tried {connection.tries} time(s), last at {when(connection.error_at)}"
        yield f"  no connection to {connection.server}, {tried}: {plain(connection.error)}"
    else:
        yield f"  connecting to {connection.server}"
    yield f"  {reported.running} job(s) run; {wait}"
    if reported.jobs:
        rows = ((job.job_id, job.attempt, job.subject, when(job.since)) for job in reported.jobs)
        yield from (f"  {line}" for line in table(("JOB", "ATTEMPT", "SUBJECT", "SINCE"), rows))
