"""Branches of the machines that leave no line in the history: calls of production functions are counted for the time of a run.

Each probe names a function, and says of a call and its answer whether it was the branch that is meant. Nothing is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from tasuki.core.broker import client_messages, handshake, settle
from tasuki.core.broker.broker import Broker
from tasuki.core.broker.cluster import OtherServers
from tasuki.core.broker.upkeep import Upkeep
from tasuki.core.client_machine import ClientMachine
from tasuki.core.election import Awaiting, Election
from tasuki.core.machine import Hangup
from tasuki.core.protocol import CancelLeases
from tasuki.core.worker.machine import WorkerMachine
from tasuki.errors import DiskFull, StaleEpoch
from tasuki.stores.retrying import Retries
from tasuki.testing.sim.clients import SimClient
from tasuki.testing.sim.network import Network
from tasuki.testing.sim.patches import Instead
from tasuki.testing.sim.workers import SimWorker

Is = Callable[[tuple[Any, ...], Any], bool]
"""(what it was called with, what it answered or raised)"""
_LAST = "_probed_server"


class Probe(msgspec.Struct, frozen=True):
    """A call of `owner.name` for which `applies` holds. `before`: it is asked before the call, without an answer."""

    owner: Any
    name: str
    means: str
    applies: Is = lambda given, answer: True
    before: bool = False


def _carries(given: tuple[Any, ...], _: Any) -> bool:
    draft = given[1]
    return bool(draft.finish or draft.fail or draft.start or draft.renew)


def _answered_late(given: tuple[Any, ...], _: Any) -> bool:
    machine, answer = given
    beat = machine._beats.get(answer.corr_id)
    return beat is not None and any(sent_at > beat[0] for sent_at, _ in machine._beats.values())


def _moves(kind: type) -> Is:
    """A peer of this kind comes to another server than the last time."""

    def moves(given: tuple[Any, ...], _: Any) -> bool:
        _network, node, server = given
        if not isinstance(node, kind):
            return False
        before = vars(node).get(_LAST)
        setattr(node, _LAST, server.name)
        return before not in (None, server.name)

    return moves


def _tells(kind: type) -> Is:
    """A hint led to such a command, or to a message of this kind."""
    return lambda _, answer: any(isinstance(getattr(command, "message", command), kind) for command in answer)


def _reason(word: str) -> Is:
    return lambda given, _: word in given[2]


_ALL: dict[str, Probe] = {
    # the store
    "turn failed": Probe(settle, "turn_failed", "a server's turn was not stored, or it is not known whether it was"),
    "words carried over": Probe(settle, "_carry_over", "what workers said in it stood in the next one", _carries),
    "duty failed": Probe(
        Upkeep, "failed", "a leader's turn was not stored", lambda given, _: not isinstance(given[2], StaleEpoch)
    ),
    "turn tried again": Probe(Retries, "wait_s", "an interrupted turn", lambda _, answer: answer is not None),
    "submit refused for space": Probe(
        client_messages, "submit", "the disk was full", lambda _, answer: isinstance(answer, DiskFull)
    ),
    # deliveries
    "read back": Probe(Broker, "read_back", "the store was asked what a worker holds"),
    "found again": Probe(
        settle,
        "_redelivered",
        "an assignment that had not reached its worker, as far as is known",
        lambda given, _: bool(given[2]),
    ),
    "delivered twice": Probe(WorkerMachine, "_seen_again", "a worker knew the assignment"),
    "given back unstarted": Probe(WorkerMachine, "_release", "an assignment came too late, or to a worker that drains"),
    "given back from the line": Probe(
        WorkerMachine, "_let_go", "what was here ahead of its time", lambda given, _: bool(given[1])
    ),
    "could not be started": Probe(WorkerMachine, "_gave_back", "a worker had no room for it"),
    "granted to nobody": Probe(
        settle,
        "_granted",
        "the worker had left meanwhile",
        lambda given, _: bool(given[3]) and given[1].conn not in given[0].sessions,
        before=True,
    ),
    # leases
    "told that it is lost": Probe(WorkerMachine, "_answered", "a heartbeat's answer", lambda given, _: bool(given[1].lost)),
    "heartbeat answered late": Probe(WorkerMachine, "_answered", "after the next one was sent", _answered_late, before=True),
    "ending saved": Probe(WorkerMachine, "_save_what_waits", "no server had taken it", lambda _, answer: bool(answer)),
    # connections
    "silent server left": Probe(WorkerMachine, "_stale", "it did not answer a heartbeat", lambda _, answer: bool(answer)),
    "worker changed servers": Probe(Network, "_dialed", "it dialed another one than before", _moves(SimWorker)),
    "client changed servers": Probe(Network, "_dialed", "it dialed another one than before", _moves(SimClient)),
    "worker replaced": Probe(
        handshake, "_replace_worker", "a new connection of it was there first", lambda _, answer: bool(answer)
    ),
    "said again": Probe(
        ClientMachine, "_say", "a client's call whose answer it had not heard", lambda given, _: given[1].said, before=True
    ),
    "watch asked one by one": Probe(
        ClientMachine, "_watch_refused", "one of several jobs is not there", lambda given, _: len(given[1]) > 1
    ),
    "hint of a move": Probe(OtherServers, "heard", "a worker is elsewhere now", _tells(Hangup)),
    "hint of a cancel": Probe(OtherServers, "heard", "a job is to be canceled that a worker of ours has", _tells(CancelLeases)),
    # the election
    "lock not renewed in time": Probe(Election, "_step_down", "a leader's own time was over", _reason("in time")),
    "lock lost": Probe(Election, "_step_down", "a leader was told that the lock is not its own", _reason("not ours")),
    "fenced leader": Probe(Election, "_step_down", "a leader was refused by the store", _reason("newer epoch")),
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


def probes(counts: Counter[str]) -> Iterator[Instead]:
    """What counts into `counts` while it is open."""
    for name, probe in _ALL.items():
        yield Instead(probe.owner, probe.name, partial(_counted, counts, name, probe))


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
