"""Counts of rare events in a run: each kind of fault, and each branch that only faults lead to. Missing ones are named.

    counts = Counter()
    for seed in range(2000):
        outcome, covered = cover_seed(seed)
        counts.update(covered)
    assert not missing(counts)

Events are seen from outside: in the lines of the history, in the outcome, and by counting calls of production functions during a
run (`Probe`). A simulator whose faults no longer reach a branch shows nothing about it, however many seeds it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import msgspec

from tasuki.core.broker import authentication, client_messages, cluster, worker_messages
from tasuki.core.broker.routes import NOBODY, RoutedJobs
from tasuki.core.broker.turn_builder import TurnBuilder
from tasuki.core.broker.upkeep import Upkeep
from tasuki.core.client_machine import ClientMachine
from tasuki.core.election import Awaiting, Election
from tasuki.core.job import TERMINAL, State
from tasuki.core.machine import Hangup
from tasuki.core.protocol import CancelLeases
from tasuki.core.worker.machine import WorkerMachine
from tasuki.errors import DiskFull, StaleEpoch
from tasuki.stores.common import Retries
from tasuki.testing.sim import history
from tasuki.testing.sim.clients import SimClient
from tasuki.testing.sim.faults import DRAWN_KINDS
from tasuki.testing.sim.network import Network
from tasuki.testing.sim.run import SeedOutcome, check_seed
from tasuki.testing.sim.workers import SimWorker
from tasuki.testing.sim.world import SimOptions

# ---------------------------------------------------------------------------------------------------- probes

Is = Callable[[tuple[Any, ...], Any], bool]
"""(arguments of the call, its answer or exception)"""
_LAST = "_probed_server"


class Probe(msgspec.Struct, frozen=True):
    """A call of `owner.name` for which `applies` holds. `before`: asked before the call, without an answer."""

    owner: Any
    name: str
    means: str
    applies: Is = lambda given, answer: True
    before: bool = False


def _carries(given: tuple[Any, ...], _: Any) -> bool:
    _builder, question, items = given
    return bool(items) and question.verb in ("finish", "fail", "start", "renew")


def _answered_late(given: tuple[Any, ...], _: Any) -> bool:
    machine, answer = given
    beat = machine._beats.get(answer.corr_id)
    return beat is not None and any(sent_at > beat[0] for sent_at, _ in machine._beats.values())


def _moves(kind: type) -> Is:
    """Return a condition: a peer of this kind dials another server than the last time."""

    def moves(given: tuple[Any, ...], _: Any) -> bool:
        _network, node, server = given
        if not isinstance(node, kind):
            return False
        before = vars(node).get(_LAST)
        setattr(node, _LAST, server.name)
        return before not in (None, server.name)

    return moves


def _tells(kind: type) -> Is:
    """Return a condition: a hint led to such a command, or to a message of this kind."""
    return lambda _, answer: any(isinstance(getattr(command, "message", command), kind) for command in answer)


def _reason(word: str) -> Is:
    return lambda given, _: word in given[2]


def _gives_some(_: tuple[Any, ...], answer: Any) -> bool:
    return bool(answer)


_ALL: dict[str, Probe] = {
    # the store
    "turn failed": Probe(TurnBuilder, "failed", "a server's turn was not stored, or it is not known whether it was"),
    "words carried over": Probe(TurnBuilder, "repeat", "what workers said in it stood in the next one", _carries),
    "duty failed": Probe(Upkeep, "failed", "a leader's turn was not stored", lambda call, _: not isinstance(call[2], StaleEpoch)),
    "turn tried again": Probe(Retries, "wait_s", "an interrupted turn", lambda _, answer: answer is not None),
    "submit refused for space": Probe(client_messages, "submit", "no room", lambda _, answer: isinstance(answer, DiskFull)),
    # deliveries
    "read back": Probe(worker_messages, "read_back", "the store was asked what a worker holds"),
    "found again": Probe(
        worker_messages,
        "_redelivered",
        "an assignment that had not reached its worker, as far as is known",
        lambda given, _: bool(given[2][0]),
    ),
    "delivered twice": Probe(WorkerMachine, "_seen_again", "a worker knew the assignment"),
    "given back unstarted": Probe(WorkerMachine, "_release", "an assignment came too late, or to a worker that drains"),
    "given back from the line": Probe(WorkerMachine, "_let_go", "what was here ahead of its time", lambda call, _: bool(call[1])),
    "could not be started": Probe(WorkerMachine, "_gave_back", "a worker had no room for it"),
    "granted to nobody": Probe(
        worker_messages,
        "_granted",
        "the worker had left meanwhile",
        lambda given, _: bool(given[2]) and given[1].conn not in given[0].sessions,
        before=True,
    ),
    "taken back by a server": Probe(
        worker_messages, "_taken_back", "its worker had not begun it at the end of its lease", lambda given, _: any(given[3])
    ),
    "renewal withheld": Probe(worker_messages, "_withheld", "its worker renewed it for long and did not begin it", _gives_some),
    # routing policies
    "left to another server": Probe(
        RoutedJobs, "plan", "the worker of a policy's choice is there", lambda _, plan: bool(plan[1])
    ),
    "passed by": Probe(
        RoutedJobs, "_keep_choice", "the server of the chosen worker did not act", lambda given, _: given[2] == NOBODY
    ),
    # leases
    "told that it is lost": Probe(WorkerMachine, "_answered", "a heartbeat's answer", lambda given, _: bool(given[1].lost)),
    "heartbeat answered late": Probe(WorkerMachine, "_answered", "after the next one was sent", _answered_late, before=True),
    "ending saved": Probe(WorkerMachine, "_save_what_waits", "no server had taken it", _gives_some),
    # connections
    "silent server left": Probe(WorkerMachine, "_stale", "it did not answer a heartbeat", _gives_some),
    "worker changed servers": Probe(Network, "_dialed", "it dialed another one than before", _moves(SimWorker)),
    "client changed servers": Probe(Network, "_dialed", "it dialed another one than before", _moves(SimClient)),
    "worker replaced": Probe(authentication, "_replace_worker", "a new connection of it was there first", _gives_some),
    "said again": Probe(
        ClientMachine, "_say", "a client's call whose answer it had not heard", lambda given, _: given[1].said, before=True
    ),
    "watch asked one by one": Probe(
        ClientMachine, "_watch_refused", "one of several is lacking", lambda call, _: len(call[1]) > 1
    ),
    "hint of a move": Probe(cluster, "heard", "a worker is elsewhere now", _tells(Hangup)),
    "hint of a cancel": Probe(cluster, "heard", "a job is to be canceled that a worker of ours has", _tells(CancelLeases)),
    # the election
    "lock not renewed in time": Probe(Election, "_step_down", "a leader's own time was over", _reason("in time")),
    "lock lost": Probe(Election, "_step_down", "a leader was told that the lock is not its own", _reason("not ours")),
    "fenced leader": Probe(Election, "_step_down", "a leader was refused by the store", _reason("another epoch")),
    "resigned": Probe(Election, "_step_down", "a leader went down in order", _reason("going down")),
    "renewed after the end": Probe(
        Election,
        "_renewed",
        "the answer came after it had stepped down",
        lambda given, _: isinstance(given[0].state, Awaiting),
        before=True,
    ),
    "won for nothing": Probe(Election, "_took_over", "the store did not register the epoch", lambda given, _: not given[1].done),
}

PROBES: dict[str, str] = {name: probe.means for name, probe in _ALL.items()}


def _counted(counts: Counter[str], name: str, probe: Probe, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        if probe.before:
            counts[name] += bool(probe.applies(given, None))
            return function(*given, **named)
        try:
            answer = function(*given, **named)
        except Exception as error:
            counts[name] += bool(probe.applies(given, error))
            raise
        counts[name] += bool(probe.applies(given, answer))
        return answer

    return call


_OF_ROLES = ("deposed", "detached", "answered", "confirmed", "promised", "denied")
"""Effects of sub-leaders, and of workers that ask whether they may go on."""

_EFFECTS = {"partition": "cut", "one_way": "cut"}
"""Kinds whose effect is counted under another name."""

VERBS = (
    "submit", "rerun", "cancel", "requeue", "get", "lease", "held", "start", "renew", "release", "finish", "fail", "take_over",
    "reap", "skip", "promote", "prune", "fire", "assign", "token",
)  # fmt: skip

LINES: dict[str, str] = {
    "report fenced": "a report of an attempt that is not the current one",
    "report repeated": "a report that had been recorded, said again",
    "lease lost": "a worker renewed a lease that was not its own any more",
    "release refused": "a worker gave back what was not its own any more",
    "orphaned": "a lease was over, and is kept for its worker",
    "orphan resumed": "its worker came back before anybody took the job",
    "orphan finished": "its worker reported before anybody took the job",
    "orphan granted": "somebody else took the job",
    "lost for good": "a job whose losses are used up",
    "failed for good": "a job whose retries are used up",
    "timed out": "a job that took too long too often",
    "skipped": "a job that waited past its not_after",
    "run of a time": "a definition was fired for a nominal time",
    "run of an event": "a definition was fired for an event",
    "run forbidden": "a run was due while the last one had not ended",
    "run again": "an operator set a run going again",
    "run replaced": "a run was canceled for the next one",
    "assigned ahead": "a run was assigned to a worker before its time",
    "fetched": "its worker was told to start it, and fetched it",
    "taken back": "a run that was assigned ahead went back, or to another worker",
    "not fetched in time": "a run that was assigned ahead became an orphan",
    "withdrawn": "a run that was assigned ahead is gone, since its definition was changed",
    "order refused": "a leader's order was not obeyed: its epoch was over",
    "changed between runs": "a definition was edited, disabled or deleted, and had been fired before",
    "lost while canceled": "a lease was over whose cancel was asked for",
    "cancel wins": "an attempt was canceled while it ran",
    "finish wins": "an attempt succeeded though its cancel was asked for",
    "cancel of a waiting job": "it ended at once",
    "cancel too late": "of a job that was over",
    "requeued": "a terminal job was set going again",
    "requeue refused": "a job was not terminal",
    "rerun": "a submit set a failed job going again",
    "submitted again": "a submit of a job that is stored",
    "conflict": "a submit with another body",
    "not known": "a caller was not told what became of its call",
    "refused": "a caller was refused",
    "epoch refused": "a duty under an epoch that is over",
    "takeover refused": "an epoch was to be registered after a later one",
    "another leader": "another server than the last one leads",
    "the same leader again": "a server leads under a new epoch after its last one",
    "stepped down": "a server stopped leading while it lived",
    "saved ending recorded": "an ending that an earlier process of the worker had saved",
    "saved ending fenced": "the same, too late",
    "attempt stopped": "a worker or keeper ended an attempt",
    "attempt killed": "an attempt died with its worker",
    "exited": "a process ended by itself",
}

WORLDS: dict[str, Callable[[SimOptions], bool]] = {
    "alone": lambda options: options.servers == 1,
    "several servers": lambda options: (options.servers or 1) > 1,
    "tokens": lambda options: bool(options.tokens),
    "no tokens": lambda options: not options.tokens,
    "wire": lambda options: bool(options.wire),
}

RARE = ("orphan resumed",)
"""Counted, but not expected: less than one in 2,000 seeds. The suite of the stores has it on each store."""

EXPECTED: dict[str, str] = {
    **{f"fault {kind}": "it happened" for kind in DRAWN_KINDS},
    **{
        f"effect {kind}": "it made a difference to somebody"
        for kind in dict.fromkeys([*(_EFFECTS.get(k, k) for k in DRAWN_KINDS), "keeper", *_OF_ROLES])
    },
    **{f"verb {verb}": "the store was asked" for verb in VERBS},
    **{f"world {name}": "a seed had such a world" for name in WORLDS},
    **{name: meaning for name, meaning in LINES.items() if name not in RARE},
    **PROBES,
}
"""All events that must happen at least once in a run of many seeds, with their meanings."""


def missing(counts: Mapping[str, int]) -> list[str]:
    """Return the names of expected events that never happened."""
    return [name for name in EXPECTED if not counts.get(name)]


class Coverage:
    """The events that one seed has covered."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._handlers: dict[type[history.HistoryLine], Callable[[Any], None]] = {
            history.ReportedEvent: self._reported,
            history.ShownEvent: self._shown,
            history.ReapedEvent: self._reaped,
            history.GrantedEvent: self._granted,
            history.RowEvent: self._row,
            history.FiredEvent: self._fired,
            history.DefinitionEvent: self._defined,
            history.CanceledEvent: self._canceled,
            history.RequeuedEvent: self._requeued,
            history.SubmittedEvent: self._submitted,
            history.AnsweredEvent: self._answered,
            history.LedEvent: self._led,
            history.TookOverEvent: self._took_over,
            history.LeadingEvent: self._leading,
            history.SettledEvent: self._settled,
            history.GoneEvent: self._gone,
            history.ProcessEvent: self._process,
            history.FetchedEvent: self._fetched,
            history.WithdrawnEvent: self._withdrawn,
            history.OrderedEvent: self._ordered,
        }
        self._ahead: set[str] = set()
        """Leases that were assigned ahead and not fetched."""
        self._unfetched: dict[str, int] = {}
        """Attempts of `_ahead`, by job."""
        self._orphaned: set[str] = set()
        self._cancel_asked: set[str] = set()
        self._states: dict[str, str] = {}
        self._runs: dict[str, str] = {}
        self._by_event: set[str] = set()
        self._generations: dict[str, int] = {}
        self._granted_in: dict[str, int] = {}
        """lease_id → which life of its worker it was given to."""
        self._lives: Counter[str] = Counter()
        self._last_leader = ""
        self._leads: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count calls of production functions too, while the context lasts."""
        with ExitStack() as stack:
            for name, probe in _ALL.items():
                counted = _counted(self.counts, name, probe, vars(probe.owner)[probe.name])
                stack.enter_context(mock.patch.object(probe.owner, probe.name, counted))
            yield

    def observe(self, line: history.AnyLine) -> None:
        """Count the next line of the history."""
        handle = self._handlers.get(type(line))
        if handle is not None:
            handle(line)

    def end(self, outcome: SeedOutcome) -> None:
        """Count the figures of a run that is over."""
        self.counts.update({f"fault {kind}": count for kind, count in outcome.faults.items()})
        self.counts.update({f"effect {kind}": count for kind, count in outcome.effects.items()})
        self.counts.update({f"verb {verb}": count for verb, count in outcome.verbs.items()})
        self.counts.update(f"world {name}" for name, applies in WORLDS.items() if applies(outcome.options))

    # -- what workers say -------------------------------------------------------------------------------------------
    def _reported(self, line: history.ReportedEvent) -> None:
        if not line.accepted:
            self.counts["report repeated" if line.repeated else "report fenced"] += 1
            return
        if line.job_id in self._orphaned:
            self._orphaned.discard(line.job_id)
            self.counts["orphan finished"] += 1
        if line.job_id in self._cancel_asked:
            self.counts["finish wins"] += line.state == State.SUCCEEDED
            self.counts["cancel wins"] += line.state == State.CANCELED

    def _shown(self, line: history.ShownEvent) -> None:
        if not line.held:
            self.counts["release refused" if line.verb == "release" else "lease lost"] += 1
        elif line.job_id in self._orphaned:
            self._orphaned.discard(line.job_id)
            self.counts["orphan resumed"] += 1
        self.counts["taken back"] += line.verb == "release" and line.lease_id in self._ahead

    def _settled(self, line: history.SettledEvent) -> None:
        if self._granted_in.get(line.lease_id) != self._lives[line.worker_id]:
            self.counts["saved ending recorded" if line.recorded else "saved ending fenced"] += 1

    def _gone(self, line: history.GoneEvent) -> None:
        if line.how != "ended":
            self.counts[f"attempt {line.how}"] += 1

    # -- what the store did -----------------------------------------------------------------------------------------
    def _granted(self, line: history.GrantedEvent) -> None:
        self._granted_in[line.lease_id] = self._lives[line.worker_id]
        if line.job_id in self._orphaned:
            self._orphaned.discard(line.job_id)
            self.counts["orphan granted"] += 1
        if line.ahead:
            self._ahead.add(line.lease_id)
            self._unfetched[line.job_id] = line.attempt
            self.counts["assigned ahead"] += 1

    def _fetched(self, line: history.FetchedEvent) -> None:
        self._ahead.discard(line.lease_id)
        self._unfetched.pop(line.job_id, None)
        self.counts["fetched"] += 1

    def _withdrawn(self, line: history.WithdrawnEvent) -> None:
        self.counts["withdrawn"] += 1

    def _ordered(self, line: history.OrderedEvent) -> None:
        self.counts["order refused"] += not line.obeyed

    def _reaped(self, line: history.ReapedEvent) -> None:
        if line.state == State.ORPHANED:
            self._orphaned.add(line.job_id)
            self.counts["orphaned"] += 1
            self.counts["not fetched in time"] += self._unfetched.get(line.job_id) == line.attempt
        self.counts["lost while canceled"] += line.state == State.CANCELED

    def _row(self, line: history.RowEvent) -> None:
        if line.at_end or self._states.get(line.job_id) == line.state:
            return
        self._states[line.job_id] = line.state
        if line.state in TERMINAL:
            self._orphaned.discard(line.job_id)
            self._cancel_asked.discard(line.job_id)
        if line.state == State.FAILED:
            self.counts["lost for good" if line.error_code == "LOST" else "failed for good"] += 1
        self.counts["timed out"] += line.state == State.TIMED_OUT
        forbidden = line.error_code == "STILL_RUNNING"
        self.counts["run forbidden"] += forbidden
        self.counts["skipped"] += line.state == State.SKIPPED and not forbidden
        self.counts["run replaced"] += line.state == State.CANCELED and line.job_id in self._runs

    def _fired(self, line: history.FiredEvent) -> None:
        self._runs[line.job_id] = line.definition
        self.counts["run of an event" if line.definition in self._by_event else "run of a time"] += 1

    def _defined(self, line: history.DefinitionEvent) -> None:
        if line.by_event:
            self._by_event.add(line.definition)
        self.counts["changed between runs"] += line.definition in self._runs.values()

    def _canceled(self, line: history.CanceledEvent) -> None:
        before = self._states.get(line.job_id, "")
        if line.requested:
            self._cancel_asked.add(line.job_id)
        elif before in TERMINAL:
            self.counts["cancel too late"] += 1
        else:
            self.counts["cancel of a waiting job"] += line.state == State.CANCELED

    def _requeued(self, line: history.RequeuedEvent) -> None:
        self.counts["requeued" if line.done else "requeue refused"] += 1
        self.counts["run again"] += line.done and line.job_id in self._runs
        self._generations[line.job_id] = line.generation

    def _submitted(self, line: history.SubmittedEvent) -> None:
        if line.refused:
            self.counts["conflict"] += line.refused == "CONFLICT"
            return
        again = line.generation > self._generations.get(line.job_id, 0)
        self.counts["rerun"] += again
        self.counts["submitted again"] += not (line.created or again)
        self._generations[line.job_id] = line.generation

    # -- clients, servers, processes ----------------------------------------------------------------------------------
    def _answered(self, line: history.AnsweredEvent) -> None:
        self.counts["not known"] += line.answer == "unknown"
        self.counts["refused"] += line.answer == "refused"

    def _led(self, line: history.LedEvent) -> None:
        self.counts["epoch refused"] += not line.done

    def _took_over(self, line: history.TookOverEvent) -> None:
        self.counts["takeover refused"] += not line.done

    def _leading(self, line: history.LeadingEvent) -> None:
        if not line.epoch:
            self.counts["stepped down"] += line.server_id in self._leads
            self._leads.discard(line.server_id)
            return
        self._leads.add(line.server_id)
        if self._last_leader:
            self.counts["the same leader again" if self._last_leader == line.server_id else "another leader"] += 1
        self._last_leader = line.server_id

    def _process(self, line: history.ProcessEvent) -> None:
        if line.what == "started":
            self._lives[line.name] += 1
        self.counts["exited"] += line.what == "exited"


def cover_seed(seed: int, options: SimOptions | None = None) -> tuple[SeedOutcome, Counter[str]]:
    """Run a seed under the checker, and return what it covers."""
    coverage = Coverage()
    with coverage.watching():
        outcome = check_seed(seed, options, coverage.observe)
    coverage.end(outcome)
    return outcome, +coverage.counts
