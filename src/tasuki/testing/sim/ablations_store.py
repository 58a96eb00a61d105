"""Classes that replace production code for a while, and safeguards of the stores that they take away.

A replaced name or statement must be there: one that is gone, or reads otherwise by now, is an error. Where both stores have a
safeguard, both lose it; for SQLite that is a condition of a statement, or of the code that judges a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any, ClassVar, Protocol

import msgspec
from msgspec.structs import replace

from tasuki.core.broker import worker_messages
from tasuki.core.job import Lease, Outcome, State
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.machine import Now
from tasuki.core.store_messages import Canceled, LeaseRequest, Offer
from tasuki.stores.memory import store as memory
from tasuki.stores.memory.records import MemoryJob, MemoryRecords
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.sql import lease, report, submit
from tasuki.stores.sql.database import Transaction
from tasuki.testing.sim.run import SeedOutcome, check_seed
from tasuki.testing.sim.world import SimOptions

# ---------------------------------------------------------------------------------------------------- replacements

Method = Callable[..., Any]


class Patch(Protocol):
    """One thing that can be replaced for a while."""

    @property
    def is_sql(self) -> bool:
        """True if it belongs to the SQL store."""

    def open(self) -> AbstractContextManager[None]: ...


class Replacement(msgspec.Struct, frozen=True):
    """A replacement: `make` gets a function, class attribute or constant, and returns what stands in its place."""

    owner: Any
    """The class or module that defines it; for an imported name, the importing module."""
    name: str
    make: Callable[[Any], Any]

    @property
    def is_sql(self) -> bool:
        module: str = self.owner.__name__ if isinstance(self.owner, ModuleType) else self.owner.__module__
        return module.startswith("tasuki.stores.sql")

    @contextmanager
    def open(self) -> Iterator[None]:
        before = vars(self.owner)[self.name]
        setattr(self.owner, self.name, self.make(before))
        try:
            yield
        finally:
            setattr(self.owner, self.name, before)


def around(instead: Method) -> Callable[[Method], Method]:
    """Make a `Replacement.make` of a function that is called with the replaced one first, and then as that was called."""
    return lambda before: lambda *given, **named: instead(before, *given, **named)


class ReplacedStatement(msgspec.Struct, frozen=True):
    """A statement of SQLite without some of its words, or with others for them."""

    statement: str
    words: str
    instead: str = ""
    is_sql: ClassVar[bool] = True

    @contextmanager
    def open(self) -> Iterator[None]:
        from tasuki.stores.sql.database import load_statements

        statements = load_statements("sqlite")
        texts: dict[Any, str] = statements.one
        keys: list[Any] = [self.statement]
        if self.statement in statements.many:
            texts = statements.many[self.statement]
            keys = list(texts)
        before = {key: texts[key] for key in keys}
        if any(self.words not in text for text in before.values()):
            raise LookupError(f"statement {self.statement!r} does not say {self.words!r} any more; say here what it says instead")
        texts.update({key: text.replace(self.words, self.instead) for key, text in before.items()})
        try:
            yield
        finally:
            texts.update(before)


class Ablation(msgspec.Struct, frozen=True):
    """One safeguard, and what breaks without it."""

    name: str
    what: str
    """The safeguard, for people."""
    invariants: tuple[str, ...]
    """Invariants that the checker may find broken first."""
    patches: tuple[Patch, ...]
    options: SimOptions = SimOptions()
    """Options that make it likely that somebody needs the safeguard."""
    why: str = ""
    """The reason why nothing breaks without it: something else holds the promise, and this one saves time or losses."""
    check: Callable[[int, SimOptions], SeedOutcome] = check_seed
    """The world that misses it."""

    def __post_init__(self) -> None:
        if self.options.definitions is None:  # a smaller world shows it sooner
            msgspec.structs.force_setattr(self, "options", replace(self.options, definitions=0))
        if self.options.attempts_scale is None:
            msgspec.structs.force_setattr(self, "options", replace(self.options, attempts_scale=1.0))
        if self.options.policy is None:
            msgspec.structs.force_setattr(self, "options", replace(self.options, policy=""))

    @property
    def stores(self) -> tuple[str, ...]:
        """Stores whose own code has the safeguard."""
        return ("memory", "sqlite") if any(patch.is_sql for patch in self.patches) else ("memory",)

    @contextmanager
    def switch_off(self) -> Iterator[None]:
        with ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(patch.open())
            yield


EARLY_S = 60.0
MORE = 5

_SHOWN = " AND lease_id = column3 AND assigned_worker_id = column4 AND attempt = column5"

# Faults that leave leases without their workers.
LOSSES = ("pause", "partition", "one_way", "half_open", "power", "crash", "late", "reset")


# ---------------------------------------------------------------------------------------------------- reports


@around
def _taken_for_the_holder(report_on: Method, self: Any, report: Any, verb: Any) -> Any:
    record = self._records.get(report.job_id)
    lease = record.job.lease if record is not None else None
    if lease is not None:
        shown = {name: getattr(lease, name) for name in ("worker_id", "lease_id", "attempt", "owner")}
        report = replace(report, **shown)
    return report_on(self, report, verb)


@around
def _taken_after_the_end(report_on: Method, self: Any, report: Any, verb: Any) -> Any:
    record = self._records.get(report.job_id)
    if record is not None and record.job.state.terminal:
        lease = Lease(report.lease_id, report.worker_id, "", report.attempt, expires_at=0.0, owner=report.owner)
        self._put(report.job_id, replace(record, job=replace(record.job, state=State.RUNNING, lease=lease)))
    return report_on(self, report, verb)


def _never_repeated(judge: Method) -> Method:
    return lambda self, record, *rest: judge(self, replace(record, last_report=None), *rest)


@around
def _of_any_owner(report_on: Method, self: Any, report: Any, verb: Any) -> Any:
    record = self._records.get(report.job_id)
    lease = record.job.lease if record is not None else None
    return report_on(self, replace(report, owner=lease.owner) if lease is not None else report, verb)


@around
def _nothing_known(_: Method, self: Any, claim: Any) -> Any:
    record = self._records.get(claim.job_id)
    return record if record is not None and record.job.lease is not None else None


@around
def _costs_a_loss(release: Method, self: Any, claim: Any, reason: str) -> bool:
    done: bool = release(self, claim, reason)
    record = self._records.get(claim.job_id)
    if done and record.job.state is State.PENDING:
        self._put(claim.job_id, replace(record, job=replace(record.job, losses=record.job.losses + 1)))
    return done


_OF_REPORTS = (
    Ablation(
        "finish_lease",
        "a finish must show the current lease, its worker and its attempt",
        ("I3", "I6", "I17"),
        (Replacement(MemoryStore, "_report", _taken_for_the_holder), ReplacedStatement("finish_plain", _SHOWN)),
        SimOptions(kinds=LOSSES),
    ),
    Ablation(
        "finish_state",
        "a terminal job takes no report",
        ("I3", "I4", "I6", "I14"),
        (
            Replacement(MemoryStore, "_report", _taken_after_the_end),
            ReplacedStatement("finish_plain", " AND state IN ('ASSIGNED', 'RUNNING')"),
            ReplacedStatement("leased_groups", " AND state IN ('ASSIGNED', 'RUNNING')"),
        ),
        SimOptions(kinds=LOSSES),
    ),
    Ablation(
        "repeat_known",
        "an exact repeat of a recorded report is answered as recorded",
        ("I14",),
        (
            Replacement(MemoryStore, "_repeated_or_fenced", _never_repeated),
            Replacement(report, "_is_repeat", lambda _: lambda *_: False),
        ),
    ),
    Ablation(
        "owner",
        "only the owner of a lease can start, renew or release it",
        ("I17", "I5"),
        (Replacement(MemoryRecords, "_claimed", _nothing_known), Replacement(report, "_is_holder", lambda _: lambda *_: True)),
        SimOptions(kinds=LOSSES),
    ),
    Ablation(
        "lease_owner",
        "a finish must come from the peer that was let in when the lease was granted, not only from its worker_id",
        ("I17",),
        (Replacement(MemoryStore, "_report", _of_any_owner), ReplacedStatement("finish_plain", " AND lease_owner = column6")),
        SimOptions(kinds=("impostor",)),
    ),
    Ablation(
        "release_is_free",
        "an attempt that was given back unstarted is no loss",
        ("I11",),
        (
            Replacement(MemoryStore, "_release", _costs_a_loss),
            ReplacedStatement("release", "version = version + 1,", "version = version + 1, losses = losses + 1,"),
        ),
    ),
)


# ---------------------------------------------------------------------------------------------------- grants


@around
def _whatever_is_offered(choose: Method, *given: Any) -> Any:
    return choose(*(replace(it, offer=Offer(it.offer.takes)) if isinstance(it, LeaseRequest) else it for it in given))


@around
def _same_attempt(grant: Method, self: Any, record: Any, *rest: Any, **named: Any) -> Any:
    again = max(0, record.job.attempt - 1)
    return grant(self, replace(record, job=replace(record.job, attempt=again)), *rest, **named)


@around
def _also_what_is_leased(lease_next: Method, self: Any, request: Any, position: int) -> list[Any]:
    grants: list[Any] = lease_next(self, request, position)
    leased = [self._records[job_id] for _, _, job_id in list(self._leased)]
    return grants + [self._grant(record, request) for record in leased[: request.limit - len(grants)]]


@around
def _of_any_process(held: Method, self: Any, holders: Any) -> list[list[Any]]:
    names = {holder[0] for holder in holders}
    lives = {
        (lease.worker_id, lease.incarnation, lease.owner)
        for _, _, job_id in self._leased
        if (lease := self._records[job_id].job.lease).worker_id in names
    }
    everybody = list(dict.fromkeys([*holders, *sorted(lives)]))
    found = dict(zip(everybody, held(self, everybody), strict=True))
    return [[grant for (name, *_), grants in found.items() if name == holder[0] for grant in grants] for holder in holders]


def ahead(duty: Method) -> Method:
    """Wrap a duty so that its clock is fast."""

    def _duty(self: Any, **named: Any) -> Any:
        clock = self.clock
        self.clock = _Fast(clock)
        try:
            return duty(self, **named)
        finally:
            self.clock = clock

    return _duty


class _Fast:
    """A clock that is ahead of the store's."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def wall(self) -> float:
        return float(self._clock.wall() + EARLY_S)

    def lease(self) -> float:
        return float(self._clock.lease() + EARLY_S)


def _with_more(budget: str) -> tuple[Replacement, ...]:
    name = "after_failure" if budget == "max_retries" else "after_loss"

    def make(judge: Method) -> Method:
        return lambda *given, **named: judge(*given, **{**named, budget: named[budget] + MORE})

    return tuple(Replacement(module, name, make) for module in (memory, report))


def _retries_at_once(judge: Method) -> Method:
    return lambda state, outcome, **named: judge(state, replace(outcome, retry_in_s=None), **named)


_OF_GRANTS = (
    Ablation(
        "attempt_counts",
        "each grant counts the attempt up by one",
        ("I5",),
        (
            Replacement(MemoryStore, "_grant", _same_attempt),
            ReplacedStatement("grant", "attempt = attempt + 1", "attempt = max(attempt, 1)"),
        ),
    ),
    Ablation(
        "one_lease",
        "a leased job is not granted",
        ("I5",),
        (Replacement(MemoryStore, "_lease_next", _also_what_is_leased), ReplacedStatement("grant", "ready = 0, ")),
    ),
    Ablation(
        "held_of_this_life",
        "what a worker's earlier process was given is not delivered to the next one",
        ("I5", "I9", "I17"),
        (Replacement(MemoryStore, "held", _of_any_process),),
        SimOptions(kinds=("crash", "store_lost"), faults=40),
    ),
    Ablation(
        "offer",
        "a worker is granted only jobs whose program it offers",
        ("credit",),
        (Replacement(memory, "_may_take", _whatever_is_offered), Replacement(lease.ReadyIndex, "queues", _whatever_is_offered)),
    ),
    Ablation(
        "not_before_at_submit",
        "a job with a later not_before is not ready when it is submitted",
        ("I12",),
        (
            Replacement(MemoryRecords, "_is_later", lambda _: lambda *_: False),
            Replacement(submit, "ready_value", lambda _: lambda *_: 1),
        ),
    ),
    Ablation(
        "not_before_at_promotion",
        "a delayed job is made ready when its time has come, not before",
        ("I12",),
        (
            Replacement(MemoryStore, "promote", ahead),
            ReplacedStatement("delayed_due", "not_before <= ?2", f"not_before <= ?2 + {EARLY_S}"),
        ),
    ),
    Ablation(
        "not_after",
        "a job is not granted after its not_after",
        ("I12",),
        (
            Replacement(MemoryStore, "_is_late", lambda _: lambda *_: False),
            ReplacedStatement("oldest_of_queue", "not_after >= ?7", f"not_after >= ?7 - {EARLY_S}"),
            ReplacedStatement("oldest_of_queues", "not_after >= ?5", f"not_after >= ?5 - {EARLY_S}"),
            ReplacedStatement("grant", "not_after >= ?8", f"not_after >= ?8 - {EARLY_S}"),
        ),
        # While nobody leads, nobody skips what is late.
        SimOptions(servers=3, lock_ttl_s=5.0, kinds=("coordination_cut", "coordination_lost", "pause"), faults=30),
    ),
    Ablation(
        "pause_holds",
        "a job of a paused subject is not granted",
        ("I23",),
        (
            Replacement(memory, "is_paused", lambda _: lambda *_: False),
            Replacement(lease, "is_paused", lambda _: lambda *_: False),
            Replacement(lease, "unpaused", lambda _: lambda ranges, _patterns: ranges),
        ),
        SimOptions(tokens=False, pauses=4),
    ),
    Ablation(
        "retry_in_s",
        "a failed attempt may ask for the time of the next one",
        ("I12",),
        tuple(Replacement(module, "after_failure", _retries_at_once) for module in (memory, report)),
    ),
    Ablation("retry_budget", "a job fails for good when its retries are used up", ("I11",), _with_more("max_retries")),
    Ablation("loss_budget", "a job fails for good when its losses are used up", ("I11",), _with_more("max_losses")),
)

STORE = (*_OF_REPORTS, *_OF_GRANTS)


_KNOWN = "ON CONFLICT (idempotency_key) DO NOTHING"


@around
def _takes_back_at_once(take_back: Method, state: Any, worker: Any, now: Any) -> None:
    slots, worker.slots = worker.slots, 0
    take_back(state, worker, Now(now.monotonic + worker.ttl_s, now.wall))
    worker.slots = slots


@around
def _in_any_case(release: Method, self: Any, claim: Any, reason: Any) -> Any:
    return release(self, replace(claim, is_over=False), reason)


# Faults that leave a leader with a term that is over, and turns of it still to come.
RIVALS = ("pause", "store_cut", "store_slow", "coordination_cut", "coordination_lost", "coordination_late", "slow")


# ---------------------------------------------------------------------------------------------------- clients


@around
def _created_again(submit: Method, self: Any, submission: Any, *, rerun: bool) -> Any:
    record = self._records.get(submission.spec.job_id)
    if record is not None and record.job.body_hash == submission.body_hash:
        self._put(submission.spec.job_id, None)
    return submit(self, submission, rerun=rerun)


@around
def _any_body(submit: Method, self: Any, submission: Any, *, rerun: bool) -> Any:
    record = self._records.get(submission.spec.job_id)
    if record is not None:
        submission = replace(submission, body_hash=record.job.body_hash)
    return submit(self, submission, rerun=rerun)


@around
def _any_body_in_sql(answer_known: Method, tx: Any, submission: Any, rows: Any, rerun: bool) -> Any:
    return answer_known(tx, replace(submission, body_hash=rows[submission.spec.job_id].body_hash), rows, rerun)


@around
def _ends_what_is_over(cancel: Method, self: Any, job_id: str, *rest: Any) -> Any:
    record = self._records.get(job_id)
    if record is not None and record.job.state.terminal:
        self._put(job_id, replace(record, job=replace(record.job, state=State.PENDING)))
    return cancel(self, job_id, *rest)


@around
def _ends_what_is_over_in_sql(cancel: Method, tx: Any, row: Any, *rest: Any) -> Any:
    if not row.job_state.terminal:
        return cancel(tx, row, *rest)
    outcome = Outcome(error_code="CANCELED", message="canceled")
    tx.end_waiting(row, State.CANCELED, outcome)
    return Canceled(State.CANCELED)


def _forgets_the_cancel(judge: Method) -> Method:
    return lambda *given, **named: judge(*given, **{**named, "cancel_requested": False})


@around
def _any_state(requeue_one: Method, self: Any, job_id: str, *rest: Any) -> Any:
    record = self._records.get(job_id)
    if record is not None and not record.job.state.terminal:
        ended = replace(record.job, state=State.FAILED, lease=None, finished_at=self.clock.wall())
        self._put(job_id, replace(record, job=ended, delayed=False))
    return requeue_one(self, job_id, *rest)


@around
def _spent(requeue: Method, self: Any, record: Any, **named: Any) -> Any:
    spent = {"failures": record.job.failures, "losses": record.job.losses}
    again = requeue(self, record, **named)
    again = replace(again, job=replace(again.job, **spent))
    self._put(again.job.job_id, again)
    return again


_OF_CLIENTS = (
    Ablation(
        "unique_id",
        "an id that is stored is not stored again",
        ("I2",),
        (
            Replacement(MemoryStore, "_submit", _created_again),
            ReplacedStatement(
                "submit_full", _KNOWN, "ON CONFLICT (idempotency_key) DO UPDATE SET created_at = excluded.created_at"
            ),
        ),
    ),
    Ablation(
        "body_hash",
        "the same id with another body is refused",
        ("I2",),
        (Replacement(MemoryStore, "_submit", _any_body), Replacement(submit, "_answer_known", _any_body_in_sql)),
    ),
    Ablation(
        "cancel_after_the_end",
        "a cancel leaves a terminal job as it is",
        ("I4", "I14"),
        (Replacement(MemoryStore, "_cancel", _ends_what_is_over), Replacement(submit, "_cancel", _ends_what_is_over_in_sql)),
    ),
    Ablation(
        "cancel_is_kept",
        "a job whose cancel was asked for is not tried again",
        ("I14",),
        tuple(
            Replacement(module, name, _forgets_the_cancel)
            for module in (memory, report)
            for name in ("after_failure", "after_loss")
        ),
    ),
    Ablation(
        "requeue_after_the_end",
        "only a terminal job is set going again",
        ("I4",),
        (Replacement(MemoryStore, "_requeue_one", _any_state),),
    ),
    Ablation(
        "budgets_reset",
        "a job that is set going again has both budgets whole",
        ("I4", "I11"),
        (Replacement(MemoryStore, "_requeue", _spent), ReplacedStatement("requeue", "failures = 0, losses = 0, ")),
    ),
)


# ---------------------------------------------------------------------------------------------------- the leader


@around
def _any_epoch(take_over: Method, self: Any, holder: str, epoch: int) -> bool:
    self._epoch = (min(self._epoch[0], epoch - 1), self._epoch[1])
    return bool(take_over(self, holder, epoch))


@around
def _renews_nothing(take_over: Method, self: Any, holder: str, epoch: int) -> bool:
    leased, self._leased = self._leased, []
    try:
        return bool(take_over(self, holder, epoch))
    finally:
        self._leased = leased


_OF_THE_LEADER = (
    Ablation(
        "epoch_fence",
        "a duty is written only under the latest epoch",
        ("I8",),
        (
            Replacement(MemoryRecords, "_check_epoch", lambda _: lambda *_: None),
            Replacement(Transaction, "check_epoch", lambda _: lambda *_: None),
        ),
        SimOptions(servers=3, lock_ttl_s=2.0, kinds=RIVALS),
    ),
    Ablation(
        "rising_epochs",
        "an epoch is registered only if it is higher than the last",
        ("I7",),
        (Replacement(MemoryStore, "take_over", _any_epoch), ReplacedStatement("take_over", " WHERE epoch < excluded.epoch")),
        SimOptions(servers=3, lock_ttl_s=2.0, kinds=("store_slow", "store_cut", "coordination_cut"), faults=30),
    ),
    Ablation(
        "renewal_at_takeover",
        "a new leader takes every live lease for renewed, once",
        ("lease",),
        (
            Replacement(MemoryStore, "take_over", _renews_nothing),
            ReplacedStatement("renew_all", "WHERE lease_expires_at IS NOT NULL", "WHERE 0"),
        ),
        SimOptions(lease_ttl_s=2.0, kinds=("crash", "power", "store_cut", "partition")),
    ),
    Ablation(
        "reap_expiry",
        "a lease is ended by the leader only when it is over",
        ("lease",),
        (
            Replacement(MemoryStore, "reap", ahead),
            ReplacedStatement("leases_over", "lease_expires_at <= ?2", f"lease_expires_at <= ?2 + {EARLY_S}"),
        ),
    ),
    Ablation(
        "taken_back_at_the_end",
        "a server gives back what its worker has not begun only when no more than the margin is left of the lease",
        ("I9",),
        (
            Replacement(worker_messages, "take_back", _takes_back_at_once),
            Replacement(MemoryStore, "_release", _in_any_case),
            Replacement(report, "_lives_on", lambda _: lambda *_: False),
        ),
        SimOptions(kinds=LOSSES),
    ),
    Ablation(
        "reconnect_grace",
        "a lease with on_disconnect=keep lasts longer by its grace",
        ("lease",),
        (
            Replacement(MemoryJob, "over_at", lambda _: property(lambda record: record.job.lease.expires_at)),
            Replacement(lease, "lease_over_at", lambda _: lambda clock, to: clock.lease() + to.ttl_s + LEASE_MARGIN_S),
            ReplacedStatement("renew", " + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END"),
            ReplacedStatement("renew_all", " + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END"),
        ),
        SimOptions(kinds=LOSSES),
    ),
)

ORDERS = (*_OF_CLIENTS, *_OF_THE_LEADER)
