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
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from tasuki.core import client_machine
from tasuki.core.broker import client_messages, cluster, subscriptions, upkeep, worker_messages
from tasuki.core.broker.state import Account
from tasuki.core.broker.turn_builder import TurnBuilder, TurnEffects
from tasuki.core.client_machine import ClientMachine
from tasuki.core.election import Election, Following, Resigned
from tasuki.core.failover.nodes import NodeState
from tasuki.core.failover.plan import FailoverPlan
from tasuki.core.job import OnDisconnect, State
from tasuki.core.machine import Send
from tasuki.core.protocol import Accepted, HeartbeatAnswer, JobResult, JobsRecorded, SubmitJobs, Welcome
from tasuki.core.reconnect import Redial
from tasuki.core.store_messages import ReportAnswer, ReportStatus
from tasuki.core.worker.events import WorkerIdentity
from tasuki.core.worker.machine import SeenLeases, Slots, WorkerMachine
from tasuki.testing.sim.ablations_store import ORDERS, STORE, Ablation, Replacement
from tasuki.testing.sim.agents import check_agents
from tasuki.testing.sim.checker import Violation
from tasuki.testing.sim.run import SeedOutcome
from tasuki.testing.sim.workers import SimWorker
from tasuki.testing.sim.world import SimOptions

NEVER_S = 1e9
LONG = SimOptions(lease_ttl_s=2.0, jobs=30, attempts_scale=5.0, faults=30, heal_limit_s=400.0)
"""Options under which attempts outlast their leases, if nobody renews them."""

Method = Callable[..., Any]


# ---------------------------------------------------------------------------------------------------- the broker


def _accepted_at_once(submit: Method) -> Method:
    def _submit(broker: Any, client: Any, identity: Any, message: Any, *rest: Any) -> list[Any]:
        told = Send(client.conn, Accepted(message.msg_id, len(message.specs), []))
        return [*submit(broker, client, identity, message, *rest), told]

    return _submit


def _recorded_at_once(received: Method) -> Method:
    def _received(broker: Any, worker: Any, message: Any, *rest: Any) -> list[Any]:
        endings = getattr(message, "endings", ())
        commands: list[Any] = received(broker, worker, message, *rest)
        return [*commands, Send(worker.conn, JobsRecorded([ending.lease_id for ending in endings], []))] if endings else commands

    return _received


def _told_at_once(received: Method) -> Method:
    def _received(broker: Any, worker: Any, message: Any, *rest: Any) -> list[Any]:
        effects = TurnEffects(rest[0])
        for ending in getattr(message, "endings", ()):
            if ending.outcome.error_code is None:
                result = JobResult(ending.job_id, State.SUCCEEDED, ending.attempt, ending.outcome, 0.0)
                broker.notify(result, effects)
        return [*received(broker, worker, message, *rest), *effects.all_commands()]

    return _received


def _fenced_counts(reported: Method) -> Method:
    def _reported(broker: Any, conn: int, reports: Any, answers: Any, *rest: Any) -> None:
        taken = ReportAnswer(ReportStatus.RECORDED, State.SUCCEEDED)
        told = [
            taken if answer.answer is ReportStatus.FENCED and report.outcome.error_code is None else answer
            for report, answer in zip(reports, answers, strict=True)
        ]
        reported(broker, conn, reports, told, *rest)

    return _reported


def _spent_twice(reserve: Method) -> Method:
    def _reserve(self: Any, limit: int) -> int:
        taken: int = reserve(self, limit)
        self.available += taken
        return taken

    return _reserve


def _never(_: float) -> float:
    return NEVER_S


def _nothing(_: Method) -> Method:
    return lambda *_, **__: None


_OF_THE_BROKER = (
    Ablation(
        name="accepted_after_commit",
        what="a submit is acknowledged after its commit",
        invariants=("I1", "I2"),
        patches=(Replacement(client_messages, "submit", _accepted_at_once),),
        options=SimOptions(latency_s=0.0005, kinds=("store_slow", "store_refused", "crash")),
    ),
    Ablation(
        name="recorded_after_commit",
        what="a worker is told that its report is recorded after the commit",
        invariants=("I14",),
        patches=(Replacement(worker_messages, "received", _recorded_at_once),),
    ),
    Ablation(
        name="result_after_commit",
        what="a client is told a result after the commit of its finish",
        invariants=("I13",),
        patches=(Replacement(worker_messages, "received", _told_at_once),),
    ),
    Ablation(
        name="fenced_is_not_told",
        what="no client is told the result of a report that was fenced",
        invariants=("I13", "I14"),
        patches=(Replacement(worker_messages, "_reported", _fenced_counts),),
    ),
    Ablation(
        name="credit_at_the_broker",
        what="credit that was reserved is not spent again",
        invariants=("credit",),
        patches=(Replacement(Account, "reserve", _spent_twice),),
    ),
    Ablation(
        name="carried_over",
        what="what workers said in a turn that failed stands in the next one",
        invariants=("I1", "liveness"),
        patches=(Replacement(TurnBuilder, "repeat", _nothing),),
        options=SimOptions(kinds=("store_lost", "store_refused", "disk_full")),
    ),
    Ablation(
        name="look_again",
        what="a worker with credit looks for work now and then, whatever hint was lost",
        invariants=("I1", "liveness"),
        patches=(Replacement(subscriptions, "WALK_INTERVAL_S", _never),),
        # Few jobs: whoever ends one looks for the next, and so finds what a hint did not tell of.
        options=SimOptions(servers=3, workers=3, jobs=8, kinds=("hints_lost",), faults=24),
    ),
    Ablation(
        name="poll_ends",
        what="servers ask the store now and then whether watched jobs have ended, whatever hint was lost",
        invariants=("liveness",),
        patches=(Replacement(cluster, "POLL_INTERVAL_S", _never),),
        options=SimOptions(servers=3, kinds=("hints_lost",), faults=24),
    ),
    Ablation(
        name="lapse",
        what="a leader whose store was away ends no lease before a takeover has renewed those that nobody could renew",
        invariants=("lease",),
        patches=(Replacement(upkeep, "LAPSE_SHARE", _never),),
        options=replace(LONG, servers=2, kinds=("store_cut", "store_restart")),
    ),
)


# ---------------------------------------------------------------------------------------------------- workers


def _all_are_new(assigned: Method) -> Method:
    def _assigned(self: Any, message: Any, now: Any) -> list[Any]:
        self._seen = SeenLeases()
        for grant in message.grants:
            self.held.pop(grant.lease_id, None)
        return list(assigned(self, message, now))

    return _assigned


def _goes_on(ticked: Method) -> Method:
    def _ticked(self: Any, now: Any) -> list[Any]:
        identity = self.identity
        self.identity = replace(identity, on_disconnect=OnDisconnect.KEEP)
        try:
            return list(ticked(self, now))
        finally:
            self.identity = identity

    return _ticked


def _from_the_answer(received: Method) -> Method:
    def _received(self: Any, message: Any, now: Any) -> list[Any]:
        if isinstance(message, HeartbeatAnswer | Welcome) and message.corr_id in self._beats:
            self._beats[message.corr_id] = (now.monotonic, self._beats[message.corr_id][1])
        return list(received(self, message, now))

    return _received


def _leaves_them(end: Method) -> Method:
    def _end(self: Any, what: str, **named: Any) -> None:
        self.attempts = {}
        end(self, what, **named)

    return _end


def _anyone(take: Method) -> Method:
    def _take(self: Any, lease_id: str, at: float) -> bool:
        self._running[lease_id] = at
        return True

    return _take


def _as_new(hello: Method) -> Method:
    return lambda self, msg_id, patterns, resumed: hello(self, msg_id, patterns, resumed=False)


def _gives_up(lost: Method) -> Method:
    def _lost(self: Any, now: float) -> None:
        lost(self, now)
        self.due_at = None

    return _lost


_OF_WORKERS = (
    Ablation(
        name="doubles_dropped",
        what="a worker runs a delivery that comes twice once",
        invariants=("I5",),
        patches=(Replacement(WorkerMachine, "_assigned", _all_are_new),),
        options=SimOptions(kinds=("store_lost", "reset", "late", "half_open"), faults=40),
    ),
    Ablation(
        name="credit_at_the_worker",
        what="a worker runs no more attempts at once than it has places",
        invariants=("credit",),
        patches=(Replacement(Slots, "take", _anyone),),
    ),
    Ablation(
        name="stops_at_the_deadline",
        what="a worker that cannot renew stops its attempts at their deadline",
        invariants=("I9",),
        patches=(Replacement(WorkerMachine, "_ticked", _goes_on),),
        options=replace(LONG, kinds=("partition", "one_way", "half_open")),
    ),
    Ablation(
        name="counts_from_before",
        what="a deadline is counted from before the heartbeat was sent",
        invariants=("I9",),
        patches=(Replacement(WorkerMachine, "_received", _from_the_answer),),
        options=replace(LONG, kinds=("pause",), latency_s=0.1, faults=80, workers=5, servers=1),
    ),
    Ablation(
        name="keeper_at_death",
        what="the keeper ends the attempts of a worker that died",
        invariants=("I9", "I10"),
        patches=(Replacement(SimWorker, "_end", _leaves_them),),
    ),
    Ablation(
        name="keeper_at_the_deadline",
        what="the keeper ends the attempts of a worker that hangs at their deadline",
        invariants=("I9",),
        patches=(Replacement(SimWorker, "_watch_deadline", _nothing),),
        options=replace(LONG, kinds=("pause",)),
    ),
    Ablation(
        name="reconnects",
        what="a worker or client that lost its server dials again",
        invariants=("I1", "liveness"),
        patches=(Replacement(Redial, "lost", _gives_up),),
    ),
)


# ---------------------------------------------------------------------------------------------------- clients and the election


def _another_id(say: Method) -> Method:
    def _say(self: Any, waiting: Any) -> Any:
        if waiting.said:
            make = waiting.make
            waiting.make = lambda msg_id: _renamed(make(msg_id))
        return say(self, waiting)

    return _say


def _renamed(message: Any) -> Any:
    if not isinstance(message, SubmitJobs):
        return message
    return msgspec.structs.replace(message, specs=[replace(spec, job_id=f"{spec.job_id}-again") for spec in message.specs])


def _asks_no_more(follow: Method) -> Method:
    def _follow(self: Any, now: float, wait_s: float = 0.0) -> None:
        self.state = Resigned() if self._resigning else Following(now + NEVER_S)

    return _follow


_OF_CLIENTS = (
    Ablation(
        name="same_id_again",
        what="a client that does not know what became of a submit says it again with the same id",
        invariants=("I1", "I2", "I16"),
        patches=(Replacement(ClientMachine, "_say", _another_id),),
    ),
    Ablation(
        name="said_once",
        what="what is not the same when it is done twice is not said again",
        invariants=("I16",),
        patches=(Replacement(client_machine, "safe_to_repeat", lambda _: lambda _: True),),
        options=SimOptions(kinds=("late",), faults=40, latency_s=0.05),
    ),
    Ablation(
        name="asks_for_the_lock",
        what="a server that does not lead asks for the lock again",
        invariants=("I1", "liveness"),
        patches=(Replacement(Election, "_follow", _asks_no_more),),
        options=SimOptions(servers=3, kinds=("coordination_lost", "coordination_cut", "pause")),
    ),
)

# ---------------------------------------------------------------------------------------------------- clients of node agents


def _at_once(ready: Method) -> Method:
    return lambda self, line, now: line.standing is NodeState.FREE or line.steady


_OF_AGENTS = (
    Ablation(
        name="full_nodes_are_waited_for",
        what="a node that is full or paused is sent nothing, whatever its breaker says",
        invariants=("liveness",),
        patches=(Replacement(FailoverPlan, "_ready", _at_once),),
        check=check_agents,
    ),
    Ablation(
        name="pauses_of_nodes",
        what="a node that contradicts itself is paused before it is sent the job again",
        invariants=("liveness",),
        patches=(Replacement(FailoverPlan, "_pause", _nothing),),
        check=check_agents,
    ),
)


# ---------------------------------------------------------------------------------------------------- what cannot be seen


def _until_fenced(until: Method) -> Method:
    return lambda self, asked_at: NEVER_S


def _told_of_all(redelivered: Method) -> Method:
    def _redelivered(broker: Any, conn: int, *rest: Any) -> None:
        session = broker.sessions.get(conn)
        if session is not None:
            session.settled.clear()
        redelivered(broker, conn, *rest)

    return _redelivered


UNSEEN = (
    Ablation(
        name="redelivery",
        what="an assignment of which no sign came back is delivered again, and what a failed turn granted is read back",
        why="its lease runs out, and the job is granted again: it costs a loss, and the time that takes",
        patches=(Replacement(worker_messages, "redeliver", _nothing), Replacement(worker_messages, "read_back", _nothing)),
    ),
    Ablation(
        name="says_what_it_holds",
        what="a worker that was connected before is given nothing until it has said what it holds",
        why="it gives credit only behind that heartbeat, and the store takes renewals before it grants",
        patches=(Replacement(WorkerIdentity, "hello", _as_new),),
    ),
    Ablation(
        name="steps_down_in_time",
        what="a leader that could not renew its lock stops by itself",
        why="the epoch fence refuses its next duty; no duty relies on there being no other leader",
        patches=(Replacement(Election, "_until", _until_fenced),),
        options=SimOptions(servers=3),
    ),
    Ablation(
        name="settled_meanwhile",
        what="what a worker reported while the store was asked what it holds is not delivered again",
        why="the worker remembers its attempts, and drops the double",
        patches=(Replacement(worker_messages, "_redelivered", _told_of_all),),
    ),
    Ablation(
        name="silent_workers",
        what="a worker that missed a heartbeat is given nothing",
        why="what it is given is lost with it, and granted again: it costs a loss",
        patches=(Replacement(worker_messages, "_is_silent", lambda _: lambda *_: False),),
    ),
    Ablation(
        name="saved_endings",
        what="an ending that waits is saved, and offered after a restart",
        why="the job is run again: it costs a loss, and the work that was done",
        patches=(Replacement(WorkerMachine, "_save_what_waits", lambda _: lambda *_: []),),
    ),
)

MACHINES = (*_OF_THE_BROKER, *_OF_WORKERS, *_OF_CLIENTS, *_OF_AGENTS)


__all__ = ["ABLATIONS", "UNSEEN", "Ablation", "AblationFinding", "hunt", "table"]

ABLATIONS: dict[str, Ablation] = {ablation.name: ablation for ablation in (*STORE, *ORDERS, *MACHINES)}

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
