"""Kinds of fault, and when they happen: drawn once from the seed, as a list, so that a failing seed can be tried with fewer of
them.

Each kind says whom it can hit, how it begins and how it ends. All faults are over when the world is healed. A fault that finds
nothing to hit (a crash of a process that is down) does not happen, and is not counted.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from tasuki.core.job import Outcome
from tasuki.core.store_messages import HeldLease, Report, Turn
from tasuki.stores.batching import execute
from tasuki.testing.sim.history import DriftedEvent, FaultEvent
from tasuki.testing.sim.network import SimulatedLink
from tasuki.testing.sim.servers import COORDINATION, STORE, CoordinationNode, StoreFaults
from tasuki.testing.sim.system import ProcessNames, System, cast_of
from tasuki.testing.sim.world import SimOptions, Streams


class PlannedFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault of one kind."""

    number: int
    at: float
    kind: str
    target: str
    """The host or process that the fault hits."""
    other: str = ""
    """The other one of two between which the fault is; empty if it is between the target and everybody."""
    for_s: float = 0.0
    """The duration; 0 if the fault is done at once."""
    amount: float = 0.0
    """The severity: seconds, a probability, or a rate."""


class FaultKind(NamedTuple):
    """A kind of fault. `begin` returns whether there was anything to hit; `end` undoes what lasts."""

    hits: Callable[[ProcessNames], tuple[str, ...]]
    begin: Callable[[System, PlannedFault], bool]
    end: Callable[[System, PlannedFault], None] | None = None
    lasts_s: tuple[float, float] = (0.0, 0.0)
    amount: tuple[float, float] = (0.0, 0.0)
    between: Callable[[ProcessNames], tuple[str, ...]] | None = None
    """Candidates for the other one; one fault in three hits everybody."""
    several: bool = False
    """Possible only where several servers work on one store."""
    drawn: bool = True
    """True: seeds draw this kind. Others happen only where they are named."""


# ---------------------------------------------------------------------------------------------------- the network


def _links(system: System, fault: PlannedFault) -> list[SimulatedLink]:
    return [
        link
        for link in system.network.links.values()
        if link.node_open
        and link.server_open
        and fault.target in (link.node.name, link.server.name)
        and (not fault.other or fault.other in (link.node.name, link.server.name))
    ]


def _slow(system: System, fault: PlannedFault) -> bool:
    system.network.slow[fault.target] = system.network.slow.get(fault.target, 0.0) + fault.amount
    return True


def _slow_no_more(system: System, fault: PlannedFault) -> None:
    left_s = system.network.slow.pop(fault.target) - fault.amount
    if left_s > 1e-9:
        system.network.slow[fault.target] = left_s


def _half_open(system: System, fault: PlannedFault) -> bool:
    links = _links(system, fault)
    for link in links:
        if fault.amount < 0.66:
            link.to_server.mute = True
        if fault.amount > 0.33:
            link.to_node.mute = True
    return bool(links)


def _pairs(system: System, fault: PlannedFault) -> list[tuple[str, str]]:
    others = (fault.other,) if fault.other else tuple(name for name in system.cast.processes if name != fault.target)
    there = [(fault.target, other) for other in others]
    back = [(other, fault.target) for other in others]
    if fault.kind == "partition":
        return there + back
    return there if fault.amount < 0.5 else back


def _cut(system: System, fault: PlannedFault) -> bool:
    system.network.cut.update(_pairs(system, fault))
    return True


def _cut_over(system: System, fault: PlannedFault) -> None:
    system.network.cut.subtract(_pairs(system, fault))
    system.network.go_on()


def _refused(system: System, fault: PlannedFault) -> bool:
    system.network.refusing[fault.target] += 1
    for link in _links(system, fault):
        if fault.amount < 0.5:
            system.network.reset(link)
    return True


def _refused_no_more(system: System, fault: PlannedFault) -> None:
    system.network.refusing[fault.target] -= 1


def _reset(system: System, fault: PlannedFault) -> bool:
    links = _links(system, fault)
    for link in links:
        system.network.reset(link)
    system.world.effects["reset"] += len(links)
    return bool(links)


def _late(system: System, fault: PlannedFault) -> bool:
    """Hold up what the peer sends, then break the connection: it comes to the server after what the peer sends next."""
    links = [link for link in _links(system, fault) if not link.to_server.stuck]
    for link in links:
        link.to_server.stuck = True
    return bool(links)


def _late_over(system: System, fault: PlannedFault) -> None:
    for link in list(system.network.links.values()):
        if link.node.name == fault.target and link.to_server.stuck:
            system.network.come_late(link, fault.amount)


# ---------------------------------------------------------------------------------------------------- processes


def _crash(system: System, fault: PlannedFault) -> bool:
    process = system.processes[fault.target]
    if not process.alive:
        return False
    process.crash(silent=fault.kind == "power")
    system.world.effects[fault.kind] += 1
    return True


def _started_again(system: System, fault: PlannedFault) -> None:
    process = system.processes[fault.target]
    if not process.alive:
        process.start()


def _pause(system: System, fault: PlannedFault) -> bool:
    process = system.processes[fault.target]
    if not process.alive or process.paused:
        return False
    process.pause()
    return True


def _resumed(system: System, fault: PlannedFault) -> None:
    process = system.processes[fault.target]
    if process.alive and process.paused:
        process.resume()


def _drain(system: System, fault: PlannedFault) -> bool:
    worker = system.worker(fault.target)
    if not worker.alive or worker.paused or worker.machine.draining:
        return False
    worker.drain()
    return True


def _stop(system: System, fault: PlannedFault) -> bool:
    """Stop a server in order, as for an upgrade."""
    server = system.server(fault.target)
    if not server.alive or server.paused or server.stopping:
        return False
    server.stop()
    return True


# ---------------------------------------------------------------------------------------------------- clocks


def _jump(system: System, fault: PlannedFault) -> bool:
    clock = system.clock_of(fault.target)
    before = clock.wall()
    clock.jump_wall(fault.amount)
    system.world.effects["jump"] += clock.wall() != before
    return True


def _drift(system: System, fault: PlannedFault) -> bool:
    clock = system.clock_of(fault.target)
    if clock.rate != 1.0:
        return False
    clock.set_rate(1.0 + fault.amount)
    if fault.kind == "drift_far":
        system.world.tell(DriftedEvent(at=system.world.at, name=fault.target))
    return True


def _drift_over(system: System, fault: PlannedFault) -> None:
    clock = system.clock_of(fault.target)
    system.world.effects[fault.kind] += clock.rate != 1.0
    clock.set_rate(1.0)


# ---------------------------------------------------------------------------------------------------- store and disks


Begin = Callable[[System, PlannedFault], bool]
End = Callable[[System, PlannedFault], None]


def _chance_of(place: Callable[[System], Any], name: str) -> tuple[Begin, End]:
    """Return functions that set and reset a probability."""

    def begin(system: System, fault: PlannedFault) -> bool:
        setattr(place(system), name, fault.amount)
        return True

    def end(system: System, fault: PlannedFault) -> None:
        setattr(place(system), name, 0.0)

    return begin, end


def _counted(place: Callable[[System, PlannedFault], tuple[Counter[Any], Any]]) -> tuple[Begin, End]:
    """Return functions that count a fault while it lasts, in a counter and under a name: two at once end one after the other."""

    def begin(system: System, fault: PlannedFault) -> bool:
        counter, name = place(system, fault)
        counter[name] += 1
        return True

    def end(system: System, fault: PlannedFault) -> None:
        counter, name = place(system, fault)
        counter[name] -= 1

    return begin, end


def _cut_off(node: str) -> tuple[Begin, End]:
    return _counted(lambda system, fault: (system.network.cut, (fault.target, node)))


def _store_slow(system: System, fault: PlannedFault) -> bool:
    system.storage.troubles.slow_s += fault.amount
    return True


def _store_slow_over(system: System, fault: PlannedFault) -> None:
    system.storage.troubles.slow_s = max(0.0, system.storage.troubles.slow_s - fault.amount)


def _worker_disk_full(system: System, fault: PlannedFault) -> bool:
    system.worker(fault.target).disk_full += 1
    return True


def _worker_disk_full_over(system: System, fault: PlannedFault) -> None:
    system.worker(fault.target).disk_full -= 1


def _impostor(system: System, fault: PlannedFault) -> bool:
    """Let a peer with another token, which knows all leases of a worker, show and report them as its own."""
    worker, storage, at = system.worker(fault.target), system.storage, "token:impostor"
    holder = (worker.name, worker.identity.incarnation)
    claims = [attempt.grant for attempt in worker.attempts.values() if attempt.runs]
    if not claims or storage.troubles.full or storage.troubles.down:
        return False
    forged = Outcome(exit_code=0, result=b"forged", result_sha256=hashlib.sha256(b"forged").hexdigest())
    turn = Turn(
        finish=[Report(grant.job_id, worker.name, grant.lease_id, grant.attempt, forged, owner=at) for grant in claims],
        renew=[HeldLease(grant.job_id, *holder, grant.lease_id, grant.attempt, owner=at) for grant in claims],
        held=[(*holder, at)],
    )
    storage.recorder.turn("impostor", turn, execute(storage.store, turn))
    system.world.effects["impostor"] += 1
    return True


# ---------------------------------------------------------------------------------------------------- the table


def _troubles(system: System) -> StoreFaults:
    return system.storage.troubles


def _room(system: System, fault: PlannedFault) -> tuple[Counter[str], str]:
    return system.storage.troubles.full, "hard" if fault.amount < 0.5 else "floor"


def _between(system: System) -> CoordinationNode:
    return system.coordination


def _servers(cast: ProcessNames) -> tuple[str, ...]:
    return cast.servers


def _workers(cast: ProcessNames) -> tuple[str, ...]:
    return cast.workers


def _peers(cast: ProcessNames) -> tuple[str, ...]:
    return cast.peers


def _processes(cast: ProcessNames) -> tuple[str, ...]:
    return cast.servers * 2 + cast.workers * 2 + cast.clients


def _clocks(cast: ProcessNames) -> tuple[str, ...]:
    return (*cast.servers, *cast.workers, STORE, STORE)


def _store(cast: ProcessNames) -> tuple[str, ...]:
    return (STORE,)


def _coordination(cast: ProcessNames) -> tuple[str, ...]:
    return (COORDINATION,)


SHORT, LONG, OFTEN = (0.5, 3.0), (1.0, 9.0), (0.2, 0.9)

KINDS: dict[str, FaultKind] = {
    "slow": FaultKind(_processes, _slow, _slow_no_more, LONG, (0.1, 1.5)),
    "half_open": FaultKind(_peers, _half_open, amount=(0.0, 1.0)),
    "partition": FaultKind(_processes, _cut, _cut_over, LONG, between=_servers),
    "one_way": FaultKind(_processes, _cut, _cut_over, LONG, (0.0, 1.0), between=_servers),
    "refused": FaultKind(_servers, _refused, _refused_no_more, SHORT, (0.0, 1.0)),
    "reset": FaultKind(_processes, _reset),
    "late": FaultKind(_peers, _late, _late_over, (0.2, 2.0), (0.2, 3.0)),
    "crash": FaultKind(_processes, _crash, _started_again, (0.2, 6.0)),
    "power": FaultKind(_processes, _crash, _started_again, (1.0, 8.0)),
    "pause": FaultKind(_processes, _pause, _resumed, LONG),
    "drain": FaultKind(_workers, _drain),
    "stop": FaultKind(_servers, _stop),
    "jump": FaultKind(_clocks, _jump, amount=(-6.0, 6.0)),
    "drift": FaultKind(_clocks, _drift, _drift_over, LONG, (-0.05, 0.05)),
    "drift_far": FaultKind(_workers, _drift, _drift_over, (5.0, 15.0), (-0.8, -0.5)),
    "store_slow": FaultKind(_store, _store_slow, _store_slow_over, SHORT, (0.1, 2.0)),
    "store_held": FaultKind(_store, *_chance_of(_troubles, "held"), LONG, (0.05, 0.4), drawn=False),
    "store_lost": FaultKind(_store, *_chance_of(_troubles, "lost"), SHORT, OFTEN),
    "store_refused": FaultKind(_store, *_chance_of(_troubles, "refused"), SHORT, OFTEN),
    "store_restart": FaultKind(_store, *_counted(lambda system, _: (system.storage.troubles.down, "restart")), SHORT),
    "store_cut": FaultKind(_servers, *_cut_off(STORE), LONG),
    "disk_full": FaultKind(_store, *_counted(_room), SHORT, (0.0, 1.0)),
    "impostor": FaultKind(_workers, _impostor),
    "worker_disk_full": FaultKind(_workers, _worker_disk_full, _worker_disk_full_over, LONG),
    "hints_lost": FaultKind(_coordination, *_chance_of(_between, "hints_lost"), LONG, OFTEN, several=True),
    "hints_late": FaultKind(_coordination, *_chance_of(_between, "hints_late"), LONG, OFTEN, several=True),
    "hints_doubled": FaultKind(_coordination, *_chance_of(_between, "hints_doubled"), LONG, OFTEN, several=True),
    "coordination_lost": FaultKind(_coordination, *_chance_of(_between, "lost"), LONG, OFTEN, several=True),
    "coordination_late": FaultKind(_coordination, *_chance_of(_between, "late"), LONG, OFTEN, several=True),
    "coordination_doubled": FaultKind(_coordination, *_chance_of(_between, "doubled"), LONG, OFTEN, several=True),
    "coordination_cut": FaultKind(_servers, *_cut_off(COORDINATION), LONG, several=True),
}

DRAWN_KINDS = tuple(name for name, kind in KINDS.items() if kind.drawn)


def draw_faults(streams: Streams, options: SimOptions) -> list[PlannedFault]:
    """Draw all faults of a seed, in the order of their times."""
    chance, cast = streams.faults, cast_of(options)
    kinds = [kind for kind in options.kinds or () if not KINDS[kind].several or (options.servers or 0) > 1]
    moments = sorted(options.chaos_s * (0.04 + 0.9 * chance.random()) for _ in range(options.faults or 0))
    return [_one(chance, cast, number, at, chance.choice(kinds)) for number, at in enumerate(moments)] if kinds else []


def _one(chance: random.Random, cast: ProcessNames, number: int, at: float, name: str) -> PlannedFault:
    kind = KINDS[name]
    target, other = chance.choice(kind.hits(cast)), ""
    for_s, amount = chance.uniform(*kind.lasts_s), chance.uniform(*kind.amount)
    if kind.between is not None and chance.random() < 0.67:
        others = [one for one in kind.between(cast) if one != target] if target not in cast.servers else list(cast.peers)
        other = chance.choice(others)
    return PlannedFault(number=number, at=at, kind=name, target=target, other=other, for_s=for_s, amount=amount)


class Faults:
    """Faults of one run: begins and ends them, and counts those that happened."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.happened: Counter[str] = Counter()
        self._lasting: dict[int, PlannedFault] = {}

    def plan(self, faults: list[PlannedFault]) -> None:
        for fault in faults:
            self.system.world.at_time(fault.at, f"fault {fault.kind} {fault.target}", self._begin, fault)

    def _begin(self, fault: PlannedFault) -> None:
        world, kind = self.system.world, KINDS[fault.kind]
        if not kind.begin(self.system, fault):
            return
        self.happened[fault.kind] += 1
        world.tell(FaultEvent(at=world.at, fault=fault.kind, target=f"{fault.target} {fault.other}".rstrip()))
        if kind.end is not None:
            self._lasting[fault.number] = fault
            world.after(fault.for_s, f"fault {fault.kind} {fault.target} is over", self._end, fault)

    def _end(self, fault: PlannedFault) -> None:
        if self._lasting.pop(fault.number, None) is not None:
            end = KINDS[fault.kind].end
            assert end is not None
            end(self.system, fault)

    def heal(self) -> None:
        """End all faults that still last."""
        for fault in list(self._lasting.values()):
            self._end(fault)
