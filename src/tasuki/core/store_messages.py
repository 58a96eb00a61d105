"""Messages between the machines and a store: requests, answers, and the `Turn` that carries all requests of one transaction.

Plain data, and `VERBS`, the table of everything that a turn can ask. The store's contract is in `stores/store.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from tasuki.core.decoding import decodable
from tasuki.core.job import Job, JobSpec, OnDisconnect, Outcome, Progress, State, check_name
from tasuki.core.lifecycle import LEASE_TTL_S, REASSIGN_AFTER_S
from tasuki.core.pauses import PauseAnswer, PauseOrder
from tasuki.core.statistics import Rollup
from tasuki.core.subject import matches, only_worker
from tasuki.errors import CacheConflict, Conflict, InvalidInput

# ---------------------------------------------------------------------------------------------------- requests


def storable_text(text: str) -> str:
    """Return the text as every database accepts it: PostgreSQL refuses NUL."""
    return text.replace("\0", "\ufffd") if "\0" in text else text


class Submission(msgspec.Struct, frozen=True, gc=False):
    """A checked spec, its submitter, and the hash by which a resubmit is compared."""

    spec: JobSpec
    submitter: str
    body_hash: bytes


class JobKind(enum.IntEnum):
    """Requirement of a job on its worker. Stored with the job, in the index of ready rows."""

    COMMAND = 0
    """Names an exec of a worker's list."""
    HANDLER = 1
    """Names no exec: for a Python handler, chosen by subject."""
    LOCAL_COMMAND = 2
    """A command that the server's own user submitted over the unix socket: that user's workers may run any program for it."""


def kind_of(exec: str, submitter: str) -> JobKind:
    """Return the kind of a job with this exec and submitter."""
    if not exec:
        return JobKind.HANDLER
    return JobKind.LOCAL_COMMAND if submitter.startswith("uid:") else JobKind.COMMAND


class ReadyQueue(NamedTuple):
    """A queue of ready jobs, by what decides which workers may take them."""

    subject: str
    kind: JobKind
    exec: str = ""


class Takes(enum.StrEnum):
    """Kinds of job that a worker can run."""

    ANY = "any"
    COMMANDS = "commands"
    HANDLERS = "handlers"
    OWN = "own"
    """Local commands only: a worker without a list of programs, which may run any program for its own user."""

    @property
    def kinds(self) -> tuple[JobKind, ...]:
        return _KINDS[self]


_KINDS = {
    Takes.ANY: tuple(JobKind),
    Takes.COMMANDS: (JobKind.COMMAND, JobKind.LOCAL_COMMAND),
    Takes.HANDLERS: (JobKind.HANDLER,),
    Takes.OWN: (JobKind.LOCAL_COMMAND,),
}


EXECS_MAX = 100  # of one worker: each costs a lease two seeks for every subject
OWN_PROGRAMS = "*"  # among the execs of a worker; no exec has this name
"""Stands for every program, for the local commands of the worker's own user."""


class Offer(msgspec.Struct, frozen=True, gc=False):
    """The jobs that a worker can run: their kinds, and of commands the programs."""

    takes: Takes = Takes.ANY
    execs: tuple[str, ...] | None = None
    """Names of its programs, perhaps with OWN_PROGRAMS; None: all, as of a worker that does not say."""

    def fits(self, kind: JobKind, exec: str) -> bool:
        if kind not in _KINDS[self.takes]:
            return False
        if kind is JobKind.HANDLER or self.execs is None or exec in self.execs:
            return True
        return kind is JobKind.LOCAL_COMMAND and OWN_PROGRAMS in self.execs

    def queues(self) -> tuple[tuple[tuple[int, str], ...], tuple[int, ...]]:
        """Return kind and exec of the queues of each subject that serve the worker, and the kinds of which every queue does."""
        return _queues_of(self)


def checked_offer(takes: Takes, execs: tuple[str, ...] | None) -> Offer:
    """Return what a worker's Hello offers, each program once, the same for all workers that offer the same."""
    if execs is None:
        return Offer(takes)
    if len(execs) > EXECS_MAX:
        raise InvalidInput(f"{len(execs)} execs are too many, the limit is {EXECS_MAX}; start several workers")
    return Offer(takes, tuple(sorted({exec_ if exec_ == OWN_PROGRAMS else check_name(exec_, "exec") for exec_ in execs})))


@lru_cache(512)  # 25 KB each at most
def _queues_of(offer: Offer) -> tuple[tuple[tuple[int, str], ...], tuple[int, ...]]:
    named: list[tuple[int, str]] = []
    whole: list[int] = []
    for kind in offer.takes.kinds:
        if kind is JobKind.HANDLER:
            named.append((int(kind), ""))
        elif offer.execs is None or (kind is JobKind.LOCAL_COMMAND and OWN_PROGRAMS in offer.execs):
            whole.append(int(kind))
        else:
            named += [(int(kind), exec) for exec in offer.execs if exec != OWN_PROGRAMS]
    return tuple(named), tuple(whole)


class ChosenJob(NamedTuple):
    """A ready job that a routing policy has chosen a worker for, with its place among the others."""

    job_id: str
    priority: int
    group: str


class LeaseRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A worker's request for up to `limit` ready jobs, by patterns or by job_ids (which may also take over an expired lease)."""

    worker_id: str
    incarnation: str
    patterns: tuple[str, ...] = ()
    job_ids: tuple[str, ...] = ()
    offer: Offer = Offer()
    """Kinds and programs to take among the jobs that the patterns match; a job_id is granted whatever it needs."""
    named_elsewhere: Mapping[str, tuple[str, ...]] = {}
    """Programs that other live workers offer by name, and this one does not, with the patterns of these workers: OWN_PROGRAMS
    leaves such jobs to them."""
    limit: int = 1
    ttl_s: float = LEASE_TTL_S
    on_disconnect: OnDisconnect = OnDisconnect.STOP
    reconnect_grace_s: float = 0.0
    owner: str = ""
    live_workers: Mapping[str, tuple[str, ...]] = {}
    """Patterns of all workers that take work, by worker_id."""
    routed: tuple[str, ...] = ()
    """Patterns of subjects that have a routing policy: their jobs are granted only if they are chosen."""
    chosen: tuple[ChosenJob, ...] = ()
    """Jobs of such subjects for this worker; priority, fairness and limit hold for them as if a pattern had found them."""

    def leaves(self, subject: str) -> bool:
        """Return whether the jobs of a subject are not this worker's to take: they are for another worker alone, which the
        subject names, or a routing policy decides about them."""
        only = only_worker(subject)
        if only is not None:
            return only != self.worker_id
        last = subject.rpartition(".")[2]
        if any(matches(pattern, subject) for pattern in self.live_workers.get(last, ())):
            return last != self.worker_id
        return any(matches(pattern, subject) for pattern in self.routed)

    def may_take(self, subject: str, kind: JobKind, exec: str) -> bool:
        """Return whether the worker offers what jobs of this queue need, and they are not left to one that has the program."""
        if not self.offer.fits(kind, exec):
            return False
        elsewhere = self.named_elsewhere.get(exec, ()) if kind is JobKind.LOCAL_COMMAND else ()
        return not any(matches(pattern, subject) for pattern in elsewhere)


class HeldLease(msgspec.Struct, frozen=True, gc=False):
    """A worker's lease of one attempt, as the worker shows it with `start`, `renew` and `release`."""

    job_id: str
    worker_id: str
    incarnation: str
    lease_id: str
    attempt: int
    ttl_s: float = LEASE_TTL_S
    progress: Progress | None = None
    """Progress of the attempt, if it changed since the last `renew`."""
    owner: str = ""
    is_over: bool = False
    """For `release`, by a server in place of a silent worker: only if no more than the margin is left of the lease."""
    confirm_s: float | None = None
    """Time within which its worker, which was detached, has to hear whether it may continue; 0: it may. None: as before."""


class LeaseHolder(msgspec.Struct, frozen=True):
    """The holder of the leases that `end_leases` ends: an owner whose token was revoked, or a detached worker. Empty: any."""

    owner: str = ""
    worker_id: str = ""

    @property
    def reason(self) -> str:
        """Reason of a job that goes back unstarted."""
        return "the token of its worker was revoked" if self.owner else "its worker was detached"

    def has(self, owner: str, worker_id: str | None) -> bool:
        return self.owner in ("", owner) and self.worker_id in ("", worker_id)


class Report(msgspec.Struct, frozen=True, gc=False):
    """A worker's report of how its attempt ended, for `finish` (it succeeded) and `fail` (it did not)."""

    job_id: str
    worker_id: str
    lease_id: str
    attempt: int
    outcome: Outcome
    started_at: float | None = None
    owner: str = ""


class RequeueOrder(NamedTuple):
    """An order to set a terminal job going again."""

    job_id: str
    actor: str
    reason: str = ""
    generation: int | None = None
    """Generation that the job must still have: nobody else has set it going since it was read. None: any."""


class Assignment(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A leader's targeted grant: this job to this worker. To nobody (empty worker_id): a run that was assigned ahead of its time
    is taken back."""

    job_id: str
    worker_id: str
    incarnation: str = ""
    ttl_s: float = LEASE_TTL_S
    on_disconnect: OnDisconnect = OnDisconnect.STOP
    reconnect_grace_s: float = 0.0
    owner: str = ""


class FireOrder(NamedTuple):
    """The terms of one look at definitions and events."""

    limit: int = 256
    """Number of definitions, and of events, to look at."""
    ahead_s: float = 0.0
    """Make the next run of each definition so long before its time, so that it can be assigned; 0: at its time."""
    reassign_after_s: float = REASSIGN_AFTER_S
    """An assigned run that its worker has not fetched so long after its time is an orphan."""


@decodable
class Filter(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Filter of `find`; empty fields do not restrict."""

    states: tuple[State, ...] = ()
    subject: str | None = None
    """A pattern, `*` and `>` allowed."""
    array_id: str | None = None
    worker_id: str | None = None
    submitter: str | None = None
    """Submitter of the jobs; jobs whose subject `scope` covers are found too."""
    scope: tuple[str, ...] = ()
    text: str | None = None
    """Part of the job_id or of the error (Feature.FIND_TEXT)."""
    created_from: float | None = None
    created_until: float | None = None
    """Wall times: a job was submitted at the first or later, and before the second."""
    definition_id: int | None = None  # of the definition whose run it is


class BlobClaim(msgspec.Struct, frozen=True, gc=False):
    """A blob that a peer brings, or is about to refer to."""

    sha256: str
    size_bytes: int


class CacheEntry(msgspec.Struct, frozen=True, gc=False):
    """One file of a cache: its name there, and the blob that has its bytes."""

    name: str
    sha256: str
    size_bytes: int


class CacheOrder(msgspec.Struct, frozen=True, gc=False):
    """Files to add to a cache for the workers that a pattern meets."""

    cache_id: str
    target: str
    owner: str
    entries: tuple[CacheEntry, ...]


@decodable
class TokenRow(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A token as the store keeps it: never the secret, only its sha256."""

    token_id: str
    kind: str
    """admin, client, worker, enrol"""
    sha256: str
    label: str = ""
    scope: tuple[str, ...] = ()
    """Patterns of subjects that the token allows beside its own jobs; a worker token may subscribe only within its scope."""
    worker_id: str = ""
    """The only worker that may use the token. For an enrol token the worker that it registers again; empty: a new one."""
    created_at: float = 0.0
    created_by: str = ""
    expires_at: float | None = None
    revoked_at: float | None = None
    revoked_by: str = ""
    incarnation: str = ""
    """Incarnation of the worker at /calc, kept when its token is exchanged. Empty: `access.identify` makes it from `sha256`."""


# ---------------------------------------------------------------------------------------------------- answers


class BlobPlace(msgspec.Struct, frozen=True, gc=False):
    """The place of a blob's bytes, present or future. `generation` is part of the place: it grows when bytes that were condemned
    come back, so that a server that still deletes the old ones does not touch the new."""

    sha256: str
    size_bytes: int
    generation: int = 0
    stored: bool = False
    """True if the bytes are there, whole and durable."""


class MissingBlobs(msgspec.Struct, frozen=True, gc=False):
    """Refusal of a job that refers to blobs that are not stored. Upload them, and submit again."""

    job_id: str
    sha256s: tuple[str, ...]


class CacheStored(msgspec.Struct, frozen=True, gc=False):
    """Answer to a `CacheOrder`: the cache has all of its files."""

    added: int


class CachedFile(msgspec.Struct, frozen=True, gc=False):
    """A file of a cache as the store has it."""

    name: str
    sha256: str
    size_bytes: int
    target: str
    owner: str
    added_at: float

    @property
    def entry(self) -> CacheEntry:
        return CacheEntry(self.name, self.sha256, self.size_bytes)


class CacheSummary(msgspec.Struct, frozen=True, gc=False):
    """A cache: how much it has, for which workers, and who began it when."""

    cache_id: str
    files: int
    size_bytes: int
    target: str
    owner: str
    created_at: float


class Condemned(msgspec.Struct, frozen=True, gc=False):
    """Blobs whose bytes are to be deleted now, and the size of all blobs together (None: not computed)."""

    places: tuple[BlobPlace, ...] = ()
    stored_bytes: int | None = None

    def __bool__(self) -> bool:
        return bool(self.places)


class AuditRow(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A change of the tokens, and the actor who made it; `number` grows with each."""

    number: int
    at: float
    actor: str
    action: str
    target: str
    detail: str = ""


class Submitted(msgspec.Struct, frozen=True, gc=False):
    """A stored job. `job` is filled only if it existed before, and without the bytes of its result: read them with get."""

    job_id: str
    created: bool
    job: Job | None = None

    @classmethod
    def before(cls, job: Job) -> Submitted:
        """Return the answer for a job that existed before."""
        if job.outcome is not None and job.outcome.result is not None:
            job = replace(job, outcome=replace(job.outcome, result=None))
        return cls(job.job_id, False, job)


class Grant(msgspec.Struct, frozen=True, gc=False):
    """One attempt of one job for one worker. `spec` is the msgpack of the JobSpec, passed on as it was stored."""

    job_id: str
    spec: bytes
    submitter: str
    lease_id: str
    attempt: int
    ttl_s: float


class LeaseStatus(enum.StrEnum):
    """The answer to a worker that shows a lease."""

    GO_ON = "go_on"
    CANCEL = "cancel"
    LOST = "lost"


class ReportStatus(enum.StrEnum):
    """The answer to a finish or fail."""

    RECORDED = "recorded"
    REPEATED = "repeated"
    """An exact repeat of a recorded report: the stored answer, nothing written."""
    FENCED = "fenced"
    BLOB_MISSING = "blob_missing"
    """The result is a blob that is not stored; nothing was written, and the lease still stands."""


class ReportAnswer(msgspec.Struct, frozen=True, gc=False):
    """The answer to a finish or fail. `state` is the job's state after it (None if the job is unknown)."""

    answer: ReportStatus
    state: State | None
    reason: str = ""
    group: str = ""
    """Group of the job, for the statistics; empty: unknown. Likewise below."""


@lru_cache(1024)
def recorded_success(group: str) -> ReportAnswer:
    """Return the answer to a finish that was recorded, the same for all jobs of a group."""
    return ReportAnswer(ReportStatus.RECORDED, State.SUCCEEDED, group=group)


class Canceled(msgspec.Struct, frozen=True, gc=False):
    """The answer to a cancel: CANCELED at once, or `requested` of the worker that holds the job, or terminal before."""

    state: State | None
    """None: there is no such job."""
    requested: bool = False
    worker_id: str | None = None
    lease_id: str | None = None
    group: str = ""
    """Group of a job that this cancel has ended; empty: it ended before, or has not ended."""


class Requeued(msgspec.Struct, frozen=True, gc=False):
    """The answer to a requeue: `done` if the job was terminal and is PENDING now."""

    done: bool
    state: State | None
    still_running: str | None = None
    """The other run of its definition that has not ended, and that it must not overlap."""
    group: str = ""


class Reaped(msgspec.Struct, frozen=True, gc=False):
    """An expired lease, and what became of its job."""

    job_id: str
    state: State
    worker_id: str
    attempt: int
    reason: str
    group: str = ""


class LateJob(NamedTuple):
    """A job that was too late to start, and has ended."""

    job_id: str
    group: str


class FiredRun(msgspec.Struct, frozen=True, gc=False):
    """A run that `fire` stored; SKIPPED or CANCELED if it never starts."""

    job_id: str
    definition_id: int
    scheduled_for: float
    state: State = State.PENDING
    group: str = ""


class AheadRun(msgspec.Struct, frozen=True, gc=False):
    """A run that was made ahead of its time and that no worker has fetched."""

    job_id: str
    queue: ReadyQueue
    is_due: bool
    """The time of the run has come, and it waits for nothing but an order to the worker that it is assigned to."""
    worker_id: str = ""
    """Worker that it is assigned to; empty: nobody."""
    incarnation: str = ""
    attempt: int = 0


class FiredRuns(msgspec.Struct, frozen=True, gc=False):
    """The answer to `fire`."""

    runs: tuple[FiredRun, ...] = ()
    replaced: tuple[tuple[str, Canceled], ...] = ()
    """Runs that were canceled because the next one replaces them."""
    released: int = 0
    """Number of runs whose predecessor has ended, and which are ready now."""
    ahead: tuple[AheadRun, ...] = ()
    """All runs that were made ahead of their time and that nobody has fetched; asked for only by a leader that assigns."""
    wait_s: float | None = None
    """Time until the next nominal time, or until the next delayed job is due; None: nothing is planned."""

    def __bool__(self) -> bool:
        return bool(self.runs or self.replaced or self.released)


class ReadyPage(msgspec.Struct, frozen=True, gc=False):
    """Some queues of ready jobs, and the place to continue at (None: no more). Only the store that gave it understands it."""

    queues: list[ReadyQueue]
    place: Any = None


class TurnNotes(msgspec.Struct, frozen=True, gc=False):
    """Facts about a turn beside its answers, by which a server knows for whom it has to look again."""

    ready: tuple[ReadyQueue, ...] | None = ()
    """Queues that jobs came back to, by a retry, loss, release, requeue or promotion, each once. None: not known."""
    cut: tuple[int, ...] = ()
    """Positions of the lease requests that ended at the store's bound: more may be ready for them."""


class Page(msgspec.Struct, frozen=True):
    """Some jobs, newest first, and the cursor to continue with (None: no more). A page may be short and still have a cursor."""

    jobs: list[Job]
    cursor: str | None


# ---------------------------------------------------------------------------------------------------- one transaction


class CondemnOrder(msgspec.Struct, frozen=True, gc=False):
    """Limits of one collection of blobs, as times; see the store's verb `condemn_blobs`."""

    unused_since: float
    budget_bytes: int | None = None
    squeezed_since: float = 0.0
    limit: int = 256


class Collection(msgspec.Struct, frozen=True, gc=False):
    """A `CondemnOrder` in ages, which the store's own clock turns into times."""

    unused_s: float
    budget_bytes: int | None = None
    squeezed_s: float = 0.0
    limit: int = 256

    def order(self, wall: float) -> CondemnOrder:
        return CondemnOrder(wall - self.unused_s, self.budget_bytes, wall - self.squeezed_s, self.limit)


class Retention(msgspec.Struct, frozen=True, gc=False):
    """Delete up to `limit` jobs that have been terminal for longer than `age_s`."""

    age_s: float
    limit: int = 256


class Turn(msgspec.Struct, kw_only=True):
    """Everything that goes to the store in one transaction; the store's verbs run in the order of `VERBS`, as do these fields.

    A verb whose field is empty is not called. Leader verbs form a turn of their own with `epoch` > 0: if the epoch is stale, the
    store refuses the whole turn, and no other request with it.
    """

    finish: Sequence[Report] = ()
    fail: Sequence[Report] = ()
    start: Sequence[HeldLease] = ()
    renew: Sequence[HeldLease] = ()
    release: Sequence[HeldLease] = ()
    cancel: Sequence[tuple[str, str, str]] = ()
    """(job_id, actor, reason)"""
    requeue: Sequence[RequeueOrder] = ()
    take_over: str = ""
    """The holder for whom `epoch` is registered."""
    reap: int = 0
    """Limit of expired leases to end; likewise `skip` and `promote` for jobs."""
    skip: int = 0
    promote: int = 0
    fire: FireOrder | None = None
    assign: Sequence[Assignment] = ()
    prune: Retention | None = None
    condemn_blobs: Collection | None = None
    forget_blobs: Sequence[BlobPlace] = ()
    place_blobs: Sequence[BlobClaim] = ()
    blobs_stored: Sequence[BlobPlace] = ()
    put_cache: Sequence[CacheOrder] = ()
    remove_cache: Sequence[tuple[str, str]] = ()
    """(cache_id, target)"""
    add_rollups: Sequence[Rollup] = ()
    add_token: Sequence[TokenRow] = ()
    revoke_token: Sequence[tuple[str, str]] = ()
    """(token_id, actor)"""
    note: Sequence[tuple[str, str, str, str]] = ()
    """(actor, action, target, detail) of what somebody did, for the audit."""
    pause: Sequence[PauseOrder] = ()
    end_leases: Sequence[LeaseHolder] = ()
    """Holders whose leases end now."""
    submit: Sequence[Submission] = ()
    rerun: Sequence[Submission] = ()
    """Submissions with on_failed="rerun"."""
    lease: Sequence[LeaseRequest] = ()
    held: Sequence[tuple[str, str, str]] = ()
    """(worker_id, incarnation, owner)"""
    get: Sequence[str] = ()
    cached_files: Sequence[tuple[str, str]] = ()
    """(cache_id, name)"""
    token: Sequence[str] = ()
    """Hashes (sha256) of secrets that peers showed."""
    tokens: Sequence[None] = ()
    """One entry for each request of the list of all tokens."""
    epoch: int = 0
    context: Any = None
    """Data of the caller, for its use when the answers come back; the store never reads it."""


class Answers(msgspec.Struct, kw_only=True):
    """Answers to a Turn, under the same names; for sequences one answer for each item, in the order of the items."""

    finish: Sequence[ReportAnswer] = ()
    fail: Sequence[ReportAnswer] = ()
    start: Sequence[LeaseStatus] = ()
    renew: Sequence[LeaseStatus] = ()
    release: Sequence[bool] = ()
    cancel: Sequence[Canceled] = ()
    requeue: Sequence[Requeued] = ()
    take_over: bool = False
    reap: Sequence[Reaped] = ()
    skip: Sequence[LateJob] = ()
    promote: int = 0
    fire: FiredRuns = FiredRuns()
    assign: Sequence[Grant | None] = ()
    prune: int = 0
    condemn_blobs: Condemned = Condemned()
    forget_blobs: int = 0
    place_blobs: Sequence[BlobPlace] = ()
    blobs_stored: Sequence[bool] = ()
    put_cache: Sequence[CacheStored | CacheConflict | MissingBlobs] = ()
    remove_cache: Sequence[int] = ()
    add_rollups: Sequence[None] = ()
    add_token: Sequence[bool] = ()
    revoke_token: Sequence[bool] = ()
    note: Sequence[None] = ()
    pause: Sequence[PauseAnswer] = ()
    end_leases: Sequence[int] = ()
    submit: Sequence[Submitted | Conflict | MissingBlobs] = ()
    rerun: Sequence[Submitted | Conflict | MissingBlobs] = ()
    lease: Sequence[list[Grant]] = ()
    held: Sequence[list[Grant]] = ()
    get: Sequence[Job | None] = ()
    cached_files: Sequence[CachedFile | None] = ()
    token: Sequence[TokenRow | None] = ()
    tokens: Sequence[list[TokenRow]] = ()
    notes: TurnNotes = TurnNotes()


# ---------------------------------------------------------------------------------------------------- the table of verbs

Method = Callable[..., Any]
Call = Callable[[Method, Any, int, Callable[[], float]], Any]
"""(method of the store, value of the turn's field, epoch, the store's wall clock) -> value of the answers' field"""


def _batch(method: Method, items: Any, epoch: int, wall: Callable[[], float]) -> Any:
    return method(items)


def _one_by_one(method: Method, items: Any, epoch: int, wall: Callable[[], float]) -> Any:
    return [method(item) for item in items]


def _limited(method: Method, limit: Any, epoch: int, wall: Callable[[], float]) -> Any:
    return method(epoch=epoch, limit=limit)


def _prune(method: Method, retention: Any, epoch: int, wall: Callable[[], float]) -> Any:
    return method(before=wall() - retention.age_s, epoch=epoch, limit=retention.limit)


def _by_order(*names: str) -> Call:
    """Return a call that groups orders (job_id, *values) by their values, passed under `names`: one call for each group."""

    def call(method: Method, orders: Any, epoch: int, wall: Callable[[], float]) -> Any:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, order in enumerate(orders):
            groups.setdefault(order[1:], []).append(index)
        answers: dict[int, Any] = {}
        for values, indexes in groups.items():
            found = method([orders[index][0] for index in indexes], **dict(zip(names, values, strict=True)))
            answers.update(zip(indexes, found, strict=True))
        return [answers[index] for index in range(len(orders))]

    return call


class StoreVerb(msgspec.Struct, frozen=True):
    """One request to the store as a part of a turn."""

    name: str
    """Field of `Turn` that asks, and field of `Answers` that gets the answer."""
    call: Call = _batch
    method: str = ""
    """Method of the `Store`, if it has another name than the verb."""
    leads: bool = False
    """True if only the leader asks it, with its epoch."""
    lasting: bool = True
    """True if the answer promises that a power cut cannot undo it."""


VERBS: tuple[StoreVerb, ...] = (
    StoreVerb("finish"),
    StoreVerb("fail"),
    # The lease was durable before, the worker shows it again after a power cut, and its finish carries the time of the start: a
    # short command waits for the disk once less.
    StoreVerb("start", lasting=False),
    StoreVerb("renew"),
    StoreVerb("release"),
    StoreVerb("cancel", _by_order("actor", "reason")),
    StoreVerb("requeue", _by_order("actor", "reason", "generation")),
    StoreVerb("take_over", lambda method, holder, epoch, wall: method(holder, epoch), leads=True),
    StoreVerb("reap", _limited, leads=True),
    StoreVerb("skip", _limited, leads=True),
    StoreVerb("promote", _limited, leads=True),
    StoreVerb("fire", lambda method, order, epoch, wall: method(epoch=epoch, **order._asdict()), leads=True),
    StoreVerb("assign", lambda method, items, epoch, wall: method(items, epoch=epoch), leads=True),
    StoreVerb("prune", _prune, leads=True),
    StoreVerb("condemn_blobs", lambda method, ages, epoch, wall: method(ages.order(wall()), epoch=epoch), leads=True),
    StoreVerb("forget_blobs", lambda method, places, epoch, wall: method(places, epoch=epoch), leads=True),
    StoreVerb("place_blobs"),
    StoreVerb("blobs_stored"),
    StoreVerb("put_cache"),
    StoreVerb("remove_cache"),
    StoreVerb("add_rollups"),
    StoreVerb("add_token", _one_by_one),
    StoreVerb("revoke_token", lambda method, items, epoch, wall: [method(token_id, actor=actor) for token_id, actor in items]),
    StoreVerb("note", lambda method, entries, epoch, wall: [method(*entry) for entry in entries]),
    StoreVerb("pause"),
    StoreVerb("end_leases"),
    StoreVerb("submit"),
    StoreVerb("rerun", lambda method, submissions, epoch, wall: method(submissions, on_failed="rerun"), method="submit"),
    StoreVerb("lease"),
    StoreVerb("held"),
    StoreVerb("get"),
    StoreVerb("cached_files"),
    StoreVerb("token", _one_by_one),
    StoreVerb("tokens", lambda method, requests, epoch, wall: [method() for _ in requests]),
)
"""All verbs of a turn in the order in which the store runs them.

Reports and renewals come before submits and leases, so that work that is done never waits behind new work; reads come last, so
that they see what the turn wrote. CONTRIBUTING.md lists what a new verb needs.
"""
