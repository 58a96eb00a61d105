"""What is counted in a big world: delays by time, group and priority; turns, verbs and duties by server; and a sample of jobs
that is followed from the submit to the result (I1, I5, I13).

Hears of every committed turn in the place of the simulator's recorder, and tells nothing: a history of millions of jobs would
not fit.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from itertools import compress
from operator import attrgetter

import msgspec

from tasuki.core.job import TERMINAL
from tasuki.core.protocol import JobResult
from tasuki.core.store_messages import VERBS, Answers, ReportStatus, Turn
from tasuki.stores.store import Store
from tasuki.testing.sim.process import HostClock
from tasuki.testing.sim.recorder import Recorder
from tasuki.testing.sim.world import World

BUCKET_S = 10.0  # how finely the delays are told apart by the time of their submit
SAMPLED = "sampled-"  # how the ids of jobs begin that are followed

_LISTS = tuple(verb.name for verb in VERBS if not verb.leads)

_lists = attrgetter(*_LISTS)


class Followed(msgspec.Struct):
    """One job of the sample."""

    accepted: bool = False
    grants: list[int] = []
    finished: list[tuple[int, str | None]] = []
    """(attempt, sha256 of the result) of reports that were accepted and ended it."""
    results: list[tuple[str, int, str | None]] = []
    """(state, attempt, sha256) as its submitter heard."""


class ServerTally(msgspec.Struct):
    """One server's share of the work."""

    turns: int = 0
    items: array[int] = msgspec.field(default_factory=lambda: array("I"))
    """How many items each turn had."""
    submitted: int = 0
    granted: int = 0
    store_s: float = 0.0
    """Virtual time during which a turn of it was at the store."""
    duty_turns: int = 0
    duty_s: float = 0.0
    leading_s: float = 0.0


class Tally(Recorder):
    """All counters of one world."""

    def __init__(self, world: World, store: Store, clock: HostClock) -> None:
        super().__init__(world, store, clock)
        self.items: Counter[str] = Counter()
        """Jobs, claims and requests in the calls of each verb."""
        self.duties: Counter[str] = Counter()
        """What leaders found to do."""
        self.servers: defaultdict[str, ServerTally] = defaultdict(ServerTally)
        self.delays: defaultdict[tuple[int, str, int], array[float]] = defaultdict(lambda: array("f"))
        """By (bucket of the submit, group, priority): from the submit to the start of the first attempt."""
        self.attempts: Counter[str] = Counter()
        """By worker."""
        self.waiting: dict[str, tuple[float, str, int]] = {}
        """Jobs of which no attempt has started: when, group and priority."""
        self.unheard: dict[str, None] = {}
        """Accepted jobs whose result has not come to their submitter."""
        self.groups: dict[str, str] = {}
        """Of the jobs that have not ended."""
        self.followed: dict[str, Followed] = {}
        self.lost_at: dict[str, float] = {}
        """Jobs whose worker died, and when."""
        self.recovered: list[float] = []
        """How long it took until such a job ran again."""
        self.submits = self.accepted = self.starts = self.ends = 0
        self.empty_leases = self.heartbeats = self.hints = self.hints_heard = self.fenced = 0

    # -- clients --------------------------------------------------------------------------------------------------
    def asked(self, job_id: str, at: float, group: str, priority: int, *, sampled: bool) -> None:
        self.submits += 1
        self.waiting[job_id] = (at, group, priority)
        self.groups[job_id] = group
        if sampled:
            self.followed[job_id] = Followed()

    def was_accepted(self, job_id: str) -> None:
        self.accepted += 1
        self.unheard[job_id] = None
        if job_id in self.followed:
            self.followed[job_id].accepted = True

    def arrived(self, result: JobResult) -> None:
        self.ends += self.unheard.pop(result.job_id, 0) is None
        self.groups.pop(result.job_id, None)
        followed = self.followed.get(result.job_id)
        if followed is not None:
            followed.results.append((result.state, result.attempt, result.outcome.result_sha256))

    # -- workers --------------------------------------------------------------------------------------------------
    def started(self, worker_id: str, job_id: str) -> None:
        at = self.world.at
        self.starts += 1
        self.attempts[worker_id] += 1
        waited = self.waiting.pop(job_id, None)
        if waited is not None:
            asked_at, group, priority = waited
            self.delays[int(asked_at // BUCKET_S), group, priority].append(at - asked_at)
        if self.lost_at and (lost_at := self.lost_at.pop(job_id, None)) is not None:
            self.recovered.append(at - lost_at)

    # -- the store ------------------------------------------------------------------------------------------------
    def turn(self, server_id: str, turn: Turn, answers: Answers) -> None:
        if turn.epoch:
            self._duty(server_id, turn, answers)
            return
        server = self.servers[server_id]
        lists = _lists(turn)
        sizes = list(map(len, lists))
        self.verbs.update(compress(_LISTS, lists))
        for name, size in zip(_LISTS, sizes, strict=True):
            if size:
                self.items[name] += size
        server.turns += 1
        server.items.append(sum(sizes))
        server.submitted += len(turn.submit)
        self.heartbeats += len(turn.context.renew_routes)
        for grants in answers.lease:
            if not grants:
                self.empty_leases += 1
                continue
            server.granted += len(grants)
            for grant in grants:
                if grant.job_id.startswith(SAMPLED):
                    self.followed[grant.job_id].grants.append(grant.attempt)
        for reports, recorded in ((turn.finish, answers.finish), (turn.fail, answers.fail)):
            for report, word in zip(reports, recorded, strict=True):
                if word.answer is ReportStatus.FENCED:
                    self.fenced += 1
                elif report.job_id.startswith(SAMPLED) and word.answer is ReportStatus.RECORDED and word.state in TERMINAL:
                    self.followed[report.job_id].finished.append((report.attempt, report.outcome.result_sha256))

    def _duty(self, server_id: str, turn: Turn, answers: Answers) -> None:
        self.servers[server_id].duty_turns += 1
        if turn.take_over:
            self.verbs["take_over"] += 1
            return
        found = {"reap": len(answers.reap), "promote": answers.promote.count, "prune": answers.prune}
        for name, asked in (("reap", turn.reap), ("promote", turn.promote), ("prune", turn.prune)):
            if asked:
                self.verbs[name] += 1
                self.duties[name] += found[name]

    # -- the sample -----------------------------------------------------------------------------------------------
    def violations(self) -> list[str]:
        """What the followed jobs show against I1, I5 and I13, once nothing is left to do."""
        found = [f"I1: {job_id} was accepted, and its submitter never heard of its end" for job_id in list(self.unheard)[:5]]
        for job_id, job in self.followed.items():
            if not job.accepted:
                continue
            if len(job.results) != 1:
                found.append(f"I1: {job_id} has {len(job.results)} results")
            if job.grants != list(range(1, len(job.grants) + 1)):
                found.append(f"I5: {job_id} was granted as attempts {job.grants}")
            told = [(attempt, sha256) for _, attempt, sha256 in job.results]
            if job.finished and told != job.finished:
                found.append(f"I13: {job_id} ended by {job.finished}, and its submitter heard {told}")
        return found
