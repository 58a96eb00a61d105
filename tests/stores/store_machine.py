"""Random histories, given to a store under test and to the memory store: both must answer alike.

Subclass `StoreMachine`, give it `make_store`, and hand its `TestCase` to pytest. Lease ids are random in each store, so a grant
is kept as a pair of both stores' ids and shown to each by its own. A choice that the contract leaves to the store (which of
several fair jobs a lease takes) is judged by its rule and then followed by the model. After every step all jobs, their
incidents and the counters are compared, and the invariants that a store decides (docs/invariants.md) are checked. Touches only
the stores that `make_store` opens.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tasuki.core.job import (
    LEASED,
    BlobRef,
    InputFile,
    Job,
    JobIncident,
    JobSpec,
    OnDisconnect,
    Outcome,
    Progress,
    State,
    body_hash,
)
from tasuki.core.lifecycle import is_late
from tasuki.core.store_messages import (
    Answers,
    Assignment,
    BlobClaim,
    CacheEntry,
    CacheOrder,
    ChosenJob,
    CondemnOrder,
    Filter,
    Grant,
    HeldLease,
    LeaseRequest,
    Offer,
    Report,
    ReportAnswer,
    RequeueOrder,
    Submission,
    Submitted,
    Takes,
    Turn,
    kind_of,
)
from tasuki.core.subject import group_of, matches
from tasuki.errors import Conflict, StaleEpoch
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.store import Store
from tasuki.testing.clocks import FakeClock
from tasuki.testing.sim.history import ReapedEvent
from tests.support.harness import CheckedHistory

JOB_IDS = [f"job-{number}" for number in range(8)]
LOCAL_IDS = JOB_IDS[:4]  # of the server's own user
SUBJECTS = ["a.x", "a.y", "b.x", "job.assign.c.1", "calc.w1", "calc.w2"]
WORKERS = ["w1", "w2"]
BLOB = "ab" * 32

job_ids = st.sampled_from([*JOB_IDS, "unknown"])
some_job_ids = st.lists(job_ids, min_size=1, max_size=3)
workers = st.sampled_from(WORKERS)
incarnations = st.sampled_from(["1", "2"])
picks = st.integers(0, 10_000)
specs = st.builds(
    JobSpec,
    job_id=st.sampled_from(JOB_IDS),
    subject=st.sampled_from(SUBJECTS),
    args=st.sampled_from([(), ("x",)]),
    files=st.sampled_from([(), (InputFile("in", sha256=BLOB, size_bytes=3),)]),
    max_retries=st.integers(0, 2),
    max_losses=st.integers(0, 2),
    delay_first_loss=st.booleans(),
    exec=st.sampled_from(["", "", "run", "other"]),
    backoff_s=st.sampled_from([0.0, 10.0]),
    priority=st.sampled_from([1, 5]),
    array_id=st.sampled_from([None, "array"]),
)
lease_terms = st.fixed_dictionaries(
    {
        "ttl_s": st.sampled_from([5.0, 15.0]),
        "on_disconnect": st.sampled_from(list(OnDisconnect)),
        "reconnect_grace_s": st.sampled_from([0.0, 20.0]),
    }
)
outcomes = st.builds(
    Outcome,
    exit_code=st.sampled_from([None, 1]),
    error_code=st.sampled_from(["EXIT_CODE", "TIMED_OUT", "CANCELED"]),
    message=st.just("it broke"),
    permanent=st.booleans(),
)
results = st.sampled_from(
    [Outcome(), Outcome(result=b"1", result_sha256="1" * 64), Outcome(result_ref=BlobRef(BLOB, 3), result_sha256=BLOB)]
)
_WRONG = [{"lease_id": "0" * 32}, {"attempt": 99}, {"worker_id": "w9"}, {"owner": "token:other"}, {"job_id": "unknown"}]
damages: st.SearchStrategy[dict[str, Any]] = st.sampled_from([*[{}] * 12, *_WRONG])
claim_damages: st.SearchStrategy[dict[str, Any]] = st.sampled_from([*[{}] * 5, *_WRONG, {"incarnation": "9"}])


class GrantPair(msgspec.Struct, frozen=True):
    """One grant, as both stores gave it."""

    under_test: Grant
    model: Grant
    worker_id: str
    incarnation: str


class _Abandoned(Exception):
    """Raised to end a turn that must leave nothing."""


class StoreMachine(RuleBasedStateMachine):
    """Drives both stores with the same calls on one clock."""

    def make_store(self, clock: FakeClock) -> Store:
        """Override: a new, empty store."""
        raise NotImplementedError

    @initialize(bodies=st.lists(specs, min_size=3, max_size=6), patience_s=st.sampled_from([None, 15.0, 60.0]))
    def open(self, bodies: list[JobSpec], patience_s: float | None) -> None:
        self.clock = FakeClock()
        self.under_test = self.make_store(self.clock)
        self.model = MemoryStore(self.clock)
        self.history = CheckedHistory(self.under_test, self.clock)
        self.pairs: list[GrantPair] = []
        self.names: dict[str, str] = {}  # lease_id of either store -> the pair's own name
        self.epoch = 0
        self.take_over(stays=False, step=1)
        self.bring_blob()
        self.submit(bodies, None, "return", patience_s)

    def teardown(self) -> None:
        if hasattr(self, "under_test"):
            self.under_test.close()

    # -- telling both ---------------------------------------------------------------------------------------------
    def both(self, verb: str, *arguments: Any, **named: Any) -> Any:
        """Make the same call to both stores, and compare the answers."""
        mine = getattr(self.under_test, verb)(*arguments, **named)
        theirs = getattr(self.model, verb)(*arguments, **named)
        assert self.plain(mine) == self.plain(theirs), f"{verb}{arguments}{named}"
        return mine

    def both_show(self, verb: str, shown: list[tuple[Any, Any]], **named: Any) -> Any:
        """Make a call that shows each store its own lease_ids, and compare the answers."""
        mine = getattr(self.under_test, verb)([one for one, _ in shown], **named)
        theirs = getattr(self.model, verb)([other for _, other in shown], **named)
        assert self.plain(mine) == self.plain(theirs), f"{verb}{[one for one, _ in shown]}"
        self.tell(verb, [one for one, _ in shown], mine)
        return mine

    def tell(self, verb: str, items: Any, answers: Any) -> None:
        """Tell the checker what the store under test has answered."""
        self.history.turn("leader", Turn(**{verb: items}), Answers(**{verb: answers}))

    def plain(self, answer: Any) -> Any:
        """Return the answer without what may differ: lease ids become names, free texts are left out."""
        match answer:
            case list() | tuple():
                return [self.plain(part) for part in answer]
            case Submitted(job_id, created, job):
                return job_id, created, self.plain(job)
            case Conflict():
                return answer.job_id, sorted(answer.differs)
            case ReportAnswer(answered, state):
                return answered, state, answer.group
            case Job():
                return self.plain_job(answer)
            case JobIncident():
                return answer.at, answer.kind, answer.attempt, answer.actor
            case msgspec.Struct():
                fields = msgspec.structs.asdict(answer)
                if fields.get("lease_id") is not None:
                    fields["lease_id"] = self.names.get(fields["lease_id"], fields["lease_id"])
                return type(answer).__name__, fields
            case _:
                return answer

    def plain_job(self, job: Job) -> dict[str, Any]:
        fields = {**msgspec.structs.asdict(job), "lease": self.plain(job.lease)}
        # How often a row was written, and by which leader's call, is the store's own business.
        del fields["version"], fields["leader_epoch"]
        if job.outcome is not None and job.outcome.error_code == "CANCELED":
            fields["outcome"] = msgspec.structs.replace(job.outcome, message="")
        return fields

    def granted(self, mine: list[Grant], theirs: list[Grant], request: LeaseRequest) -> None:
        assert [(grant.job_id, grant.attempt) for grant in mine] == [(grant.job_id, grant.attempt) for grant in theirs]
        for one, other in zip(mine, theirs, strict=True):
            self.names[one.lease_id] = self.names[other.lease_id] = f"lease-{len(self.pairs)}"
            self.pairs.append(GrantPair(one, other, request.worker_id, request.incarnation))
        assert self.plain(mine) == self.plain(theirs)
        self.tell("lease", [request], [mine])

    # -- submitters -----------------------------------------------------------------------------------------------
    @rule(
        bodies=st.lists(specs, min_size=1, max_size=3),
        delay_s=st.sampled_from([None, None, None, -5.0, 12.0]),
        patience_s=st.sampled_from([None, None, 15.0]),
        on_failed=st.sampled_from(["return", "rerun"]),
    )
    def submit(self, bodies: list[JobSpec], delay_s: float | None, on_failed: str, patience_s: float | None = None) -> None:
        not_before, not_after = (None if span is None else self.clock.wall() + span for span in (delay_s, patience_s))
        timed = [msgspec.structs.replace(spec, not_before=not_before, not_after=not_after) for spec in bodies]
        submissions = [Submission(spec, "uid:1" if spec.job_id in LOCAL_IDS else "alice", body_hash(spec)) for spec in timed]
        answers = self.both("submit", submissions, on_failed=on_failed)
        self.tell("rerun" if on_failed == "rerun" else "submit", submissions, answers)

    @rule(ids=some_job_ids)
    def submit_again(self, ids: list[str]) -> None:
        known = [job for job in self.under_test.get(ids) if job is not None]
        submissions = [Submission(job.spec, "bob", job.body_hash) for job in known]
        answers = self.both("submit", submissions)
        assert not [answer for answer in answers if isinstance(answer, Conflict) or answer.created]

    @rule(ids=some_job_ids)
    def cancel(self, ids: list[str]) -> None:
        answers = self.both("cancel", ids, actor="alice", reason="no more")
        self.tell("cancel", [(job_id, "alice", "no more") for job_id in ids], answers)

    @rule(ids=some_job_ids, generation=st.sampled_from([None, None, 0, 1]))
    def requeue(self, ids: list[str], generation: int | None = None) -> None:
        answers = self.both("requeue", ids, actor="operator", generation=generation)
        self.tell("requeue", [RequeueOrder(job_id, "operator") for job_id in ids], answers)

    # -- workers --------------------------------------------------------------------------------------------------
    @rule(
        worker_id=workers,
        incarnation=incarnations,
        patterns=st.sampled_from([(">",), ("a.*", "b.x"), ("job.assign.>",), ("calc.*", ">"), ("none",)]),
        limit=st.integers(0, 4),
        live_workers=st.sampled_from([{}, dict.fromkeys(WORKERS, (">",)), {"w1": ("calc.*",), "w2": ("a.*", "calc.w1")}]),
        offer=st.builds(Offer, st.sampled_from(list(Takes)), st.sampled_from([None, None, ("run",), ("other", "run"), ("*",)])),
        named_elsewhere=st.sampled_from([{}, {}, {"run": ("a.*", "calc.*")}]),
        terms=lease_terms,
    )
    def lease(
        self,
        worker_id: str,
        incarnation: str,
        patterns: tuple[str, ...],
        limit: int,
        live_workers: dict[str, tuple[str, ...]],
        offer: Offer,
        named_elsewhere: dict[str, tuple[str, ...]],
        terms: dict[str, Any],
    ) -> None:
        request = LeaseRequest(
            worker_id=worker_id,
            incarnation=incarnation,
            patterns=patterns,
            limit=limit,
            live_workers=live_workers,
            offer=offer,
            named_elsewhere={exec: others for exec, others in named_elsewhere.items() if exec not in (offer.execs or ())},
            **terms,
        )
        self._lease(request, self.candidates(request))

    def _lease(self, request: LeaseRequest, candidates: list[Job]) -> None:
        [mine] = self.under_test.lease([request])
        _check_choice(candidates, [grant.job_id for grant in mine], request.limit)
        followed = msgspec.structs.replace(request, patterns=(), chosen=(), job_ids=tuple(grant.job_id for grant in mine))
        theirs = self.model.lease([followed])[0] if mine else []
        self.granted(mine, theirs, request)

    @rule(worker_id=workers, ids=some_job_ids, limit=st.integers(0, 4), terms=lease_terms)
    def lease_chosen(self, worker_id: str, ids: list[str], limit: int, terms: dict[str, Any]) -> None:
        """Lease jobs that a policy chose, some of which are not ready or not there."""
        anything = LeaseRequest(worker_id=worker_id, incarnation="1", patterns=(">",), limit=limit, **terms)
        wanted = [job for job in self.candidates(anything) if job.job_id in ids]
        ready = {job.job_id for job in wanted}
        chosen = [ChosenJob(job.job_id, job.priority, group_of(job.spec.subject)) for job in wanted]
        chosen += [ChosenJob(job_id, 5, "a") for job_id in dict.fromkeys(ids) if job_id not in ready]
        self._lease(msgspec.structs.replace(anything, patterns=(), routed=(">",), chosen=tuple(chosen)), wanted)

    @rule(worker_id=workers, limit=st.integers(1, 4), terms=lease_terms)
    def lease_anything(self, worker_id: str, limit: int, terms: dict[str, Any]) -> None:
        """Lease without conditions: the common case, so that histories are rich in grants."""
        self.lease(worker_id, "1", (">",), limit, {}, Offer(), {}, terms)

    def candidates(self, request: LeaseRequest) -> list[Job]:
        """Return the jobs that the request may be given, oldest first."""
        found = self.model.find(Filter(states=(State.PENDING, State.ORPHANED))).jobs[::-1]
        others = {
            (worker_id, pattern)
            for worker_id, patterns in request.live_workers.items()
            for pattern in patterns
            if worker_id != request.worker_id
        }
        return [
            job
            for job in found
            if self.model.ready_ahead(job.job_id) is not None
            and not is_late(job.not_after, self.clock.wall())
            and any(matches(pattern, job.spec.subject) for pattern in request.patterns)
            and not any(
                job.spec.subject.endswith(f".{worker_id}") and matches(pattern, job.spec.subject) for worker_id, pattern in others
            )
            and request.may_take(job.spec.subject, kind_of(job.spec.exec, job.submitter), job.spec.exec)
        ]

    @rule(worker_id=workers, incarnation=incarnations, ids=some_job_ids, limit=st.integers(1, 3), terms=lease_terms)
    def lease_by_id(self, worker_id: str, incarnation: str, ids: list[str], limit: int, terms: dict[str, Any]) -> None:
        request = LeaseRequest(worker_id=worker_id, incarnation=incarnation, job_ids=tuple(ids), limit=limit, **terms)
        before = self.under_test.get(ids)
        [mine], [theirs] = self.under_test.lease([request]), self.model.lease([request])
        for job, now in zip(before, self.under_test.get(ids), strict=True):
            if job is not None and now is not None and job.state in LEASED and job.lease != now.lease:
                self.tell_taken(job, now.state if now.state.terminal else State.PENDING)
        self.granted(mine, theirs, request)

    def tell_taken(self, job: Job, state: State) -> None:
        """Tell the checker of a lease that was over when the job was asked for by its id."""
        assert job.lease is not None
        worker_id = job.lease.worker_id
        self.history.tell(
            ReapedEvent(at=self.history.at, job_id=job.job_id, attempt=job.attempt, worker_id=worker_id, state=state)
        )

    @rule(holders=st.lists(st.tuples(workers, incarnations, st.sampled_from(["", "", "token:other"])), max_size=3))
    def held(self, holders: list[tuple[str, str, str]]) -> None:
        mine, theirs = (
            [{grant.job_id: self.plain(grant) for grant in grants} for grants in store.held(holders)]
            for store in (self.under_test, self.model)
        )
        assert mine == theirs

    @precondition(lambda self: self.pairs)
    @rule(
        verb=st.sampled_from(["start", "renew", "renew", "release"]),
        chosen=st.lists(st.tuples(picks, claim_damages), min_size=1, max_size=3),
        ttl_s=st.sampled_from([5.0, 15.0]),
        progress=st.sampled_from([None, Progress(0.5, "half")]),
    )
    def show(self, verb: str, chosen: list[tuple[int, dict[str, Any]]], ttl_s: float, progress: Progress | None = None) -> None:
        self.claim(verb, [(self.pick(pick), damage) for pick, damage in chosen], ttl_s, progress)

    def claim(
        self, verb: str, chosen: list[tuple[GrantPair, dict[str, Any]]], ttl_s: float, progress: Progress | None = None
    ) -> None:
        shown = []
        for pair, damage in chosen:
            claims = [
                HeldLease(grant.job_id, pair.worker_id, pair.incarnation, grant.lease_id, grant.attempt, ttl_s, progress)
                for grant in (pair.under_test, pair.model)
            ]
            shown.append((msgspec.structs.replace(claims[0], **damage), msgspec.structs.replace(claims[1], **damage)))
        self.both_show(verb, shown)

    @rule(ids=some_job_ids, worker_id=workers, verb=st.sampled_from(["start", "renew"]))
    def come_back(self, ids: list[str], worker_id: str, verb: str) -> None:
        """Let a worker that keeps its job be silent for longer than lease and grace, and show the lease again."""
        self.lease_by_id(worker_id, "1", ids, 1, {"ttl_s": 5.0, "on_disconnect": OnDisconnect.KEEP, "reconnect_grace_s": 0.0})
        self.advance(8.0, looks=True)
        if self.pairs:
            self.claim(verb, [(self.pairs[-1], {})], 15.0)

    @precondition(lambda self: self.pairs)
    @rule(chosen=st.lists(st.tuples(picks, results, damages), min_size=1, max_size=3), repeats=st.booleans())
    def finish(self, chosen: list[tuple[int, Outcome, dict[str, Any]]], repeats: bool) -> None:
        self.report("finish", [(self.pick(pick), outcome, damage) for pick, outcome, damage in chosen], repeats)

    @precondition(lambda self: self.pairs)
    @rule(chosen=st.lists(st.tuples(picks, outcomes, damages), min_size=1, max_size=3), repeats=st.booleans())
    def fail(self, chosen: list[tuple[int, Outcome, dict[str, Any]]], repeats: bool) -> None:
        self.report("fail", [(self.pick(pick), outcome, damage) for pick, outcome, damage in chosen], repeats)

    def report(self, verb: str, chosen: list[tuple[GrantPair, Outcome, dict[str, Any]]], repeats: bool) -> None:
        shown = []
        for pair, outcome, damage in chosen:
            reports = [
                Report(grant.job_id, pair.worker_id, grant.lease_id, grant.attempt, outcome, self.clock.wall())
                for grant in (pair.under_test, pair.model)
            ]
            shown.append((msgspec.structs.replace(reports[0], **damage), msgspec.structs.replace(reports[1], **damage)))
        for _ in range(2 if repeats else 1):  # again: as a worker does that heard no answer
            self.both_show(verb, shown)

    @precondition(lambda self: self.pairs)
    @rule(pick=picks, outcome=outcomes, worker_id=workers, terms=lease_terms, result=results, repeats=st.booleans())
    def set_going_again(
        self, pick: int, outcome: Outcome, worker_id: str, terms: dict[str, Any], result: Outcome, repeats: bool
    ) -> None:
        """Fail an attempt, cancel and requeue the job, and finish the next attempt."""
        pair = self.pick(pick)
        job_id = pair.under_test.job_id
        self.report("fail", [(pair, outcome, {})], repeats=False)
        self.cancel([job_id])
        self.requeue([job_id])
        self.lease_by_id(worker_id, "1", [job_id], 1, terms)
        self.report("finish", [(self.pairs[-1], result, {})], repeats)

    def pick(self, number: int) -> GrantPair:
        """Return mostly one of the latest grants, where the interesting races are; now and then an old one."""
        if number % 4:
            return self.pairs[-1 - number % min(4, len(self.pairs))]
        return self.pairs[number % len(self.pairs)]

    # -- the leader -----------------------------------------------------------------------------------------------
    @rule(stays=st.booleans(), step=st.sampled_from([1, 1, 3, 0, -1]))
    def take_over(self, stays: bool, step: int) -> None:
        old = self.epoch
        took_over = self.both("take_over", "leader", old + step)
        assert took_over == (step > 0), "I7: epochs strictly rise"
        self.history.took_over("leader", old + step, done=took_over)
        self.epoch = max(old, old + step)
        assert self.both("epoch") == (self.epoch, "leader")
        if stays and took_over:
            for store in (self.under_test, self.model):
                self.is_refused(store, old)

    @staticmethod
    def is_refused(store: Store, epoch: int) -> None:
        try:
            store.reap(epoch=epoch)
        except StaleEpoch:
            return
        raise AssertionError(f"epoch {epoch} still leads {type(store).__name__}")

    @rule(job_id=job_ids, worker_id=workers, incarnation=incarnations, terms=lease_terms)
    def assign(self, job_id: str, worker_id: str, incarnation: str, terms: dict[str, Any]) -> None:
        assignment = Assignment(job_id=job_id, worker_id=worker_id, incarnation=incarnation, **terms)
        mine, theirs = (store.assign([assignment], epoch=self.epoch) for store in (self.under_test, self.model))
        found = [[grant for grant in grants if grant is not None] for grants in (mine, theirs)]
        self.granted(found[0], found[1], LeaseRequest(worker_id=worker_id, incarnation=incarnation, **terms))

    def did(self, duty: str, answer: Any) -> None:
        self.history.turn("leader", Turn(epoch=self.epoch), Answers(**{duty: answer}))

    @rule()
    def reap(self) -> None:
        mine, theirs = (store.reap(epoch=self.epoch) for store in (self.under_test, self.model))
        assert sorted(map(str, mine)) == sorted(map(str, theirs))
        self.did("reap", mine)

    @rule()
    def skip(self) -> None:
        self.did("skip", self.both("skip", epoch=self.epoch))

    @rule()
    def promote(self) -> None:
        self.both("promote", epoch=self.epoch)

    @rule(age_s=st.sampled_from([0.5, 60.0]))
    def prune(self, age_s: float) -> None:
        self.did("prune", self.both("prune", before=self.clock.wall() - age_s, epoch=self.epoch))

    # -- blobs ----------------------------------------------------------------------------------------------------
    @rule()
    def bring_blob(self) -> None:
        self.both("blobs_stored", self.both("place_blobs", [BlobClaim(BLOB, 3)]))

    @rule(removes=st.booleans())
    def change_cache(self, removes: bool) -> None:
        if removes:
            self.both("remove_cache", [("cache", ">")])
        else:
            self.both("put_cache", [CacheOrder("cache", ">", "alice", (CacheEntry("a", BLOB, 3),))])

    @rule(age_s=st.sampled_from([-1.0, 30.0]), deletes=st.booleans())
    def collect(self, age_s: float, deletes: bool) -> None:
        condemned = self.both("condemn_blobs", CondemnOrder(self.clock.wall() - age_s), epoch=self.epoch)
        if deletes:
            self.both("forget_blobs", condemned.places, epoch=self.epoch)

    # -- time and accidents ---------------------------------------------------------------------------------------
    @rule(seconds=st.sampled_from([1.0, 4.25, 8.0, 18.0, 40.0]), looks=st.booleans())
    def advance(self, seconds: float, looks: bool) -> None:
        """Let time pass; mostly the leader then does its duties, sometimes late."""
        self.clock.advance(seconds)
        if looks:
            self.reap()
            self.skip()
            self.promote()

    @rule(seconds=st.sampled_from([-100.0, 100.0]))
    def jump_wall(self, seconds: float) -> None:
        self.clock.jump_wall(seconds)

    @rule(ids=some_job_ids, bodies=st.lists(specs, min_size=1, max_size=2))
    def abandon_a_turn(self, ids: list[str], bodies: list[JobSpec]) -> None:
        """Do all of this in a turn that is abandoned: the model is not told."""
        try:
            with self.under_test.turn():
                self.under_test.submit([Submission(spec, "eve", body_hash(spec)) for spec in bodies], on_failed="rerun")
                self.under_test.lease([LeaseRequest(worker_id="w3", incarnation="1", patterns=(">",), limit=3)])
                self.under_test.cancel(ids, actor="eve")
                self.under_test.requeue(ids, actor="eve")
                self.under_test.prune(before=self.clock.wall() + 1, epoch=self.epoch)
                self.under_test.take_over("usurper", self.epoch + 1)
                raise _Abandoned
        except _Abandoned:
            return

    # -- what must hold after every step --------------------------------------------------------------------------
    @invariant()
    def both_know_the_same(self) -> None:
        if not hasattr(self, "model"):
            return
        mine, theirs = (store.find(Filter(), limit=len(JOB_IDS) + 1) for store in (self.under_test, self.model))
        assert [job.job_id for job in mine.jobs] == [job.job_id for job in theirs.jobs]
        for job, other in zip(mine.jobs, theirs.jobs, strict=True):
            plain, wanted = self.plain_job(job), self.plain_job(other)
            differs = {name: (plain[name], wanted[name]) for name in plain if plain[name] != wanted[name]}
            assert not differs, f"{job.job_id} differs from the model (has, should have): {differs}"
        for job in mine.jobs:
            self.both("incidents", job.job_id)
            self.both("ready_ahead", job.job_id)
        counts = [
            {group: count for group, count in store.counts().items() if any(msgspec.structs.astuple(count))}
            for store in (self.under_test, self.model)
        ]
        assert counts[0] == counts[1]
        self.both("next_due")
        self.both("top_band")
        self.both("ended_among", [*JOB_IDS, "unknown"])
        owners = [sorted(store.blob_owners(BLOB)) for store in (self.under_test, self.model)]
        assert owners[0] == owners[1]
        assert self.both("blob_places", [BLOB]) != [None] or not owners[0], "a job refers to a blob that is not there"
        self.history.check(mine.jobs, {job.job_id: self.under_test.incidents(job.job_id) for job in mine.jobs})


def _check_choice(candidates: list[Job], chosen: list[str], limit: int) -> None:
    """Check strict priority; within a priority a share for every group; within a group the oldest first."""
    by_id = {job.job_id: job for job in candidates}
    assert set(chosen) <= set(by_id), f"granted {set(chosen) - set(by_id)}, which was not to be had"
    assert len(chosen) == len(set(chosen)) == min(limit, len(candidates))
    priorities = [by_id[job_id].priority for job_id in chosen]
    assert priorities == sorted((job.priority for job in candidates), reverse=True)[: len(chosen)]
    for priority in set(priorities):
        groups: dict[str, list[str]] = {}
        for job in candidates:
            if job.priority == priority:
                groups.setdefault(group_of(job.spec.subject), []).append(job.job_id)
        shares = Counter(group_of(by_id[job_id].spec.subject) for job_id in chosen if by_id[job_id].priority == priority)
        for group, waiting in groups.items():
            assert set(waiting[: shares[group]]) <= set(chosen), f"{group}: {chosen} are not the oldest of {waiting}"
        assert shares.total() < len(groups) or len(shares) == len(groups), f"{dict(shares)} leaves out one of {list(groups)}"
