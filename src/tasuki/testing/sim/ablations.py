"""Ablations: safeguards that are taken away for the time of a run, so that the simulator must notice.

    found = hunt(ABLATIONS["epoch_fence"], seeds_max=300)      # AblationFinding(seed=3, tries=4, violation=I8: …)
    python -m tasuki.testing.sim.ablations                     # a table of all

A simulator that finds nothing shows nothing, unless it is known what it would have found. Production code has no switch for any
of this: for the time of a `with` block a function, a constant or a statement is replaced from outside, and then put back. An
ablation that no longer finds what it replaces is an error.

`UNSEEN` are ablations without a violation: something else holds the promise, and the safeguard saves time or losses. Not among
these are the condition of `reap` that is repeated in its write, and the lock on rows that are read to be judged: they matter
only where several writers commit at the same time, which neither of the stores here has.

This module has the table, and the safeguards of broker, worker, clients, election and keeper; `ablations_store.py` has those of
the stores, and the classes that replace something.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from tasuki.core import client_machine, store_messages
from tasuki.core.broker import client_messages, cluster, subscriptions, upkeep, worker_messages
from tasuki.core.broker.routes import RoutedJobs
from tasuki.core.broker.state import Account
from tasuki.core.broker.turn_builder import TurnBuilder, TurnEffects
from tasuki.core.client_machine import ClientMachine
from tasuki.core.election import LEADER_SCOPE, Election, Following, Resigned
from tasuki.core.failover.nodes import NodeState
from tasuki.core.failover.plan import FailoverPlan
from tasuki.core.job import OnDisconnect, State
from tasuki.core.machine import Now, Send
from tasuki.core.protocol import Accepted, HeartbeatAnswer, JobResult, JobsRecorded, SubmitJobs, Welcome
from tasuki.core.reconnect import Redial
from tasuki.core.store_messages import LeaseStatus, ReportAnswer, ReportStatus
from tasuki.core.worker.events import LeasesDenied, WorkerIdentity
from tasuki.core.worker.machine import SeenLeases, Slots, WorkerMachine
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.sim.ablations_schedule import SCHEDULES
from tasuki.testing.sim.ablations_store import ORDERS, STORE, Ablation, Method, Replacement, around
from tasuki.testing.sim.agents import check_agents
from tasuki.testing.sim.checker import Violation
from tasuki.testing.sim.run import SeedOutcome
from tasuki.testing.sim.servers import SimulatedCluster
from tasuki.testing.sim.workers import SimWorker
from tasuki.testing.sim.world import SimOptions

NEVER_S = 1e9
LONG = SimOptions(lease_ttl_s=2.0, jobs=30, attempts_scale=5.0, faults=30, heal_limit_s=400.0)
"""Options under which attempts outlast their leases, if nobody renews them."""


# ---------------------------------------------------------------------------------------------------- the broker


@around
def _accepted_at_once(submit: Method, broker: Any, client: Any, identity: Any, message: Any, *rest: Any) -> list[Any]:
    told = Send(client.conn, Accepted(message.msg_id, len(message.specs), []))
    return [*submit(broker, client, identity, message, *rest), told]


@around
def _recorded_at_once(received: Method, broker: Any, worker: Any, message: Any, *rest: Any) -> list[Any]:
    endings = getattr(message, "endings", ())
    commands: list[Any] = received(broker, worker, message, *rest)
    return [*commands, Send(worker.conn, JobsRecorded([ending.lease_id for ending in endings], []))] if endings else commands


@around
def _told_at_once(received: Method, broker: Any, worker: Any, message: Any, *rest: Any) -> list[Any]:
    effects = TurnEffects(rest[0])
    for ending in getattr(message, "endings", ()):
        if ending.outcome.error_code is None:
            result = JobResult(ending.job_id, State.SUCCEEDED, ending.attempt, ending.outcome, 0.0)
            broker.notify(result, effects)
    return [*received(broker, worker, message, *rest), *effects.all_commands()]


@around
def _fenced_counts(reported: Method, broker: Any, conn: int, reports: Any, answers: Any, *rest: Any) -> None:
    taken = ReportAnswer(ReportStatus.RECORDED, State.SUCCEEDED)
    told = [
        taken if answer.answer is ReportStatus.FENCED and report.outcome.error_code is None else answer
        for report, answer in zip(reports, answers, strict=True)
    ]
    reported(broker, conn, reports, told, *rest)


@around
def _spent_twice(reserve: Method, self: Any, limit: int) -> int:
    taken: int = reserve(self, limit)
    self.available += taken
    return taken


def _for_good(choose: Method) -> Method:
    return lambda self, job, worker_id, now: choose(self, job, worker_id, Now(1e9, now.wall))


def _never(_: float) -> float:
    return NEVER_S


def _nothing(_: Method) -> Method:
    return lambda *_, **__: None


_OF_THE_BROKER = (
    Ablation(
        "accepted_after_commit",
        "a submit is acknowledged after its commit",
        ("I1", "I2"),
        (Replacement(client_messages, "submit", _accepted_at_once),),
        SimOptions(latency_s=0.0005, kinds=("store_slow", "store_refused", "crash")),
    ),
    Ablation(
        "recorded_after_commit",
        "a worker is told that its report is recorded after the commit",
        ("I14",),
        (Replacement(worker_messages, "received", _recorded_at_once),),
    ),
    Ablation(
        "result_after_commit",
        "a client is told a result after the commit of its finish",
        ("I13",),
        (Replacement(worker_messages, "received", _told_at_once),),
    ),
    Ablation(
        "fenced_is_not_told",
        "no client is told the result of a report that was fenced",
        ("I13", "I14"),
        (Replacement(worker_messages, "_reported", _fenced_counts),),
    ),
    Ablation(
        "credit_at_the_broker",
        "credit that was reserved is not spent again",
        ("credit",),
        (Replacement(Account, "reserve", _spent_twice),),
    ),
    Ablation(
        "carried_over",
        "what workers said in a turn that failed stands in the next one",
        ("I1", "liveness"),
        (Replacement(TurnBuilder, "repeat", _nothing),),
        SimOptions(kinds=("store_lost", "store_refused", "disk_full")),
    ),
    Ablation(
        "look_again",
        "a worker with credit looks for work now and then, whatever hint was lost",
        ("I1", "liveness"),
        (Replacement(subscriptions, "WALK_INTERVAL_S", _never),),
        # Few jobs: whoever ends one looks for the next, and so finds what a hint did not tell of.
        SimOptions(servers=3, workers=3, jobs=8, kinds=("hints_lost",), faults=24),
    ),
    Ablation(
        "choices_end",
        "a job that another server was to have, by a routing policy, is taken here if it is still there after a while",
        ("I1", "liveness"),
        (Replacement(RoutedJobs, "_choose", _for_good),),
        SimOptions(servers=3, kinds=("hints_lost", "pause"), policy="round-robin"),
    ),
    Ablation(
        "only_worker",
        "a job whose subject names its only worker is granted to no other one",
        ("credit",),
        (Replacement(store_messages, "only_worker", _nothing),),
    ),
    Ablation(
        "poll_ends",
        "servers ask the store now and then whether watched jobs have ended, whatever hint was lost",
        ("liveness",),
        (Replacement(cluster, "POLL_INTERVAL_S", _never),),
        SimOptions(servers=3, kinds=("hints_lost",), faults=24),
    ),
    Ablation(
        "lapse",
        "a leader whose store was away ends no lease before a takeover has renewed those that nobody could renew",
        ("lease",),
        (Replacement(upkeep, "LAPSE_SHARE", _never),),
        replace(LONG, servers=2, kinds=("store_cut", "store_restart")),
    ),
)


# ---------------------------------------------------------------------------------------------------- nodes


def _extends_nothing(renew: Method) -> Method:
    def _renew(self: Any, claim: Any) -> Any:
        if claim.confirm_s is None:
            return renew(self, claim)
        return LeaseStatus.LOST if self._claimed(claim) is None else LeaseStatus.GO_ON

    return _renew


def _whoever_leads(_depose: Method) -> Method:
    def depose(self: Any, leader: Any) -> None:
        lock = self.node.coordination._locks.get(LEADER_SCOPE)
        if lock is not None:
            self._call("deposes", lambda: self.node.coordination.release(LEADER_SCOPE, lock.holder, lock.epoch), lambda _: None)

    return depose


@around
def _deaf_to_denials(apply: Method, machine: Any, event: Any, *rest: Any) -> Any:
    return [] if isinstance(event, LeasesDenied) else apply(machine, event, *rest)


CUT_OFF = replace(LONG, servers=3, kinds=("store_cut", "partition", "pause", "coordination_cut"))
"""Options under which workers are cut off from the store while they run, and leaders from it or from each other."""

DETACHED = replace(
    LONG, servers=3, kinds=("partition", "pause", "store_cut"), lease_ttl_s=6.0, lock_ttl_s=1.0, attempts_scale=10.0
)
"""Options under which workers are detached while their leases still last."""

_OF_NODES = (
    Ablation(
        name="confirmed_is_renewed",
        what="who says that a worker may go on has renewed its lease",
        invariants=("I9", "I21", "lease", "I6"),
        patches=(Replacement(MemoryStore, "_renew", _extends_nothing),),
        options=CUT_OFF,
    ),
    Ablation(
        "denied_stops",
        "an attempt of a detached worker is stopped when nobody has said that it continues",
        ("I21",),
        (Replacement(WorkerMachine, "apply", _deaf_to_denials),),
        DETACHED,
    ),
)


# ---------------------------------------------------------------------------------------------------- workers


@around
def _all_are_new(assigned: Method, self: Any, message: Any, now: Any) -> list[Any]:
    self._seen = SeenLeases()
    for grant in message.grants:
        self.held.pop(grant.lease_id, None)
    return list(assigned(self, message, now))


@around
def _goes_on(ticked: Method, self: Any, now: Any) -> list[Any]:
    identity = self.identity
    self.identity = replace(identity, on_disconnect=OnDisconnect.KEEP)
    try:
        return list(ticked(self, now))
    finally:
        self.identity = identity


@around
def _from_the_answer(received: Method, self: Any, message: Any, now: Any) -> list[Any]:
    if isinstance(message, HeartbeatAnswer | Welcome) and message.corr_id in self._beats:
        self._beats[message.corr_id] = (now.monotonic, self._beats[message.corr_id][1])
    return list(received(self, message, now))


@around
def _leaves_them(end: Method, self: Any, what: str, **named: Any) -> None:
    self.attempts = {}
    end(self, what, **named)


@around
def _anyone(_: Method, self: Any, lease_id: str, at: float) -> bool:
    self._running[lease_id] = at
    return True


def _as_new(hello: Method) -> Method:
    return lambda self, msg_id, patterns, resumed: hello(self, msg_id, patterns, resumed=False)


@around
def _gives_up(lost: Method, self: Any, now: float) -> None:
    lost(self, now)
    self.due_at = None


_OF_WORKERS = (
    Ablation(
        "doubles_dropped",
        "a worker runs a delivery that comes twice once",
        ("I5",),
        (Replacement(WorkerMachine, "_assigned", _all_are_new),),
        SimOptions(kinds=("store_lost", "reset", "late", "half_open"), faults=40),
    ),
    Ablation(
        "credit_at_the_worker",
        "a worker runs no more attempts at once than it has places",
        ("credit",),
        (Replacement(Slots, "take", _anyone),),
    ),
    Ablation(
        "stops_at_the_deadline",
        "a worker that cannot renew stops its attempts at their deadline",
        ("I9",),
        (Replacement(WorkerMachine, "_ticked", _goes_on),),
        replace(LONG, kinds=("partition", "one_way", "half_open")),
    ),
    Ablation(
        "counts_from_before",
        "a deadline is counted from before the heartbeat was sent",
        ("I9",),
        (Replacement(WorkerMachine, "_received", _from_the_answer),),
        replace(LONG, kinds=("pause",), latency_s=0.1, faults=80, workers=5, servers=1),
    ),
    Ablation(
        "keeper_at_death",
        "the keeper ends the attempts of a worker that died",
        ("I9", "I10"),
        (Replacement(SimWorker, "_end", _leaves_them),),
    ),
    Ablation(
        "keeper_at_the_deadline",
        "the keeper ends the attempts of a worker that hangs at their deadline",
        ("I9",),
        (Replacement(SimWorker, "_watch_deadline", _nothing),),
        replace(LONG, kinds=("pause",)),
    ),
    Ablation(
        "reconnects",
        "a worker or client that lost its server dials again",
        ("I1", "liveness"),
        (Replacement(Redial, "lost", _gives_up),),
    ),
)


# ---------------------------------------------------------------------------------------------------- clients and the election


@around
def _another_id(say: Method, self: Any, waiting: Any) -> Any:
    if waiting.said:
        make = waiting.make
        waiting.make = lambda msg_id: _renamed(make(msg_id))
    return say(self, waiting)


def _renamed(message: Any) -> Any:
    if not isinstance(message, SubmitJobs):
        return message
    return msgspec.structs.replace(message, specs=[replace(spec, job_id=f"{spec.job_id}-again") for spec in message.specs])


@around
def _asks_no_more(_: Method, self: Any, now: float, wait_s: float = 0.0) -> None:
    self.state = Resigned() if self._resigning else Following(now + NEVER_S)


_OF_CLIENTS = (
    Ablation(
        "same_id_again",
        "a client that does not know what became of a submit says it again with the same id",
        ("I1", "I2", "I16"),
        (Replacement(ClientMachine, "_say", _another_id),),
    ),
    Ablation(
        "said_once",
        "what is not the same when it is done twice is not said again",
        ("I16",),
        (Replacement(client_machine, "safe_to_repeat", lambda _: lambda _: True),),
        SimOptions(kinds=("late",), faults=40, latency_s=0.05),
    ),
    Ablation(
        "asks_for_the_lock",
        "a server that does not lead asks for the lock again",
        ("I1", "liveness"),
        (Replacement(Election, "_follow", _asks_no_more),),
        SimOptions(servers=3, kinds=("coordination_lost", "coordination_cut", "pause")),
    ),
)

# ---------------------------------------------------------------------------------------------------- clients of node agents


def _at_once(ready: Method) -> Method:
    return lambda self, line, now: line.standing is NodeState.FREE or line.steady


_OF_AGENTS = (
    Ablation(
        "full_nodes_are_waited_for",
        "a node that is full or paused is sent nothing, whatever its breaker says",
        ("liveness",),
        (Replacement(FailoverPlan, "_ready", _at_once),),
        check=check_agents,
    ),
    Ablation(
        "pauses_of_nodes",
        "a node that contradicts itself is paused before it is sent the job again",
        ("liveness",),
        (Replacement(FailoverPlan, "_pause", _nothing),),
        check=check_agents,
    ),
)


# ---------------------------------------------------------------------------------------------------- what cannot be seen


def _until_fenced(until: Method) -> Method:
    return lambda self, asked_at: NEVER_S


@around
def _told_of_all(redelivered: Method, broker: Any, conn: int, *rest: Any) -> None:
    session = broker.sessions.get(conn)
    if session is not None:
        session.settled.clear()
    redelivered(broker, conn, *rest)


UNSEEN = (
    Ablation(
        "redelivery",
        "an assignment of which no sign came back is delivered again, and what a failed turn granted is read back",
        (),
        (Replacement(worker_messages, "redeliver", _nothing), Replacement(worker_messages, "read_back", _nothing)),
        why="its lease runs out, and the job is granted again: it costs a loss, and the time that takes",
    ),
    Ablation(
        "says_what_it_holds",
        "a worker that was connected before is given nothing until it has said what it holds",
        (),
        (Replacement(WorkerIdentity, "hello", _as_new),),
        why="it gives credit only behind that heartbeat, and the store takes renewals before it grants",
    ),
    Ablation(
        "steps_down_in_time",
        "a leader that could not renew its lock stops by itself",
        (),
        (Replacement(Election, "_until", _until_fenced),),
        SimOptions(servers=3),
        why="the epoch fence refuses its next duty; no duty relies on there being no other leader",
    ),
    Ablation(
        "deposed_by_epoch",
        "a sub-leader releases the lock of the leader that it has judged, not that of a later one",
        (),
        (Replacement(SimulatedCluster, "depose", _whoever_leads),),
        CUT_OFF,
        why="whoever leads next takes another epoch; it costs an election",
    ),
    Ablation(
        "settled_meanwhile",
        "what a worker reported while the store was asked what it holds is not delivered again",
        (),
        (Replacement(worker_messages, "_redelivered", _told_of_all),),
        why="the worker remembers its attempts, and drops the double",
    ),
    Ablation(
        "silent_workers",
        "a worker that missed a heartbeat is given nothing",
        (),
        (Replacement(worker_messages, "_is_silent", lambda _: lambda *_: False),),
        why="what it is given is lost with it, and granted again: it costs a loss",
    ),
    Ablation(
        "saved_endings",
        "an ending that waits is saved, and offered after a restart",
        (),
        (Replacement(WorkerMachine, "_save_what_waits", lambda _: lambda *_: []),),
        why="the job is run again: it costs a loss, and the work that was done",
    ),
)

MACHINES = (*_OF_THE_BROKER, *_OF_NODES, *_OF_WORKERS, *_OF_CLIENTS, *_OF_AGENTS)


__all__ = ["ABLATIONS", "UNSEEN", "Ablation", "AblationFinding", "hunt", "table"]

ABLATIONS: dict[str, Ablation] = {ablation.name: ablation for ablation in (*STORE, *ORDERS, *SCHEDULES, *MACHINES)}

SEEDS_MAX = 300


class AblationFinding(msgspec.Struct, frozen=True):
    """The first seed in which the checker found something, and the number of seeds tried."""

    seed: int
    tries: int
    violation: Violation


def hunt(ablation: Ablation, seeds_max: int = SEEDS_MAX, *, store: str = "memory", first_seed: int = 0) -> AblationFinding | None:
    """Run seed after seed without the safeguard until the checker finds something; return None if it did not."""
    options = replace(ablation.options, store=store)
    with ablation.switch_off():
        for tries, seed in enumerate(range(first_seed, first_seed + seeds_max), 1):
            violation = _broken(ablation.check(seed, options))
            if violation is not None:
                return AblationFinding(seed, tries, violation)
    return None


def _broken(outcome: SeedOutcome) -> Violation | None:
    if outcome.violations:
        return outcome.violations[0]
    return Violation("liveness", outcome.problem, outcome.virtual_s) if outcome.problem else None


def table(found: Mapping[str, Mapping[str, AblationFinding | None]]) -> str:
    """Return the table for people: by ablation and store, the seeds until it was found and what was broken; then those unseen."""
    lines = ["| Without | the promise that | Seeds (memory) | Seeds (SQLite) | Broken |", "|---|---|---|---|---|"]
    for name, hits in found.items():
        seeds = [_seeds(hits[store]) if store in hits else "" for store in ("memory", "sqlite")]
        broken = dict.fromkeys(hit.violation.invariant for hit in hits.values() if hit is not None)
        lines.append(f"| `{name}` | {ABLATIONS[name].what} | {' | '.join(seeds)} | {', '.join(broken)} |")
    lines += ["", "| Without | | Nothing is broken, since |", "|---|---|---|"]
    lines += [f"| `{ablation.name}` | {ablation.what} | {ablation.why} |" for ablation in UNSEEN]
    return "\n".join(lines)


def _seeds(found: AblationFinding | None) -> str:
    return str(found.tries) if found is not None else "not found"


def main() -> None:
    """Print the table for docs/simulator.md."""
    found = {
        name: {store: hunt(ablation, store=store, first_seed=1) for store in ablation.stores}
        for name, ablation in ABLATIONS.items()
    }
    sys.stdout.write(table(found) + "\n")


if __name__ == "__main__":
    main()
