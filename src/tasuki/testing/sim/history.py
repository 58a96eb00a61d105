"""What happened, as one line of JSON each: the only thing that the checker (`checker.py`) looks at.

A history is written by whoever watches a system run: the simulator, which sees everything, or a test with real processes, which
has the rows of the database, what clients were told and what the jobs themselves noted. Lines stand in the order in which things
happened; commits of one store in the order of their commits, and what a commit did before the rows that it left. What an observer
cannot see it leaves out: the checker judges what is there, and says which invariants it had evidence for. But of each kind of
line an observer tells all or none: the checker takes it that after the first line of a kind none of that kind is missing
(`WatchingEvent` says so from the start, also of kinds of which there may be none). Events that excuse others are never left out:
`RemovedEvent`, `ProcessEvent` and `DriftedEvent` are told by the observer of the jobs and processes that they concern.

Three voices. Store lines tell what a committed transaction did (`SubmittedEvent` … `FiredEvent`). Client and worker lines tell
what those processes saw (`AskedEvent` … `ArrivedEvent`, `BeganEvent` … `BusyEvent`). World lines tell what was done to them
(`FaultEvent`, `HealedEvent`, `EndedEvent`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO

import msgspec


def kind_of(name: str) -> str:
    """Return the kind by which a history file names the events of a class: `tookover` for `TookOverEvent`."""
    return name.lower().removesuffix("event")


class HistoryLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=kind_of, omit_defaults=True):
    """`at`: when, in seconds of one clock for the whole history (the simulator's own, or the host's)."""

    at: float


# ---------------------------------------------------------------------------------------------------- the store's commits


class SubmittedEvent(HistoryLine, frozen=True):
    """A submit was answered by the store."""

    job_id: str
    body: str
    """The hash that decides 'same body'."""
    created: bool = False
    refused: str = ""
    """CONFLICT, BLOB_MISSING; empty: the job exists."""
    generation: int = 0
    """After it; one more than before if a rerun set it going."""


class GrantedEvent(HistoryLine, frozen=True):
    """A lease was given."""

    job_id: str
    attempt: int
    generation: int
    lease_id: str
    worker_id: str
    incarnation: str
    wall: float
    """The store's wall clock at that moment, which `not_before` is compared with."""
    not_before: float | None = None
    not_after: float | None = None
    highest_wall: float | None = None
    """The highest that the same clock has shown so far, if it can be set back: a job that was due once stays due."""
    on_disconnect: str = "stop"
    """stop or keep: whether I9 speaks of it."""
    ttl_s: float | None = None
    """How long it lasts if it is not renewed, without the store's margin."""
    grace_s: float = 0.0
    """How much longer, because it is kept for a worker that was cut off."""


class ShownEvent(HistoryLine, frozen=True):
    """A worker showed its lease: start, renew or release."""

    verb: str
    job_id: str
    attempt: int
    lease_id: str
    worker_id: str
    incarnation: str
    held: bool
    """The store took it for the current lease."""


class ReportedEvent(HistoryLine, frozen=True):
    """A worker's report: finish or fail."""

    verb: str
    job_id: str
    attempt: int
    lease_id: str
    worker_id: str
    accepted: bool
    """It was written. An exact repeat of one that was is answered alike and writes nothing: not accepted, but `repeated`."""
    state: str = ""
    """Of the job afterwards, if it was accepted."""
    repeated: bool = False
    result_sha256: str | None = None
    """Empty: not told."""


class ReapedEvent(HistoryLine, frozen=True):
    """A lease that was over was ended by the leader, or taken over by a grant (then told before that grant)."""

    job_id: str
    attempt: int
    worker_id: str
    state: str
    epoch: int = 0


class CanceledEvent(HistoryLine, frozen=True):
    """A cancel was answered by the store."""

    job_id: str
    state: str
    """Of the job afterwards; empty: no such job."""
    requested: bool = False
    """It runs, and its worker will be told."""


class RequeuedEvent(HistoryLine, frozen=True):
    """A terminal job was set going again (`done`), or was not."""

    job_id: str
    done: bool
    generation: int = 0


class TookOverEvent(HistoryLine, frozen=True):
    """A server registered its epoch, or was refused."""

    server_id: str
    epoch: int
    done: bool


class LedEvent(HistoryLine, frozen=True):
    """A duty was written under an epoch, or was refused as stale."""

    server_id: str
    epoch: int
    done: bool


class RowEvent(HistoryLine, frozen=True):
    """A job's row after a commit that touched it, or at the end."""

    job_id: str
    state: str
    attempt: int
    generation: int
    failures: int
    losses: int
    max_retries: int
    max_losses: int
    lease_id: str | None = None
    not_before: float | None = None
    error_code: str = ""
    """Of the outcome, once it is terminal."""
    result_sha256: str | None = None
    cancel_requested: bool = False
    body: str = ""
    """The hash that decides 'same body'; empty: not told."""
    leader_epoch: int = 0
    """Of the last write that a leader made here."""
    at_end: bool = False
    """Told when all was over. If there is one such row, then all jobs that exist have one."""


class RemovedEvent(HistoryLine, frozen=True):
    """Retention deleted a terminal job."""

    job_id: str


class DueEvent(HistoryLine, frozen=True):
    """A nominal time of a schedule came inside its catch-up window: there must be a run for it in the end."""

    definition: str
    nominal: float


class FiredEvent(HistoryLine, frozen=True):
    """A commit made this job the run of a schedule for a nominal time."""

    definition: str
    nominal: float
    job_id: str


# ---------------------------------------------------------------------------------------------------- clients


class AskedEvent(HistoryLine, frozen=True):
    """A client began to ask. `call` is unique in the history; asking again under the same call is not told."""

    client: str
    call: str
    verb: str
    """submit, rerun (a submit with on_failed="rerun"), cancel, requeue; others are not judged."""
    job_ids: tuple[str, ...]
    bodies: tuple[str, ...] = ()
    """Of a submit: the hash of each."""


class AnsweredEvent(HistoryLine, frozen=True):
    """What it was told in the end."""

    client: str
    call: str
    answer: str
    """ok, refused, unknown"""
    accepted: tuple[str, ...] = ()
    """Of a submit or a cancel: the jobs for which the answer was yes."""
    states: tuple[str, ...] = ()
    """Of a cancel: the state that it was told of each of its job_ids."""
    created: tuple[str, ...] = ()
    """Of a submit: those of `accepted` that the answer called new."""


class ArrivedEvent(HistoryLine, frozen=True):
    """A client was told how a job ended."""

    client: str
    job_id: str
    state: str
    attempt: int
    generation: int | None = None
    result_sha256: str | None = None


# ---------------------------------------------------------------------------------------------------- workers


class BeganEvent(HistoryLine, frozen=True):
    """A process of this attempt runs."""

    worker_id: str
    incarnation: str
    job_id: str
    attempt: int
    lease_id: str


class GoneEvent(HistoryLine, frozen=True):
    """No process of this attempt is left. `how`: ended (by itself), stopped (by its worker), killed (with its worker)."""

    worker_id: str
    incarnation: str
    job_id: str
    attempt: int
    lease_id: str
    how: str


class SettledEvent(HistoryLine, frozen=True):
    """A worker was told what became of its report: recorded, or fenced."""

    worker_id: str
    lease_id: str
    recorded: bool


class BusyEvent(HistoryLine, frozen=True):
    """How many attempts a worker has at once, told when one is added; more than `capacity` breaks the credit bound."""

    worker_id: str
    attempts: int
    capacity: int
    waiting: int = 0
    """Assignments that it has besides, unstarted."""
    ahead: int = 0
    """How many of those it asks for at most."""


# ---------------------------------------------------------------------------------------------------- the world


class ProcessEvent(HistoryLine, frozen=True):
    """A process began or ended. `what`: started, crashed, exited, paused, resumed."""

    name: str
    """As other lines call it: a server_id, a worker_id, a client. The keeper of worker w is `w/keeper`."""
    what: str


class FaultEvent(HistoryLine, frozen=True):
    """Something was done to the system."""

    fault: str
    target: str = ""


class DriftedEvent(HistoryLine, frozen=True):
    """The clock of this process differs from the store's by more than the margins allow: I9 is not promised for it."""

    name: str
    """Of a process; `store`: of the store itself, and so of all."""


class HealedEvent(HistoryLine, frozen=True):
    """No fault from here on: what is promised to happen in the end must happen now."""


class LeadingEvent(HistoryLine, frozen=True):
    """A server believes from now on that it leads under this epoch; 0: it does not any more. Told once each."""

    server_id: str
    epoch: int


class WatchingEvent(HistoryLine, frozen=True):
    """The first line, where it is needed: of these kinds (the names of the structs, in lower case) no line is missing."""

    kinds: tuple[str, ...]


class EndedEvent(HistoryLine, frozen=True):
    """The watch is over. `quiet`: nothing was left to do."""

    quiet: bool = True
    events: int = 0
    """How many things happened since it was healed: a hot loop shows here."""


StoreLine = (
    SubmittedEvent
    | GrantedEvent
    | ShownEvent
    | ReportedEvent
    | ReapedEvent
    | CanceledEvent
    | RequeuedEvent
    | TookOverEvent
    | LedEvent
    | RowEvent
    | RemovedEvent
    | DueEvent
    | FiredEvent
)
PeerLine = AskedEvent | AnsweredEvent | ArrivedEvent | BeganEvent | GoneEvent | SettledEvent | BusyEvent
WorldLine = ProcessEvent | FaultEvent | DriftedEvent | HealedEvent | LeadingEvent | WatchingEvent | EndedEvent
AnyLine = StoreLine | PeerLine | WorldLine

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyLine).decode


def write(lines: Iterable[AnyLine], file: IO[bytes]) -> None:
    for line in lines:
        file.write(_encode(line) + b"\n")


def read(file: IO[bytes]) -> Iterator[AnyLine]:
    for line in file:
        yield _decode(line)
