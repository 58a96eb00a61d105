"""A world of thousands of workers: servers, machines, store and network of a small one, observed less and with fewer timers.

It leaves out what only costs time at this size: the history, the hash over all events, timers that find nothing due. A worker's
timer fires when a heartbeat is due, or soon again while it has no connection; its machine judges as always. `Load` draws the
jobs, `Tally` counts delays by time, group and priority, the work of each server, and follows a sample of jobs.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import random
from array import array
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import accumulate, compress

import msgspec

from tasuki.core.broker.events import Hinted
from tasuki.core.client_machine import Call, CallAnswered, ResultsArrived
from tasuki.core.cluster_messages import Hint, decode
from tasuki.core.job import TERMINAL, JobSpec, Outcome
from tasuki.core.machine import Closed, Received, Ticked
from tasuki.core.protocol import Accepted, HeartbeatAnswer, JobResult, SubmitJobs
from tasuki.core.store_messages import Answers, Grant, ReportStatus, Turn
from tasuki.core.worker.events import AttemptEnded, Event, Started
from tasuki.errors import TasukiError
from tasuki.stores.store import Store
from tasuki.testing.sim.clients import SimClient
from tasuki.testing.sim.history import AnyLine, LeadingEvent
from tasuki.testing.sim.network import Network, NetworkPeer, NetworkServer
from tasuki.testing.sim.recorder import LISTS, Recorder, lists_of
from tasuki.testing.sim.servers import CoordinationNode, SimServer, StoreNode, StoreTask
from tasuki.testing.sim.workers import SimulatedAttempt, SimWorker
from tasuki.testing.sim.world import HostClock, Streams, World

# ---------------------------------------------------------------------------------------------------- counters

BUCKET_S = 10.0  # how finely the delays are told apart by the time of their submit
SAMPLED = "sampled-"  # how the ids of jobs begin that are followed


class Followed(msgspec.Struct):
    """One job of the sample."""

    accepted: bool = False
    grants: list[int] = []
    finished: list[tuple[int, str | None]] = []
    """(attempt, sha256 of the result) of accepted reports that ended the job."""
    results: list[tuple[str, int, str | None]] = []
    """(state, attempt, sha256) as its submitter heard."""


class ServerTally(msgspec.Struct):
    """One server's share of the work."""

    turns: int = 0
    items: array[int] = msgspec.field(default_factory=lambda: array("I"))
    """The number of items of each turn."""
    submitted: int = 0
    granted: int = 0
    store_s: float = 0.0
    """The virtual time during which a turn of the server was at the store."""
    duty_turns: int = 0
    duty_s: float = 0.0


class Tally(Recorder):
    """All counters of one world."""

    def __init__(self, world: World, store: Store, clock: HostClock) -> None:
        super().__init__(world, store, clock)
        self.items: Counter[str] = Counter()
        """Jobs, leases and requests in the calls of each verb."""
        self.duties: Counter[str] = Counter()
        """Work that leaders found to do."""
        self.servers: defaultdict[str, ServerTally] = defaultdict(ServerTally)
        self.delays: defaultdict[tuple[int, str, int], array[float]] = defaultdict(lambda: array("f"))
        """By (bucket of the submit, group, priority): delays from the submit to the start of the first attempt."""
        self.attempts: Counter[str] = Counter()
        """Attempts by worker."""
        self.waiting: dict[str, tuple[float, str, int]] = {}
        """Jobs of which no attempt has started: submit time, group and priority."""
        self.unheard: dict[str, None] = {}
        """Accepted jobs whose result has not come to their submitter."""
        self.groups: dict[str, str] = {}
        """Groups of the jobs that have not ended."""
        self.followed: dict[str, Followed] = {}
        self.lost_at: dict[str, float] = {}
        """Times at which jobs lost their worker."""
        self.recovered: list[float] = []
        """Delays until such jobs ran again."""
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
    def turn(self, server_id: str, turn: Turn, answers: Answers, *, waited_s: float = 0.0) -> None:
        if turn.epoch:
            self._duty(server_id, turn, answers)
            return
        server = self.servers[server_id]
        lists = lists_of(turn)
        sizes = list(map(len, lists))
        self.verbs.update(compress(LISTS, lists))
        for name, size in zip(LISTS, sizes, strict=True):
            if size:
                self.items[name] += size
        server.turns += 1
        server.items.append(sum(sizes))
        server.submitted += len(turn.submit)
        self.heartbeats += sum(question.verb == "renew" for question in turn.context.questions())
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
        found = {"reap": len(answers.reap), "promote": answers.promote, "prune": answers.prune}
        for name, asked in (("reap", turn.reap), ("promote", turn.promote), ("prune", turn.prune)):
            if asked:
                self.verbs[name] += 1
                self.duties[name] += found[name]

    # -- the sample -----------------------------------------------------------------------------------------------
    def violations(self) -> list[str]:
        """Return what the followed jobs show against I1, I5 and I13, once nothing is left to do."""
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


# ---------------------------------------------------------------------------------------------------- load

SIGMA = 0.8  # of the lognormal times: the longest of a hundred attempts takes some five times the mean
FAILING = 0.02  # of all attempts; each is tried again after BACKOFF_S
BACKOFF_S = 10.0
SAMPLED_EVERY = 50
PRIORITIES = ((9, 0.05), (5, 0.75), (1, 0.20))
USUAL_PRIORITY = 5


class LoadGroup(msgspec.Struct, frozen=True):
    """Jobs of one kind: their share of all jobs, and their length beside the average job."""

    name: str
    share: float
    length: float


GROUPS = (
    LoadGroup("render", 0.50, 1.2),
    LoadGroup("price", 0.25, 0.6),
    LoadGroup("report", 0.15, 1.3),
    LoadGroup("mail", 0.08, 0.4),
    LoadGroup("audit", 0.02, 1.0),
)
REGIONS = ("asia", "europe", "america")
SUBJECTS = {group.name: tuple(f"{group.name}.{region}" for region in REGIONS) for group in GROUPS}
FLOODING = "report"

PATTERNS = ((">",), (">",), (">",), (">",), ("render.>",))
"""Patterns of workers: four in five take everything, the others are kept for the largest group."""

DONE = Outcome(exit_code=0)
BROKEN = Outcome(exit_code=1, error_code="EXIT_CODE", message="it broke")


class Load:
    """Draws arrivals, specs, times and outcomes."""

    def __init__(self, streams: Streams, tally: Tally, mean_s: float) -> None:
        self._chance = streams.load
        self._attempts = streams.attempts
        self._tally = tally
        self._group_marks = list(accumulate(group.share for group in GROUPS))
        self._priority_marks = list(accumulate(share for _, share in PRIORITIES))
        average = sum(group.share * group.length for group in GROUPS)
        self._mu = {group.name: _mu(mean_s * group.length / average) for group in GROUPS}
        self._number = 0

    def until_next_s(self, rate: float) -> float:
        return self._chance.expovariate(rate)

    def spec(self, at: float, group: str = "") -> JobSpec:
        """Draw the next job; if a group is named, of this group at the usual priority."""
        chance = self._chance
        name = group or GROUPS[_pick(chance, self._group_marks)].name
        priority = USUAL_PRIORITY if group else PRIORITIES[_pick(chance, self._priority_marks)][0]
        self._number += 1
        sampled = self._number % SAMPLED_EVERY == 0
        job_id = f"{SAMPLED if sampled else 'job-'}{self._number}"
        self._tally.asked(job_id, at, name, priority, sampled=sampled)
        subject = SUBJECTS[name][self._number % len(REGIONS)]
        return JobSpec(job_id=job_id, subject=subject, exec="program", priority=priority, backoff_s=BACKOFF_S)

    def lasts_s(self, group: str) -> float:
        return self._attempts.lognormvariate(self._mu[group], SIGMA)

    def outcome(self, job_id: str, attempt: int, worker_id: str) -> Outcome:
        if self._attempts.random() < FAILING:
            return BROKEN
        if not job_id.startswith(SAMPLED):
            return DONE
        result = f"{job_id} {attempt} {worker_id}".encode()
        return Outcome(exit_code=0, result=result, result_sha256=hashlib.sha256(result).hexdigest())


def _mu(mean_s: float) -> float:
    return math.log(mean_s) - SIGMA * SIGMA / 2


def _pick(chance: random.Random, marks: list[float]) -> int:
    return min(bisect(marks, chance.random() * marks[-1]), len(marks) - 1)


TURN_S = 0.012  # what a transaction takes at a busy database, drawn from half to one and a half of it,
ITEM_S = 0.000_03  # and for each item in it (bench/postgresql.py: some 10,000 jobs/s, three verbs each)
START_S = 0.02  # until a program runs
OFFLINE_TICK_S = 0.1
LATE_S = 0.001  # a worker's timer fires so much after its heartbeat is due, never a rounding before it

_ITEMS = ("finish", "fail", "start", "renew", "release", "submit", "held", "get")


class ScaleWorld(World):
    """A world without a hash; of all lines only leaderships are kept."""

    leaderships: list[list[float | str | int]]
    """[at, server_id, epoch]; epoch 0: no more."""

    def run_until(self, end: float) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end:
            self.at, _, _, action, arguments = pop(heap)
            self.events += 1
            action(*arguments)
        self.at = end

    def tell(self, line: AnyLine) -> None:
        if type(line) is LeadingEvent:
            self.leaderships.append([round(line.at, 3), line.server_id, line.epoch])


class ScaleNetwork(Network):
    """A network whose links are all alike: none is slower than the others by itself."""

    def _dialed(self, node: NetworkPeer, server: NetworkServer) -> None:
        super()._dialed(node, server)
        if node.link is not None:
            node.link.extra_s = 0.0


class ScaleStore(StoreNode):
    """One busy database without faults: a turn takes longer the more is in it."""

    recorder: Tally

    def __init__(self, world: World, network: Network) -> None:
        super().__init__(world, network)
        self.recorder = Tally(world, self.store, self.clock)

    def latency_s(self) -> float:
        return TURN_S * (0.5 + self._chance.random())

    def _try(self, task: StoreTask, wait_s: float) -> None:
        turn: Turn = task.turn
        took_s = self.latency_s() + ITEM_S * sum(len(getattr(turn, name)) for name in _ITEMS)
        server = self.recorder.servers[task.server.name]
        server.store_s += took_s
        if turn.epoch:
            server.duty_s += took_s
        self.world.after(wait_s + took_s, "commits", self._commit, task)

    def _answer(self, task: StoreTask, answer: Answers | TasukiError) -> None:
        if task.server.life == task.life:
            task.server.answered(task.turn, answer)


class ScaleCoordination(CoordinationNode):
    """A coordination whose hints reach everybody at once, and are decoded once for all servers."""

    tally: Tally

    def publish(self, sender: SimServer, pieces: list[bytes]) -> None:
        self.tally.hints += len(pieces)
        hints = [decode(piece) for piece in pieces]
        self.world.after(self.network.delay_s(sender.name, "everybody"), "hints", self._spread, sender, hints)

    def _spread(self, sender: SimServer, hints: list[Hint]) -> None:
        for server in self.servers:
            if server is not sender and server.alive:
                self.tally.hints_heard += len(hints)
                for hint in hints:
                    server.tell(Hinted(hint))


class ScaleWorker(SimWorker):
    """A worker whose timers fire only when something is due."""

    load: Load
    tally: Tally
    _timer = 0

    def tick_for_ever(self, tick: Callable[[], None], every_s: float) -> None:
        self._tick_in(self._beat_s * self.sim.streams.processes.random())

    @property
    def _beat_s(self) -> float:
        return (self.sim.options.lease_ttl_s or 15.0) / 3 + LATE_S

    def _tick_in(self, delay_s: float) -> None:
        """Plan the next look, in place of an earlier one."""
        self._timer += 1
        self.sim.after(delay_s, "ticks", self._tick_now, self.life, self._timer)

    def _tick_now(self, life: int, timer: int) -> None:
        if life != self.life or timer != self._timer:
            return
        self.hear(Ticked())
        if life == self.life:
            self._tick_in(self._beat_s if self.machine.online else OFFLINE_TICK_S)

    def hear(self, event: Event) -> None:
        super().hear(event)
        if type(event) is Closed and self.alive:
            self._tick_in(OFFLINE_TICK_S * self.sim.streams.jitter.random())

    def hear_message(self, event: Received) -> None:
        self.apply(event)
        if type(event.message) is HeartbeatAnswer and self.alive:
            for lease_id, attempt in self.attempts.items():
                attempt.deadline = self.machine.lease_deadline(lease_id)

    def _end(self, what: str, *, silent: bool = False) -> None:
        for attempt in self.attempts.values():
            self.tally.lost_at[attempt.grant.job_id] = self.sim.at
        super()._end(what, silent=silent)

    # -- attempts -------------------------------------------------------------------------------------------------
    def _run(self, grant: Grant) -> None:
        deadline = self.machine.lease_deadline(grant.lease_id)
        attempt = self.attempts[grant.lease_id] = SimulatedAttempt(grant, self.identity.incarnation, deadline)
        self._plan(START_S * self.sim.streams.attempts.random(), "starts", self._start_attempt, attempt)

    def _start_attempt(self, attempt: SimulatedAttempt) -> None:
        if attempt.stopping:
            return
        grant = attempt.grant
        attempt.runs = True
        self.tally.started(self.name, grant.job_id)
        outcome = self.load.outcome(grant.job_id, grant.attempt, self.name)
        lasts_s = self.load.lasts_s(self.tally.groups[grant.job_id])
        self._plan(lasts_s, "ends", self._over, attempt, "ended", outcome)
        self.hear(Started(grant.lease_id))

    def _gone(self, attempt: SimulatedAttempt, how: str) -> None:
        attempt.gone = True

    def _told_by_keeper(self, event: Started | AttemptEnded) -> None:
        self.attempts.pop(event.lease_id, None)
        self.hear(event)


class ScaleClient(SimClient):
    """A client that submits one job at a time and counts what comes of it."""

    tally: Tally

    def _begin(self) -> None:
        super()._begin()
        self._submitted: dict[int, str] = {}
        self._numbers = itertools.count(1)

    def submit_one(self, spec: JobSpec) -> None:
        ticket = next(self._numbers)
        self._submitted[ticket] = spec.job_id
        specs = [spec]
        self.apply(Call(ticket, lambda msg_id: SubmitJobs(msg_id, specs, True), watch=(spec.job_id,)))

    def _answered(self, answered: CallAnswered) -> None:
        job_id = self._submitted.pop(answered.ticket)
        if isinstance(answered.answer, Accepted) and not any(item.code for item in answered.answer.exceptions):
            self.tally.was_accepted(job_id)
        else:
            raise AssertionError(f"{self.name}: {job_id} was not accepted: {answered.answer or answered.error}")

    def _arrived(self, arrived: ResultsArrived) -> None:
        for item in arrived.items:
            self.tally.arrived(item)
