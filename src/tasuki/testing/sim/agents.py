"""Simulated node agents and a client of them: plans of jobs (`core/failover`) over nodes that die, freeze, drain, fill up and
contradict themselves.

    outcome = check_agents(7)                      # SeedOutcome(seed=7, violations=[…])

A world beside that of servers and workers, with which node agents share nothing. Judged is that nothing spins: the client sends
no node more than REQUESTS_PER_S_MAX requests for one job within a second, in any state; and every plan comes to its end.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from tasuki.core.failover import events
from tasuki.core.failover.events import FailoverJob, JobEnded, NodeJobStatus, Refusal
from tasuki.core.failover.nodes import BreakerNote, Capacity, Nodes
from tasuki.core.failover.plan import FailoverPlan
from tasuki.testing.sim.checker_store import Violation, ViolationFound
from tasuki.testing.sim.run import SeedOutcome
from tasuki.testing.sim.world import HotLoop, SimOptions, World

REQUESTS_PER_S_MAX = 10
"""Requests for one job to one node within a second: checks, questions, and as many tries as a breaker lets pass."""
CLIENT_REQUESTS_PER_S_MAX = 30
"""Requests of a client for all its jobs, to all nodes."""
LATENCY_S = 0.005
TICK_S = 0.001
ANSWER_S = 2.0  # a question to a frozen node is given up after that
CHAOS_S = 60.0
LIMIT_S = 120.0
NODES, JOBS, TROUBLES = 3, 6, 14
TROUBLE_KINDS = ("dead", "dead", "frozen", "draining", "full", "full", "full_unseen", "confused")
_SUCCEEDED = JobEnded("succeeded", 0)
_FULL = Refusal(503, "FULL", "all slots are taken", retry_after_s=1.0)


class _Run(NamedTuple):
    """Run of a job at a node, in one of the node's lives."""

    job_id: str
    life: int


class SimAgent:
    """One node agent: slots, results, and the trouble that it is in."""

    def __init__(self, world: World, name: str, slots: int) -> None:
        self._world = world
        self.name = name
        self._slots = slots
        self._running: set[_Run] = set()
        self._done: set[str] = set()
        self._life = 0
        self.trouble = ""
        self._waiting: list[Callable[[], None]] = []
        """Requests that end when the node dies."""

    def begin(self, trouble: str) -> None:
        self.trouble = trouble
        if trouble == "dead":
            self._life += 1
            self._running.clear()
            waiting, self._waiting = self._waiting, []
            for lose in waiting:
                lose()

    def end(self) -> None:
        self.trouble = ""

    def checked(self, nodes: Nodes, now: float) -> None:
        """Answer `/health` and `/capacity`. A node that is full unseen is filled by others right after each answer."""
        if self.trouble in ("dead", "frozen", "draining"):
            nodes.unwell(self.name, f"is {self.trouble}", now)
        else:
            running = self._slots if self.trouble == "full" else len(self._running)
            nodes.seen(self.name, Capacity(running, self._slots), now)

    def status(self, job_id: str) -> NodeJobStatus | None:
        if self.trouble == "confused":
            return self._world.streams.faults.choice((None, NodeJobStatus("interrupted"), NodeJobStatus("running")))
        if _Run(job_id, self._life) in self._running:
            return NodeJobStatus("running")
        return NodeJobStatus("done") if job_id in self._done else None

    def post(self, job_id: str, answer: Callable[[Refusal | JobEnded | None], None]) -> None:
        """Answer `POST /run`, now or when the program has ended; None: the connection is lost."""
        run = _Run(job_id, self._life)
        match self.trouble:
            case "dead":
                return answer(None)
            case "frozen":
                return self._waiting.append(lambda: answer(None))
            case "draining":
                return answer(Refusal(503, "DRAINING"))
            case "full" | "full_unseen":
                return answer(_FULL)
            case "confused":
                return answer(self._world.streams.faults.choice((Refusal(423, "RUNNING"), _FULL)))
        if job_id in self._done:
            return answer(_SUCCEEDED)
        if run in self._running or len(self._running) >= self._slots:
            return answer(Refusal(423, "RUNNING") if run in self._running else _FULL)
        self._running.add(run)
        self._waiting.append(lambda: answer(None))
        self._world.after(10.0 * self._world.streams.attempts.random() ** 2, f"{job_id} ends", self._ended, run, answer)

    def _ended(self, run: _Run, answer: Callable[[Refusal | JobEnded | None], None]) -> None:
        if run not in self._running:
            return
        self._running.discard(run)
        ending = self._world.streams.attempts.random()
        if ending < 0.7:
            self._done.add(run.job_id)
            answer(_SUCCEEDED)
        else:
            answer(Refusal(504, "TIMED_OUT") if ending < 0.85 else Refusal(500, "INTERNAL"))

    def fetched(self, job_id: str) -> Refusal | JobEnded:
        return _SUCCEEDED if job_id in self._done else Refusal(404, "NOT_FOUND")


class SimAgentsClient:
    """One client with several plans over the same nodes. Drives them as `client/agents/run.py` does."""

    def __init__(self, world: World, agents: dict[str, SimAgent]) -> None:
        self._world = world
        self._agents = agents
        self.nodes = Nodes(list(agents), world.streams.jitter.random)
        self.plans: dict[str, FailoverPlan] = {}
        self._applied: Counter[str] = Counter()
        """Number of events that each plan has heard."""
        self._dropped: set[tuple[str, int]] = set()
        self._recent: dict[tuple[str, str], deque[float]] = {}
        self.busiest = 0
        """The largest number of requests for one job to one node within a second."""

    def start(self, job: FailoverJob) -> None:
        self.plans[job.job_id] = FailoverPlan(job, self.nodes)
        self._apply(job.job_id, events.Begin())

    def _apply(self, job_id: str, event: events.Event) -> None:
        plan, at = self.plans[job_id], self._world.at
        for command in plan.apply(event, at):
            self._execute(job_id, command)
        if not plan.over:
            self._applied[job_id] += 1
            due_at = max(at + TICK_S, plan.due_at(at))
            self._world.at_time(due_at, f"{job_id} is due", self._due, job_id, self._applied[job_id])

    def _due(self, job_id: str, applied: int) -> None:
        if self._applied[job_id] == applied:  # else another event came, and a later moment was planned
            self._apply(job_id, events.TimePassed())

    def _execute(self, job_id: str, command: events.Command) -> None:
        match command:
            case events.CheckNode(node=node):
                self._send("", node, self._check, self._agents[node])
            case events.Ask(ticket=ticket, node=node):
                self._send(job_id, node, self._ask, job_id, ticket, self._agents[node])
            case events.Post(ticket=ticket, node=node):
                self._send(job_id, node, self._post, job_id, ticket, self._agents[node])
            case events.Fetch(ticket=ticket, node=node):
                self._send(job_id, node, self._fetch, job_id, ticket, self._agents[node])
            case events.Drop(ticket=ticket):
                self._dropped.add((job_id, ticket))

    def _send(self, job_id: str, node: str, request: Callable[..., None], *arguments: object) -> None:
        about = job_id or "health and capacity"
        self.busiest = max(self.busiest, self._count((job_id, node), f"for {about} to {node}", REQUESTS_PER_S_MAX))
        self._count(("", ""), "of one client", CLIENT_REQUESTS_PER_S_MAX)
        delay_s = LATENCY_S * (0.5 + self._world.streams.network.random())
        self._world.after(delay_s, f"{job_id} {request.__name__} {node}", request, *arguments)

    def _count(self, key: tuple[str, str], words: str, limit: int) -> int:
        """Count a request, and return how many there were within the last second; ViolationFound above the limit."""
        recent = self._recent.setdefault(key, deque())
        recent.append(self._world.at)
        while recent[0] <= self._world.at - 1.0:
            recent.popleft()
        if len(recent) > limit:
            raise ViolationFound(Violation("liveness", f"{len(recent)} requests {words} within a second", self._world.at))
        return len(recent)

    def _check(self, agent: SimAgent) -> None:
        delay_s = ANSWER_S if agent.trouble == "frozen" else LATENCY_S
        self._world.after(delay_s, f"{agent.name} was checked", self._checked, agent)

    def _checked(self, agent: SimAgent) -> None:
        agent.checked(self.nodes, self._world.at)
        for job_id in list(self.plans):
            self._apply(job_id, events.TimePassed())

    def _ask(self, job_id: str, ticket: int, agent: SimAgent) -> None:
        if agent.trouble in ("dead", "frozen"):
            missing = events.JobStatusMissing(ticket, f"is {agent.trouble}", gone=agent.trouble == "dead")
            self._world.after(ANSWER_S if agent.trouble == "frozen" else LATENCY_S, "no answer", self._hear, job_id, missing)
        else:
            self._hear(job_id, events.JobStatusReceived(ticket, agent.status(job_id)))

    def _post(self, job_id: str, ticket: int, agent: SimAgent) -> None:
        answered = False

        def answer(given: Refusal | JobEnded | None) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._world.after(LATENCY_S, f"{job_id} is answered", self._answered, job_id, ticket, given)

        self._world.after(LATENCY_S, f"{job_id} is uploaded", self._hear, job_id, events.Uploaded(ticket))
        agent.post(job_id, answer)

    def _fetch(self, job_id: str, ticket: int, agent: SimAgent) -> None:
        lost = agent.trouble in ("dead", "frozen", "draining")
        given = None if lost else agent.fetched(job_id)
        self._world.after(LATENCY_S, f"{job_id} is fetched", self._answered, job_id, ticket, given)

    def _answered(self, job_id: str, ticket: int, given: Refusal | JobEnded | None) -> None:
        if given is None:
            self._hear(job_id, events.RequestLost(ticket, "the connection was lost"))
        elif isinstance(given, Refusal):
            self._hear(job_id, events.Refused(ticket, given))
        else:
            self._hear(job_id, events.Saved(ticket, given))

    def _hear(self, job_id: str, event: events.JobReport | events.RequestEvent) -> None:
        if (job_id, event.ticket) not in self._dropped:
            self._apply(job_id, event)


def check_agents(seed: int, options: SimOptions | None = None) -> SeedOutcome:
    """Run a seed: jobs over nodes in trouble, then over nodes that are well, until each has its end."""
    outcome = SeedOutcome(seed=seed, options=options or SimOptions())
    world = World(seed, outcome.options, lambda line: None)
    faults, load = world.streams.faults, world.streams.load
    agents = {name: SimAgent(world, name, load.randint(1, 2)) for name in (f"http://n{number}:7090" for number in range(NODES))}
    client = SimAgentsClient(world, agents)
    if faults.random() < 0.5:  # as a command begins that finds the breakers of the command before it
        client.nodes.recall(dict.fromkeys(agents, BreakerNote(1, 0, 30.0, "no connection")), 0.0)
    for _ in range(TROUBLES):
        agent, at = faults.choice(list(agents.values())), CHAOS_S * faults.random()
        world.at_time(at, f"{agent.name} is in trouble", agent.begin, kind := faults.choice(TROUBLE_KINDS))
        world.at_time(at + 20.0 * faults.random(), f"{agent.name} is well", agent.end)
        outcome.faults[kind] += 1
    for number in range(JOBS):
        hedge_s = 5.0 if load.random() < 0.3 else None
        job = FailoverJob(f"job-{number}", known=load.random() < 0.5, limit_s=LIMIT_S, hedge_s=hedge_s)
        world.at_time(CHAOS_S * load.random() * 0.7, f"{job.job_id} starts", client.start, job)
    try:
        world.run_until(CHAOS_S + LIMIT_S)
    except ViolationFound as error:
        outcome.violations = [error.violation]
    except HotLoop as error:
        outcome.problem = str(error)
    outcome.effects = Counter(busiest=client.busiest)
    outcome.virtual_s, outcome.events, outcome.trace_hash = world.at, world.events, world.trace_hash
    if outcome.good:
        outcome.unfinished = ", ".join(job_id for job_id, plan in client.plans.items() if not plan.over)
    return outcome
