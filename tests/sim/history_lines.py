"""Lines of a history in few words, for tests of the checker: everything that a test does not name has a value that fits the rest.

    told(submitted(), granted(), began(), finished(), row("SUCCEEDED"))

is one job that runs once. `told` gives the lines their times, one second apart, unless they have one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from tasuki.core.job import LEASED
from tasuki.testing.sim.checker import Checker
from tasuki.testing.sim.history import (
    AnsweredEvent,
    AnyLine,
    ArrivedEvent,
    AskedEvent,
    BeganEvent,
    BusyEvent,
    CanceledEvent,
    ConfirmedEvent,
    DeniedEvent,
    EndedEvent,
    FaultEvent,
    GoneEvent,
    GrantedEvent,
    HealedEvent,
    LeadingEvent,
    LedEvent,
    ProcessEvent,
    ReapedEvent,
    RemovedEvent,
    ReportedEvent,
    RequeuedEvent,
    RowEvent,
    SettledEvent,
    ShownEvent,
    SubmittedEvent,
    TookOverEvent,
)

UNSTAMPED = -1.0
HEALED = HealedEvent(at=UNSTAMPED)
WALL = 1_700_000_000.0


def told(*lines: AnyLine | Iterable[AnyLine]) -> list[AnyLine]:
    """The history of these lines, in this order."""
    flat: list[AnyLine] = []
    for line in lines:
        flat += line if isinstance(line, list) else [line]  # type: ignore[list-item]
    return [replace(line, at=float(n)) if line.at == UNSTAMPED else line for n, line in enumerate(flat)]


def broken(lines: Iterable[AnyLine], **options: Any) -> list[str]:
    """The invariants that a history breaks, each once."""
    checker = Checker(**options).check(lines)
    return sorted({violation.invariant for violation in checker.violations}, key=_order)


def _order(invariant: str) -> tuple[int, str]:
    number = re.search(r"\d+", invariant)
    return (int(number[0]) if number else 99, invariant)


def _line(kind: type[Any], given: dict[str, Any], **usual: Any) -> Any:
    return kind(**{"at": UNSTAMPED, **usual, **given})


def lease_of(job_id: str, attempt: int) -> str:
    return f"{job_id}.{attempt}"


# ---------------------------------------------------------------------------------------------------- the store's commits


def submitted(job_id: str = "j", **given: Any) -> SubmittedEvent:
    return _line(SubmittedEvent, given, job_id=job_id, body="body", created=True)


def repeated(job_id: str = "j", **given: Any) -> SubmittedEvent:
    return submitted(job_id, **{"created": False, **given})


def granted(job_id: str = "j", attempt: int = 1, worker: str = "w1", **given: Any) -> GrantedEvent:
    usual = {"worker_id": worker, "incarnation": "life 1", "generation": 0, "wall": WALL}
    return _line(GrantedEvent, given, job_id=job_id, attempt=attempt, lease_id=lease_of(job_id, attempt), **usual)


def shown(verb: str = "renew", job_id: str = "j", attempt: int = 1, worker: str = "w1", **given: Any) -> ShownEvent:
    usual = {"worker_id": worker, "incarnation": "life 1", "held": True}
    return _line(ShownEvent, given, verb=verb, job_id=job_id, attempt=attempt, lease_id=lease_of(job_id, attempt), **usual)


def finished(job_id: str = "j", attempt: int = 1, worker: str = "w1", **given: Any) -> ReportedEvent:
    usual = {"worker_id": worker, "accepted": True, "state": "SUCCEEDED", "result_sha256": f"sha of {job_id}.{attempt}"}
    return _line(ReportedEvent, given, verb="finish", job_id=job_id, attempt=attempt, lease_id=lease_of(job_id, attempt), **usual)


def failed(job_id: str = "j", attempt: int = 1, worker: str = "w1", **given: Any) -> ReportedEvent:
    usual = {"worker_id": worker, "accepted": True, "state": "PENDING"}
    return _line(ReportedEvent, given, verb="fail", job_id=job_id, attempt=attempt, lease_id=lease_of(job_id, attempt), **usual)


def reaped(job_id: str = "j", attempt: int = 1, worker: str = "w1", **given: Any) -> ReapedEvent:
    return _line(ReapedEvent, given, job_id=job_id, attempt=attempt, worker_id=worker, state="PENDING")


def canceled(job_id: str = "j", state: str = "CANCELED", **given: Any) -> CanceledEvent:
    return _line(CanceledEvent, given, job_id=job_id, state=state)


def requeued(job_id: str = "j", generation: int = 1, **given: Any) -> RequeuedEvent:
    return _line(RequeuedEvent, given, job_id=job_id, done=True, generation=generation)


def removed(job_id: str = "j") -> RemovedEvent:
    return RemovedEvent(at=UNSTAMPED, job_id=job_id)


def took_over(server: str = "s1", epoch: int = 1, **given: Any) -> TookOverEvent:
    return _line(TookOverEvent, given, server_id=server, epoch=epoch, done=True)


def led(server: str = "s1", epoch: int = 1, **given: Any) -> LedEvent:
    return _line(LedEvent, given, server_id=server, epoch=epoch, done=True)


def row(state: str, job_id: str = "j", attempt: int = 1, **given: Any) -> RowEvent:
    usual: dict[str, Any] = {"generation": 0, "failures": 0, "losses": 0, "max_retries": 3, "max_losses": 3}
    if state in LEASED or state == "ORPHANED":
        usual["lease_id"] = lease_of(job_id, attempt)
    if state == "SUCCEEDED":
        usual["result_sha256"] = f"sha of {job_id}.{attempt}"
    if state in ("FAILED", "TIMED_OUT"):
        usual["error_code"] = "EXIT_CODE"
    return _line(RowEvent, given, state=state, job_id=job_id, attempt=attempt, **usual)


# ---------------------------------------------------------------------------------------------------- clients


def asked(verb: str = "submit", *job_ids: str, call: str = "", **given: Any) -> AskedEvent:
    job_ids = job_ids or ("j",)
    call = call or f"{verb} {' '.join(job_ids)}"
    bodies = ("body",) * len(job_ids) if verb in ("submit", "rerun") else ()
    return _line(AskedEvent, given, client="c1", call=call, verb=verb, job_ids=job_ids, bodies=bodies)


def answered(verb: str = "submit", *job_ids: str, call: str = "", **given: Any) -> AnsweredEvent:
    """The answer to `asked` with the same words."""
    job_ids = job_ids or ("j",)
    call = call or f"{verb} {' '.join(job_ids)}"
    accepted = job_ids if given.get("answer", "ok") == "ok" else ()
    return _line(AnsweredEvent, given, client="c1", call=call, answer="ok", accepted=accepted)


def arrived(job_id: str = "j", attempt: int = 1, state: str = "SUCCEEDED", **given: Any) -> ArrivedEvent:
    sha256 = f"sha of {job_id}.{attempt}" if state == "SUCCEEDED" else None
    return _line(ArrivedEvent, given, client="c1", job_id=job_id, state=state, attempt=attempt, result_sha256=sha256)


# ---------------------------------------------------------------------------------------------------- workers, the world


def began(job_id: str = "j", attempt: int = 1, worker: str = "w1", **given: Any) -> BeganEvent:
    usual = {"worker_id": worker, "incarnation": "life 1", "lease_id": lease_of(job_id, attempt)}
    return _line(BeganEvent, given, job_id=job_id, attempt=attempt, **usual)


def gone(job_id: str = "j", attempt: int = 1, worker: str = "w1", how: str = "ended", **given: Any) -> GoneEvent:
    usual = {"worker_id": worker, "incarnation": "life 1", "lease_id": lease_of(job_id, attempt)}
    return _line(GoneEvent, given, job_id=job_id, attempt=attempt, how=how, **usual)


def promised(job_id: str = "j", attempt: int = 1, for_s: float = 1.0, **given: Any) -> ConfirmedEvent:
    return _line(ConfirmedEvent, given, job_id=job_id, attempt=attempt, lease_id=lease_of(job_id, attempt), for_s=for_s)


def denied(job_id: str = "j", attempt: int = 1, **given: Any) -> DeniedEvent:
    return _line(DeniedEvent, given, job_id=job_id, attempt=attempt)


def settled(job_id: str = "j", attempt: int = 1, worker: str = "w1", *, recorded: bool = True) -> SettledEvent:
    return SettledEvent(at=UNSTAMPED, worker_id=worker, lease_id=lease_of(job_id, attempt), recorded=recorded)


def busy(attempts: int, capacity: int, **given: Any) -> BusyEvent:
    return _line(BusyEvent, given, worker_id="w1", attempts=attempts, capacity=capacity)


def process(what: str, name: str = "w1") -> ProcessEvent:
    return ProcessEvent(at=UNSTAMPED, name=name, what=what)


def fault(kind: str = "partition") -> FaultEvent:
    return FaultEvent(at=UNSTAMPED, fault=kind)


def leading(server: str = "s1", epoch: int = 1) -> LeadingEvent:
    return LeadingEvent(at=UNSTAMPED, server_id=server, epoch=epoch)


def ended(**given: Any) -> EndedEvent:
    return _line(EndedEvent, given)
