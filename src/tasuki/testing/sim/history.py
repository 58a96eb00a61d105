"""Events of a run, each as one line of JSON: the only input of the checker (`checker.py`).

A history is written by an observer of a running system: the simulator, which sees everything, or a test with real processes,
which has the rows of the database, the answers to clients and the notes of the jobs themselves. Lines stand in the order of
events; commits of one store in the order of their commits, and the effects of a commit before the rows that it left. An
observer leaves out what it cannot see: the checker judges the lines that are there, and says which invariants it had evidence
for. But of each kind of line an observer tells all or none: the checker assumes that after the first line of a kind none of
that kind is missing (`WatchingEvent` says so from the start, also of kinds of which there may be none). Events that excuse
others are never left out: `RemovedEvent`, `ProcessEvent` and `DriftedEvent` are told by the observer of the jobs and processes
that they concern.

There are three groups. Store lines tell what a committed transaction did (`SubmittedEvent` … `FiredEvent`). Client and worker
lines tell what those processes saw (`AskedEvent` … `ArrivedEvent`, `BeganEvent` … `BusyEvent`). World lines tell what was done
to them (`FaultEvent`, `HealedEvent`, `EndedEvent`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO

import msgspec


def kind_of(name: str) -> str:
    """Return the kind by which a history file names the events of a class: `tookover` for `TookOverEvent`."""
    return name.lower().removesuffix("event")


class HistoryLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=kind_of, omit_defaults=True):
    """One line of a history. `at` is in seconds of one clock for the whole history (the simulator's own, or the host's)."""

    at: float


# ---------------------------------------------------------------------------------------------------- the store's commits


class SubmittedEvent(HistoryLine, frozen=True):
    """A submit was answered by the store."""

    job_id: str
    body: str
    """The hash that decides whether two bodies are the same."""
    created: bool = False
    refused: str = ""
    """CONFLICT or BLOB_MISSING; empty if the job exists."""
    generation: int = 0
    """The generation afterwards; one more than before if a rerun set the job going."""


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
    """The highest value of the same clock so far, if it can be set back: a job that was due once stays due."""
    on_disconnect: str = "stop"
    """stop or keep: I9 holds for stop only."""
    ttl_s: float | None = None
    """The duration of the lease if it is not renewed, without the store's margin."""
    grace_s: float = 0.0
    """The additional time for which it is kept for a worker that was cut off."""
    owner: str = ""
    offered: bool = True
    """The worker had offered the job's program."""
    ahead: bool = False
    """The leader chose the worker, which gets the run when it fetches it; not before its time."""
    subject: str = ""


class PausedEvent(HistoryLine, frozen=True):
    """A pattern of subjects was paused, or resumed."""

    pattern: str
    paused: bool = True


class FetchedEvent(HistoryLine, frozen=True):
    """A worker was given a run that had been assigned to it ahead: its lease begins."""

    job_id: str
    attempt: int
    lease_id: str
    wall: float
    highest_wall: float
    not_before: float | None = None
    ttl_s: float | None = None


class WithdrawnEvent(HistoryLine, frozen=True):
    """A run that was stored ahead of its time is gone again: its definition was changed."""

    job_id: str


class OrderedEvent(HistoryLine, frozen=True):
    """An order of a leader came to a server, whose process this is, and was obeyed or refused."""

    server_id: str
    incarnation: str
    epoch: int
    obeyed: bool


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
    owner: str = ""
    ttl_s: float | None = None
    """The duration from now on, if the lease was renewed and the observer knows it."""
    confirm_s: float | None = None
    """Time for which its worker asks whether it may go on; 0: it may."""


class ReportedEvent(HistoryLine, frozen=True):
    """A worker's report: finish or fail."""

    verb: str
    job_id: str
    attempt: int
    lease_id: str
    worker_id: str
    accepted: bool
    """The report was written. An exact repeat writes nothing and is answered alike: not accepted, but `repeated`."""
    state: str = ""
    """The state of the job afterwards, if the report was accepted."""
    repeated: bool = False
    result_sha256: str | None = None
    """The hash of the result; empty if not known."""
    owner: str = ""
    retry_at: float | None = None
    """The time on the store's wall clock before which the report asks for no other attempt."""


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
    """The state of the job afterwards; empty if there is no such job."""
    requested: bool = False
    """The job runs, and its worker will be told."""


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
    waited_s: float = 0.0
    """The time from when the leader decided on it until it was written."""


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
    """The error code of the outcome, once the job is terminal."""
    result_sha256: str | None = None
    cancel_requested: bool = False
    body: str = ""
    """The hash that decides whether two bodies are the same; empty if not known."""
    leader_epoch: int = 0
    """The epoch of the last write of a leader to this row."""
    at_end: bool = False
    """The row was read when all was over. If there is one such row, then all jobs that exist have one."""


class RemovedEvent(HistoryLine, frozen=True):
    """Retention deleted a terminal job."""

    job_id: str


class DefinitionEvent(HistoryLine, frozen=True):
    """An application wrote a definition; one that it deleted is not enabled any more."""

    definition: str
    policy: str
    """The concurrency_policy, always the same; allow if the definition was deleted, since nothing keeps its runs apart then."""
    enabled: bool = True
    by_event: bool = False
    every_s: int = 0
    """Interval of a schedule, whose nominal times are its multiples."""


class DueEvent(HistoryLine, frozen=True):
    """A nominal time came inside its catch-up window, or an event: there must be a run for it in the end."""

    definition: str
    nominal: float


class FiredEvent(HistoryLine, frozen=True):
    """A commit made this job the run of a definition for a nominal time, or for an event of that time."""

    definition: str
    nominal: float
    job_id: str


# ---------------------------------------------------------------------------------------------------- clients


class AskedEvent(HistoryLine, frozen=True):
    """A client began to ask. `call` is unique in the history; asking again under the same call is not told."""

    client: str
    call: str
    verb: str
    """submit, rerun (a submit with on_failed="rerun"), cancel or requeue; others are not judged."""
    job_ids: tuple[str, ...]
    bodies: tuple[str, ...] = ()
    """The hash of each body of a submit."""


class AnsweredEvent(HistoryLine, frozen=True):
    """The final answer to a call."""

    client: str
    call: str
    answer: str
    """ok, refused or unknown."""
    accepted: tuple[str, ...] = ()
    """Jobs of a submit or a cancel for which the answer was yes."""
    states: tuple[str, ...] = ()
    """States that a cancel was told, one for each of its job_ids."""
    created: tuple[str, ...] = ()
    """Jobs of `accepted` that the answer to a submit called new."""


class ArrivedEvent(HistoryLine, frozen=True):
    """A client was told how a job ended."""

    client: str
    job_id: str
    state: str
    attempt: int
    generation: int | None = None
    result_sha256: str | None = None


# ---------------------------------------------------------------------------------------------------- workers


class AttemptLine(HistoryLine, frozen=True):
    """A line about the processes of one attempt."""

    worker_id: str
    incarnation: str
    job_id: str
    attempt: int
    lease_id: str


class BeganEvent(AttemptLine, frozen=True):
    """A process of this attempt runs."""


class GoneEvent(AttemptLine, frozen=True):
    """No process of this attempt is left. `how`: ended (by itself), stopped (by its worker), killed (with its worker)."""

    how: str


class ConfirmedEvent(HistoryLine, frozen=True):
    """A leader without the store said that an attempt goes on: it may run for so long without another word."""

    job_id: str
    attempt: int
    lease_id: str
    for_s: float


class DeniedEvent(HistoryLine, frozen=True):
    """Nobody said that an attempt of a detached worker goes on, or somebody that it does not."""

    job_id: str
    attempt: int


class SettledEvent(HistoryLine, frozen=True):
    """A worker was told what became of its report: recorded, or fenced."""

    worker_id: str
    lease_id: str
    recorded: bool


class BusyEvent(HistoryLine, frozen=True):
    """The number of attempts of a worker, told when one is added; more than `capacity` breaks the credit bound."""

    worker_id: str
    attempts: int
    capacity: int
    waiting: int = 0
    """The number of assignments besides, unstarted."""
    ahead: int = 0
    """The number of those that the worker asks for at most."""


# ---------------------------------------------------------------------------------------------------- the world


class ProcessEvent(HistoryLine, frozen=True):
    """A process began or ended. `what`: started, crashed, exited, paused, resumed."""

    name: str
    """The name in other lines: a server_id, a worker_id, a client. The keeper of worker w is `w/keeper`."""
    what: str


class FaultEvent(HistoryLine, frozen=True):
    """Something was done to the system."""

    fault: str
    target: str = ""


class DriftedEvent(HistoryLine, frozen=True):
    """The clock of this process differs from the store's by more than the margins allow: I9 is not promised for it."""

    name: str
    """The name of the process; `store` for the clock of the store itself, and so of all."""


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
    """The number of events since the last fault: a hot loop shows here."""


StoreLine = (
    SubmittedEvent
    | GrantedEvent
    | PausedEvent
    | ShownEvent
    | ReportedEvent
    | ReapedEvent
    | CanceledEvent
    | RequeuedEvent
    | TookOverEvent
    | LedEvent
    | RowEvent
    | RemovedEvent
    | DefinitionEvent
    | DueEvent
    | FiredEvent
    | FetchedEvent
    | WithdrawnEvent
)
PeerLine = (
    OrderedEvent
    | AskedEvent
    | AnsweredEvent
    | ArrivedEvent
    | BeganEvent
    | GoneEvent
    | ConfirmedEvent
    | DeniedEvent
    | SettledEvent
    | BusyEvent
)
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
