"""History lines of committed turns: from the turn, its answers, and the rows after it.

Reads the store, and never writes. Lines have the order in which `stores.batching.execute` runs the verbs that they tell of; the
rows come last, each once.
"""

from __future__ import annotations

from collections import Counter
from itertools import compress
from operator import attrgetter
from typing import Protocol

from tasuki.core.job import TERMINAL, Job, OnDisconnect
from tasuki.core.pauses import PauseAnswer
from tasuki.core.store_messages import OWN_PROGRAMS, VERBS, Answers, LeaseStatus, MissingBlobs, ReportStatus, Turn
from tasuki.errors import Conflict
from tasuki.stores.store import Store
from tasuki.testing.sim import history

LISTS = tuple(verb.name for verb in VERBS if not verb.leads)
_LEADER = tuple(verb.name for verb in VERBS if verb.leads)

lists_of = attrgetter(*LISTS)


class _World(Protocol):
    """The part of a world that a recorder needs."""

    @property
    def at(self) -> float: ...
    def tell(self, line: history.AnyLine) -> None: ...


class _Clock(Protocol):
    """The store's wall clock."""

    def wall(self) -> float: ...
    def highest_wall(self) -> float: ...


class Recorder:
    """Records what turns did to one store."""

    def __init__(self, world: _World, store: Store, clock: _Clock) -> None:
        self.world = world
        self.store = store
        self._clock = clock
        self.verbs: Counter[str] = Counter()
        """Calls of each verb; a leader's calls that found nothing to do are not counted."""
        self.open: dict[str, None] = {}
        """Jobs that are not terminal."""
        self.jobs: dict[str, None] = {}
        """Jobs that were stored and not removed."""
        self._ahead: dict[str, history.GrantedEvent] = {}
        """Runs that are assigned ahead and that their workers have not fetched."""
        self._unfired: dict[str, None] = {}
        """Runs that were stored ahead of their times, which have not come."""
        self._last: dict[str, history.RowEvent] = {}
        self._touched: dict[str, None] = {}

    def turn(self, server_id: str, turn: Turn, answers: Answers, *, waited_s: float = 0.0) -> None:
        """Record a committed turn."""
        self._touched = {}
        if self._unfired or self._ahead:
            self._look_ahead(turn, answers)
        if turn.epoch:
            self._leader(server_id, turn, answers, waited_s)
        else:
            self.verbs.update(compress(LISTS, lists_of(turn)))
            self._workers(turn, answers)
            if turn.cancel or turn.requeue:
                self._orders(turn, answers)
            for order, answer in zip(turn.pause, answers.pause, strict=True):
                if answer is PauseAnswer.DONE:
                    self.world.tell(history.PausedEvent(at=self.world.at, pattern=order.pattern, paused=not order.resume))
            if turn.submit or turn.rerun:
                self._submitted(turn, answers)
            if turn.lease:
                self._granted(turn, answers)
            if self._ahead and turn.held:
                self._fetched(answers)
        self._rows()

    def refused(self, server_id: str, turn: Turn) -> None:
        """Record that the store refused the turn's epoch."""
        self.world.tell(history.LedEvent(at=self.world.at, server_id=server_id, epoch=turn.epoch, done=False))

    def took_over(self, server_id: str, epoch: int, *, done: bool) -> None:
        self.verbs["take_over"] += 1
        self.world.tell(history.TookOverEvent(at=self.world.at, server_id=server_id, epoch=epoch, done=done))

    # -- the leader -----------------------------------------------------------------------------------------------
    def _leader(self, server_id: str, turn: Turn, answers: Answers, waited_s: float) -> None:
        at = self.world.at
        if turn.take_over:
            self.took_over(server_id, turn.epoch, done=answers.take_over)
            return
        self.verbs.update(name for name in _LEADER if getattr(answers, name))
        self.world.tell(history.LedEvent(at=at, server_id=server_id, epoch=turn.epoch, done=True, waited_s=waited_s))
        for one in answers.reap:
            self._touched[one.job_id] = None
            self.world.tell(
                history.ReapedEvent(
                    at=at, job_id=one.job_id, attempt=one.attempt, worker_id=one.worker_id, state=one.state, epoch=turn.epoch
                )
            )
        self._touched.update(dict.fromkeys(skipped.job_id for skipped in answers.skip))
        for job_id, canceled in answers.fire.replaced:
            self._touched[job_id] = None
            self.world.tell(history.CanceledEvent(at=at, job_id=job_id, state=canceled.state or "", requested=canceled.requested))
        for run in answers.fire.runs:
            self._touched[run.job_id] = self.jobs[run.job_id] = None
            definition = str(run.definition_id)
            self.world.tell(history.FiredEvent(at=at, definition=definition, nominal=run.scheduled_for, job_id=run.job_id))
            self._unfired.pop(run.job_id, None)
        self._unfired.update({run.job_id: None for run in answers.fire.ahead if not run.is_due and run.job_id not in self.jobs})
        self._assigned(turn, answers)
        if answers.prune:
            known = list(self.jobs)
            for job_id, job in zip(known, self.store.get(known), strict=True):
                if job is None:
                    self.world.tell(history.RemovedEvent(at=at, job_id=job_id))
                    del self.jobs[job_id]
                    del self._last[job_id]

    # -- runs that are assigned ahead -------------------------------------------------------------------------------
    def _look_ahead(self, turn: Turn, answers: Answers) -> None:
        """Record which runs that nobody has fetched are gone, or not their workers' any more."""
        known = dict.fromkeys([*self._unfired, *self._ahead])
        told = {one.job_id for one in answers.reap} | {job_id for job_id, *_ in (*turn.cancel, *answers.fire.replaced)}
        for job_id, job in zip(known, self.store.get(list(known)), strict=True):
            granted = self._ahead.get(job_id)
            if job is None:
                for facts in (self._ahead, self._unfired, self.open, self._last):
                    facts.pop(job_id, None)
                self.world.tell(history.WithdrawnEvent(at=self.world.at, job_id=job_id))
            elif granted is not None and (job_id in told or job.lease is None or job.lease.lease_id != granted.lease_id):
                del self._ahead[job_id]
                if job_id not in told:
                    fields = ("attempt", "lease_id", "worker_id", "incarnation", "owner")
                    lease = {name: getattr(granted, name) for name in fields}
                    self.world.tell(history.ShownEvent(at=self.world.at, verb="release", job_id=job_id, held=True, **lease))

    def _assigned(self, turn: Turn, answers: Answers) -> None:
        wall, highest_wall = self._clock.wall(), self._clock.highest_wall()
        for assignment, grant in zip(turn.assign, answers.assign, strict=True):
            if grant is not None:
                line = history.GrantedEvent(
                    at=self.world.at,
                    job_id=grant.job_id,
                    attempt=grant.attempt,
                    generation=0,
                    lease_id=grant.lease_id,
                    worker_id=assignment.worker_id,
                    incarnation=assignment.incarnation,
                    wall=wall,
                    highest_wall=highest_wall,
                    owner=assignment.owner,
                    ahead=True,
                )
                self._ahead[grant.job_id] = line
                self.world.tell(line)

    def _fetched(self, answers: Answers) -> None:
        for grant in [grant for grants in answers.held for grant in grants]:
            granted = self._ahead.get(grant.job_id)
            if granted is not None and granted.lease_id == grant.lease_id:
                del self._ahead[grant.job_id]
                [job] = self.store.get([grant.job_id])
                assert job is not None
                self._touched[grant.job_id] = None
                self.world.tell(
                    history.FetchedEvent(
                        at=self.world.at,
                        job_id=grant.job_id,
                        attempt=grant.attempt,
                        lease_id=grant.lease_id,
                        wall=self._clock.wall(),
                        highest_wall=self._clock.highest_wall(),
                        not_before=job.not_before,
                        ttl_s=grant.ttl_s,
                    )
                )

    # -- workers --------------------------------------------------------------------------------------------------
    def _workers(self, turn: Turn, answers: Answers) -> None:
        at, wall, tell, touched = self.world.at, self._clock.wall(), self.world.tell, self._touched
        for verb, reports, recorded in (("finish", turn.finish, answers.finish), ("fail", turn.fail, answers.fail)):
            for report, word in zip(reports, recorded, strict=True):
                touched[report.job_id] = None
                accepted, asked_s = word.answer is ReportStatus.RECORDED, report.outcome.retry_in_s
                tell(
                    history.ReportedEvent(
                        at=at,
                        verb=verb,
                        job_id=report.job_id,
                        attempt=report.attempt,
                        lease_id=report.lease_id,
                        worker_id=report.worker_id,
                        accepted=accepted,
                        state=word.state or "" if accepted else "",
                        repeated=word.answer is ReportStatus.REPEATED,
                        result_sha256=report.outcome.result_sha256,
                        owner=report.owner,
                        retry_at=wall + asked_s if asked_s is not None and verb == "fail" else None,
                    )
                )
        shown = [("start", claim, word is not LeaseStatus.LOST) for claim, word in zip(turn.start, answers.start, strict=True)]
        shown += [("renew", claim, word is not LeaseStatus.LOST) for claim, word in zip(turn.renew, answers.renew, strict=True)]
        shown += [("release", claim, done) for claim, done in zip(turn.release, answers.release, strict=True)]
        for verb, claim, held in shown:
            touched[claim.job_id] = None
            tell(
                history.ShownEvent(
                    at=at,
                    verb=verb,
                    job_id=claim.job_id,
                    attempt=claim.attempt,
                    lease_id=claim.lease_id,
                    worker_id=claim.worker_id,
                    incarnation=claim.incarnation,
                    held=held,
                    owner=claim.owner,
                    ttl_s=claim.ttl_s,
                    confirm_s=claim.confirm_s,
                )
            )

    def _granted(self, turn: Turn, answers: Answers) -> None:
        at, wall, highest_wall = self.world.at, self._clock.wall(), self._clock.highest_wall()
        for request, grants in zip(turn.lease, answers.lease, strict=True):
            jobs = self.store.get([grant.job_id for grant in grants]) if grants else ()
            for grant, job in zip(grants, jobs, strict=True):
                assert job is not None
                self._touched[grant.job_id] = None
                self.world.tell(
                    history.GrantedEvent(
                        at=at,
                        job_id=grant.job_id,
                        attempt=grant.attempt,
                        generation=job.generation,
                        lease_id=grant.lease_id,
                        worker_id=request.worker_id,
                        incarnation=request.incarnation,
                        wall=wall,
                        highest_wall=highest_wall,
                        not_before=job.not_before,
                        not_after=job.not_after,
                        on_disconnect=request.on_disconnect,
                        ttl_s=grant.ttl_s,
                        grace_s=request.reconnect_grace_s if request.on_disconnect is OnDisconnect.KEEP else 0.0,
                        owner=request.owner,
                        offered=_is_offered(request.offer.execs, job),
                        subject=job.spec.subject,
                    )
                )

    # -- submitters -----------------------------------------------------------------------------------------------
    def _orders(self, turn: Turn, answers: Answers) -> None:
        at = self.world.at
        for (job_id, _, _), canceled in zip(turn.cancel, answers.cancel, strict=True):
            self._touched[job_id] = None
            self.world.tell(history.CanceledEvent(at=at, job_id=job_id, state=canceled.state or "", requested=canceled.requested))
        if turn.requeue:
            job_ids = [order.job_id for order in turn.requeue]
            for job_id, requeued, job in zip(job_ids, answers.requeue, self.store.get(job_ids), strict=True):
                self._touched[job_id] = None
                generation = job.generation if job is not None else 0
                self.world.tell(history.RequeuedEvent(at=at, job_id=job_id, done=requeued.done, generation=generation))

    def _submitted(self, turn: Turn, answers: Answers) -> None:
        at = self.world.at
        pairs = [*zip(turn.submit, answers.submit, strict=True), *zip(turn.rerun, answers.rerun, strict=True)]
        jobs = self.store.get([submission.spec.job_id for submission, _ in pairs])
        for (submission, answer), job in zip(pairs, jobs, strict=True):
            job_id = submission.spec.job_id
            refused = answer.code if isinstance(answer, Conflict) else "BLOB_MISSING" if isinstance(answer, MissingBlobs) else ""
            if job is not None:
                self._touched[job_id] = None
                self.jobs[job_id] = None
            self.world.tell(
                history.SubmittedEvent(
                    at=at,
                    job_id=job_id,
                    body=submission.body_hash.hex(),
                    created=getattr(answer, "created", False),
                    refused=refused,
                    generation=job.generation if job is not None else 0,
                )
            )

    # -- rows -----------------------------------------------------------------------------------------------------
    def _rows(self) -> None:
        touched = list(self._touched)
        if not touched:
            return
        for job_id, job in zip(touched, self.store.get(touched), strict=True):
            if job is not None:
                self._row(job_id, job, always=False)

    def all_rows(self) -> None:
        """Record the rows of all jobs, at the end of a run."""
        known = list(self.jobs)
        for job_id, job in zip(known, self.store.get(known), strict=True):
            if job is not None:
                self._row(job_id, job, always=True)

    def _row(self, job_id: str, job: Job, *, always: bool) -> None:
        """Record a row, unless a commit touched it and left it as it was."""
        outcome = job.outcome
        terminal = job.state in TERMINAL
        row = history.RowEvent(
            at=self.world.at,
            job_id=job_id,
            state=job.state,
            attempt=job.attempt,
            generation=job.generation,
            failures=job.failures,
            losses=job.losses,
            max_retries=job.spec.max_retries,
            max_losses=job.spec.max_losses,
            lease_id=job.lease.lease_id if job.lease is not None else None,
            not_before=job.not_before,
            error_code=(outcome.error_code or "") if terminal and outcome is not None else "",
            result_sha256=outcome.result_sha256 if outcome is not None else None,
            cancel_requested=job.cancel_requested,
            body=job.body_hash.hex(),
            leader_epoch=job.leader_epoch,
            at_end=always,
        )
        if terminal:
            self.open.pop(job_id, None)
        else:
            self.open[job_id] = None
        last = self._last.get(job_id)
        if always or last is None or _compared(row) != _compared(last):
            self._last[job_id] = row
            self.world.tell(row)


_compared = attrgetter(*(name for name in history.RowEvent.__struct_fields__ if name not in ("at", "at_end")))


def _is_offered(execs: tuple[str, ...] | None, job: Job) -> bool:
    """Return whether a worker with these programs can run the job; judged here anew, not by the code that is tested."""
    if execs is None or not job.spec.exec or job.spec.exec in execs:
        return True
    return OWN_PROGRAMS in execs and job.submitter.startswith("uid:")
