"""The election: every cell of its table, and several servers in a world that delays, loses, freezes and drifts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count, cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.coords.coordination import MemoryCoordination
from tasuki.core.election import (
    ASK_MAX_S,
    ASK_MIN_S,
    LOCK_TTL_MAX_S,
    Acquire,
    Acquired,
    Acquiring,
    Awaiting,
    Busy,
    Command,
    Degraded,
    Election,
    EpochFenced,
    Event,
    Following,
    Lapsed,
    Lead,
    Leading,
    Locked,
    LockReleased,
    Release,
    Renew,
    Renewed,
    Resign,
    Resigned,
    State,
    StepDown,
    TakeOver,
    TakingOver,
    TookOver,
)
from tasuki.core.machine import Ticked
from tasuki.errors import ConfigError, InvalidTransition

TTL_S = 10.0
MARGIN_S = 1.0
EPOCH = 7
NOW = 1_000.0

# The moments are chosen so that NOW is in the middle of a leadership: asked for a second ago.
ASKED_AT = NOW - 1
UNTIL = ASKED_AT + TTL_S - MARGIN_S
RENEW_AT = ASKED_AT + TTL_S / 3

FOLLOWING = Following(ask_at=NOW + 0.5)
FOLLOWING_DUE = Following(ask_at=NOW)
ACQUIRING = Acquiring()
TAKING_OVER = TakingOver(EPOCH, ASKED_AT)
TAKING_OVER_LATE = TakingOver(EPOCH, NOW - TTL_S + MARGIN_S)
LEADING = Leading(EPOCH, UNTIL, RENEW_AT)
LEADING_DUE = Leading(EPOCH, UNTIL, renew_at=NOW)
RENEWING = Leading(EPOCH, UNTIL, RENEW_AT, renewing=True)
OVER = Leading(EPOCH, until=NOW, renew_at=NOW - 5)
OVER_RENEWING = Leading(EPOCH, until=NOW, renew_at=NOW - 5, renewing=True)
AWAITING = Awaiting(EPOCH)
RESIGNED = Resigned()
PAUSE = Following(NOW + ASK_MAX_S)

NOT_RENEWED = "the lock could not be renewed in time"
NOT_OURS = "the lock is not ours any more"
OTHER = "the store has another epoch"
AWAY = "the store was away for so long that leases may be over"
TOLD = "it was told to"
GOING = "this server is going down"

LOCKED = Acquired(Locked(EPOCH), ASKED_AT)
BUSY = Acquired(Busy("other", 0.7), ASKED_AT)
NOT_ASKED = InvalidTransition


def next_at(state: State) -> float | None:
    """Return when a tick changes something; None: not before an answer comes."""
    match state:
        case Following(ask_at=ask_at):
            return ask_at
        case Leading(until=until, renew_at=renew_at, renewing=renewing):
            return until if renewing else min(until, renew_at)
        case _:
            return None


def term_in(state: State) -> Election:
    term = Election("me", TTL_S)
    term.state = state
    return term


# Every cell: (state, event) -> (commands, next state), or the error for an answer to what was not asked.
TABLE: list[tuple[State, Event, list[Command] | type[Exception], State]] = [
    (FOLLOWING, Ticked(), [], FOLLOWING),
    (FOLLOWING_DUE, Ticked(), [Acquire()], ACQUIRING),
    (FOLLOWING, LOCKED, NOT_ASKED, FOLLOWING),
    (FOLLOWING, TookOver(EPOCH, True), NOT_ASKED, FOLLOWING),
    (FOLLOWING, Renewed(True, ASKED_AT), NOT_ASKED, FOLLOWING),
    (FOLLOWING, EpochFenced(EPOCH), [], FOLLOWING),
    (FOLLOWING, Lapsed(EPOCH), [], FOLLOWING),
    (FOLLOWING, Degraded(), [], FOLLOWING),
    (FOLLOWING, LockReleased(), [], FOLLOWING_DUE),
    (FOLLOWING, Resign(), [], RESIGNED),
    (ACQUIRING, Ticked(), [], ACQUIRING),
    (ACQUIRING, LOCKED, [TakeOver(EPOCH)], TAKING_OVER),
    (ACQUIRING, BUSY, [], Following(NOW + 0.7)),
    (ACQUIRING, Acquired(Busy("other", 0.0), ASKED_AT), [], Following(NOW + ASK_MIN_S)),
    (ACQUIRING, Acquired(Busy("other", 9.0), ASKED_AT), [], Following(NOW + ASK_MAX_S)),
    (ACQUIRING, Acquired(None, ASKED_AT), [], PAUSE),
    (ACQUIRING, TookOver(EPOCH, True), NOT_ASKED, ACQUIRING),
    (ACQUIRING, Renewed(True, ASKED_AT), NOT_ASKED, ACQUIRING),
    (ACQUIRING, EpochFenced(EPOCH), [], ACQUIRING),
    (ACQUIRING, Lapsed(EPOCH), [], ACQUIRING),
    (ACQUIRING, Degraded(), [], ACQUIRING),
    (ACQUIRING, LockReleased(), [], Acquiring(released=True)),
    (Acquiring(released=True), BUSY, [], FOLLOWING_DUE),
    (Acquiring(released=True), LOCKED, [TakeOver(EPOCH)], TAKING_OVER),
    (ACQUIRING, Resign(), [], ACQUIRING),
    (TAKING_OVER, Ticked(), [], TAKING_OVER),
    (TAKING_OVER, LOCKED, NOT_ASKED, TAKING_OVER),
    (TAKING_OVER, TookOver(EPOCH, True), [Lead(EPOCH)], LEADING),
    (TAKING_OVER, TookOver(EPOCH, False), [Release(EPOCH)], PAUSE),
    (TAKING_OVER, TookOver(EPOCH, None), [Release(EPOCH)], PAUSE),
    (TAKING_OVER, TookOver(EPOCH - 1, True), NOT_ASKED, TAKING_OVER),
    (TAKING_OVER_LATE, Ticked(), [], TAKING_OVER_LATE),
    (TAKING_OVER_LATE, TookOver(EPOCH, True), [Release(EPOCH)], PAUSE),
    (TAKING_OVER, Renewed(True, ASKED_AT), NOT_ASKED, TAKING_OVER),
    (TAKING_OVER, EpochFenced(EPOCH), [Release(EPOCH)], PAUSE),
    (TAKING_OVER, EpochFenced(EPOCH - 1), [], TAKING_OVER),
    (TAKING_OVER, Lapsed(EPOCH), [], TAKING_OVER),
    (TAKING_OVER, Degraded(), [], TAKING_OVER),
    (TAKING_OVER, LockReleased(), [], TAKING_OVER),
    (TAKING_OVER, Resign(), [], TAKING_OVER),
    (LEADING, Ticked(), [], LEADING),
    (LEADING_DUE, Ticked(), [Renew(EPOCH)], Leading(EPOCH, UNTIL, NOW, renewing=True)),
    (LEADING, LOCKED, NOT_ASKED, LEADING),
    (LEADING, TookOver(EPOCH, True), NOT_ASKED, LEADING),
    (LEADING, Renewed(True, ASKED_AT), NOT_ASKED, LEADING),
    (LEADING, EpochFenced(EPOCH), [StepDown(EPOCH, OTHER), Release(EPOCH)], PAUSE),
    (LEADING, EpochFenced(EPOCH - 1), [], LEADING),
    (LEADING, Lapsed(EPOCH), [StepDown(EPOCH, AWAY), Release(EPOCH)], FOLLOWING_DUE),
    (LEADING, Lapsed(EPOCH - 1), [], LEADING),
    (LEADING, Degraded(), [StepDown(EPOCH, TOLD), Release(EPOCH)], Following(NOW + TTL_S + ASK_MAX_S)),
    (LEADING, LockReleased(), [], LEADING),
    (LEADING, Resign(), [StepDown(EPOCH, GOING), Release(EPOCH)], RESIGNED),
    (RENEWING, Ticked(), [], RENEWING),
    (RENEWING, LOCKED, NOT_ASKED, RENEWING),
    (RENEWING, TookOver(EPOCH, True), NOT_ASKED, RENEWING),
    (RENEWING, Renewed(True, NOW - 0.5), [], Leading(EPOCH, NOW - 0.5 + TTL_S - MARGIN_S, NOW - 0.5 + TTL_S / 3)),
    (RENEWING, Renewed(False, ASKED_AT), [StepDown(EPOCH, NOT_OURS)], PAUSE),
    (RENEWING, Renewed(None, ASKED_AT), [], Leading(EPOCH, UNTIL, NOW + MARGIN_S)),
    (RENEWING, EpochFenced(EPOCH), [StepDown(EPOCH, OTHER)], AWAITING),
    (RENEWING, EpochFenced(EPOCH + 1), [], RENEWING),
    (RENEWING, Lapsed(EPOCH), [StepDown(EPOCH, AWAY)], AWAITING),
    (RENEWING, Degraded(), [StepDown(EPOCH, TOLD)], AWAITING),
    (RENEWING, LockReleased(), [], RENEWING),
    (RENEWING, Resign(), [StepDown(EPOCH, GOING)], AWAITING),
    (OVER, Ticked(), [StepDown(EPOCH, NOT_RENEWED)], PAUSE),
    (OVER, EpochFenced(EPOCH), [StepDown(EPOCH, NOT_RENEWED)], PAUSE),
    (OVER, Lapsed(EPOCH), [StepDown(EPOCH, NOT_RENEWED)], PAUSE),
    (OVER, Resign(), [StepDown(EPOCH, NOT_RENEWED)], RESIGNED),
    (OVER_RENEWING, Ticked(), [StepDown(EPOCH, NOT_RENEWED)], AWAITING),
    (OVER_RENEWING, Renewed(True, ASKED_AT), [StepDown(EPOCH, NOT_RENEWED), Release(EPOCH)], PAUSE),
    (OVER_RENEWING, Renewed(False, ASKED_AT), [StepDown(EPOCH, NOT_RENEWED)], PAUSE),
    (OVER_RENEWING, Renewed(None, ASKED_AT), [StepDown(EPOCH, NOT_RENEWED), Release(EPOCH)], PAUSE),
    (AWAITING, Ticked(), [], AWAITING),
    (AWAITING, LOCKED, NOT_ASKED, AWAITING),
    (AWAITING, TookOver(EPOCH, True), NOT_ASKED, AWAITING),
    (AWAITING, Renewed(True, ASKED_AT), [Release(EPOCH)], PAUSE),
    (AWAITING, Renewed(False, ASKED_AT), [], PAUSE),
    (AWAITING, Renewed(None, ASKED_AT), [Release(EPOCH)], PAUSE),
    (AWAITING, EpochFenced(EPOCH), [], AWAITING),
    (AWAITING, Lapsed(EPOCH), [], AWAITING),
    (AWAITING, Degraded(), [], AWAITING),
    (AWAITING, LockReleased(), [], AWAITING),
    (AWAITING, Resign(), [], AWAITING),
    (RESIGNED, Ticked(), [], RESIGNED),
    (RESIGNED, LOCKED, NOT_ASKED, RESIGNED),
    (RESIGNED, TookOver(EPOCH, True), NOT_ASKED, RESIGNED),
    (RESIGNED, Renewed(True, ASKED_AT), NOT_ASKED, RESIGNED),
    (RESIGNED, EpochFenced(EPOCH), [], RESIGNED),
    (RESIGNED, Lapsed(EPOCH), [], RESIGNED),
    (RESIGNED, Degraded(), [], RESIGNED),
    (RESIGNED, LockReleased(), [], RESIGNED),
    (RESIGNED, Resign(), [], RESIGNED),
]


@pytest.mark.parametrize(("state", "event", "commands", "after"), TABLE, ids=lambda value: type(value).__name__)
def test_every_cell_of_the_table(state: State, event: Event, commands: list[Command] | type[Exception], after: State) -> None:
    term = term_in(state)

    if isinstance(commands, list):
        assert term.apply(event, NOW) == commands
    else:
        with pytest.raises(commands, match="no such question is out"):
            term.apply(event, NOW)

    assert term.state == after


def test_the_table_has_every_state_with_every_event() -> None:
    cells = {(type(state), type(event)) for state, event, _, _ in TABLE}

    assert cells == {(state, event) for state in State.__args__ for event in Event.__args__}


# ------------------------------------------------------------------------------------------------------ going down
@pytest.mark.parametrize(
    ("state", "answer", "commands"),
    [
        (ACQUIRING, LOCKED, [Release(EPOCH)]),
        (ACQUIRING, BUSY, []),
        (ACQUIRING, Acquired(None, ASKED_AT), []),
        (TAKING_OVER, TookOver(EPOCH, True), [Release(EPOCH)]),
        (TAKING_OVER, TookOver(EPOCH, None), [Release(EPOCH)]),
        (RENEWING, Renewed(True, ASKED_AT), [Release(EPOCH)]),
        (RENEWING, Renewed(False, ASKED_AT), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_resigned_with_a_question_out_gives_back_what_the_answer_brings(
    state: State, answer: Event, commands: list[Command]
) -> None:
    term = term_in(state)
    term.apply(Resign(), NOW)
    assert term.asking
    assert term.leads(NOW) == 0

    assert term.apply(answer, NOW) == commands

    assert term.state == RESIGNED
    assert not term.asking


# ------------------------------------------------------------------------------------------------------- the driver
@pytest.mark.parametrize(
    ("state", "asking"),
    [
        (FOLLOWING, False),
        (ACQUIRING, True),
        (TAKING_OVER, True),
        (LEADING, False),
        (RENEWING, True),
        (AWAITING, True),
        (RESIGNED, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_driver_is_told_whether_an_answer_is_out(state: State, asking: bool) -> None:
    assert term_in(state).asking is asking


def test_a_new_term_asks_at_once() -> None:
    assert Election("me").apply(Ticked(), 0.0) == [Acquire()]


def test_the_epoch_may_be_used_only_while_the_time_lasts() -> None:
    term = term_in(LEADING)

    assert [term.leads(now) for now in (NOW, UNTIL - 0.01, UNTIL, UNTIL + 1)] == [EPOCH, EPOCH, 0, 0]
    assert term_in(TAKING_OVER).leads(NOW) == 0


def test_time_counts_from_before_the_question_not_from_the_answer() -> None:
    term = term_in(ACQUIRING)

    term.apply(Acquired(Locked(EPOCH), NOW), NOW + 4)
    term.apply(TookOver(EPOCH, True), NOW + 5)

    assert term.state == Leading(EPOCH, NOW + TTL_S - MARGIN_S, NOW + TTL_S / 3)
    assert term.apply(Ticked(), NOW + 5) == [Renew(EPOCH)]


def test_renewals_that_fail_do_not_prolong_and_are_tried_again_calmly() -> None:
    term = term_in(LEADING)
    now, renewals = NOW, 0
    while term.leads(now):
        due_at = next_at(term.state)
        assert due_at is not None
        now = max(now, due_at)
        for command in term.apply(Ticked(), now):
            if isinstance(command, Renew):
                renewals += 1
                term.apply(Renewed(None, now), now)

    assert now == UNTIL
    assert term.state == Following(UNTIL + ASK_MAX_S)
    assert 5 <= renewals <= 7


def test_the_margin_is_a_tenth_of_a_short_ttl() -> None:
    assert [Election("me", ttl_s).margin_s for ttl_s in (1.0, 10.0, 60.0)] == [0.1, 1.0, 1.0]


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, LOCK_TTL_MAX_S + 1, float("nan")])
def test_a_ttl_that_cannot_work_is_refused(ttl_s: float) -> None:
    with pytest.raises(ConfigError):
        Election("me", ttl_s)


def test_another_ttl_is_asked_for_at_once_and_nobody_waits_for_the_end_of_a_longer_one() -> None:
    leader, follower = term_in(LEADING), term_in(ACQUIRING)
    follower.deference_s = 0.5
    follower.apply(Acquired(Busy("other", 40.0), ASKED_AT), NOW)
    for term in (leader, follower):
        term.set_ttl(3.0)

    assert leader.apply(Ticked(), NOW) == [Renew(EPOCH)]
    leader.apply(Renewed(True, NOW), NOW)
    assert leader.state == Leading(EPOCH, NOW + 3.0 - 0.3, renew_at=NOW + 1.0)
    assert follower.apply(Ticked(), NOW) == [Acquire()], "who leads may have another ttl by now"
    follower.apply(Acquired(Busy("other", 40.0), NOW), NOW)
    assert follower.state == Following(NOW + 3.5), "it may have one soon"


# ------------------------------------------------------------------------------------------------------- a world
class Fate:
    """The course of one question: when it is carried out, and what the asker hears of it, and when."""

    def __init__(self, carried_out_after_s: float | None, answered_after_s: float, lost: bool) -> None:
        self.carried_out_after_s = carried_out_after_s
        """None: never."""
        self.answered_after_s = answered_after_s
        self.lost = lost or carried_out_after_s is None or carried_out_after_s > answered_after_s
        """An error is heard instead of the answer. A question can be carried out after its error was heard."""

    def __repr__(self) -> str:
        return f"Fate({self.carried_out_after_s}, {self.answered_after_s}, {self.lost})"


KIND = Fate(0.0, 0.01, False)
TICK_LATE_S = 1e-6  # what is lost by turning one clock's time into another's


class Server:
    """A process with a clock of its own, that may stand still for a while and then sees all at once what it missed."""

    def __init__(self, world: World, name: str, rate: float, offset_s: float) -> None:
        self.world = world
        self.term = Election(name, TTL_S)
        self.rate = rate
        self.offset_s = offset_s
        self.frozen_until = 0.0
        self.questions = 0
        """The number of questions without an answer."""
        self.leading = 0

    def now(self) -> float:
        return self.world.now * self.rate + self.offset_s

    def apply(self, event: Event) -> None:
        if self.world.now < self.frozen_until:
            self.world.at(self.frozen_until, lambda: self.apply(event))
            return
        for command in self.term.apply(event, self.now()):
            self.carry_out(command)
        due_at = next_at(self.term.state)
        if due_at is not None:
            self.world.at((due_at - self.offset_s) / self.rate + TICK_LATE_S, self.tick)

    def tick(self) -> None:
        if self.world.now < self.frozen_until:
            self.world.at(self.frozen_until, self.tick)
        elif (due_at := next_at(self.term.state)) is not None and self.now() >= due_at:
            self.apply(Ticked())

    def carry_out(self, command: Command) -> None:
        coordination, name, asked_at = self.world.coordination, self.term.holder, self.now()
        match command:
            case Acquire():
                floor = self.world.epochs[-1]
                self.ask(lambda: coordination.acquire("leader", name, TTL_S, floor), lambda answer: Acquired(answer, asked_at))
            case TakeOver(epoch=epoch):
                self.ask(lambda: self.world.take_over(epoch), lambda answer: TookOver(epoch, answer))
            case Renew(epoch=epoch):
                self.ask(lambda: coordination.renew("leader", name, epoch, TTL_S), lambda answer: Renewed(answer, asked_at))
            case Release(epoch=epoch):
                coordination.release("leader", name, epoch)
            case Lead(epoch=epoch):
                assert not self.leading
                self.leading = epoch
                self.world.led.append(epoch)
                self.write()
            case StepDown(epoch=epoch):
                assert self.leading == epoch
                self.leading = 0

    def ask(self, question: Callable[[], Any], event: Callable[[Any], Event]) -> None:
        fate = self.world.next_fate()
        answers: list[Any] = []
        self.questions += 1

        def answer() -> None:
            self.questions -= 1
            self.apply(event(None if fate.lost else answers[0]))

        if fate.carried_out_after_s is not None:
            self.world.at(self.world.now + fate.carried_out_after_s, lambda: answers.append(question()), trouble=True)
        self.world.at(self.world.now + fate.answered_after_s, answer, trouble=True)

    def write(self) -> None:
        """A leader's write, sent four times a second; it may lie on the way for long."""
        if self.world.now < self.frozen_until:
            self.world.at(self.frozen_until, self.write)
        elif epoch := self.leading:
            self.world.at(self.world.now + self.world.next_delay_s(), lambda: self.world.write(self, epoch), trouble=True)
            self.world.at(self.world.now + 0.25, self.write)


class World:
    """Servers, a coordination, the epoch of a store, and the time. What is to happen stands in a queue."""

    def __init__(self, drifts: Sequence[float], fates: Sequence[Fate], delays_s: Sequence[float]) -> None:
        self.now = 0.0
        self.kind = False
        self.trouble_until = 0.0
        """The time at which all that went wrong so far is over."""
        self.coordination = MemoryCoordination(lambda: self.now)
        self.epochs = [0]
        """All that were registered, in order."""
        self.written: list[int] = []
        """The epochs of all writes that the store took."""
        self.led: list[int] = []
        self._exclusive = max(abs(drift) for drift in drifts) < MARGIN_S / TTL_S
        self._fates, self._delays_s = cycle(fates), cycle(delays_s)
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self.servers = [Server(self, f"s{n}", 1 + drift, 100.0 * n) for n, drift in enumerate(drifts)]
        for server in self.servers:
            self.at(100.0, server.tick)

    def at(self, moment: float, action: Callable[[], object], *, trouble: bool = False) -> None:
        heapq.heappush(self._queue, (max(moment, self.now), next(self._order), action))
        if trouble and not self.kind:
            self.trouble_until = max(self.trouble_until, moment)

    def freeze(self, server: Server, seconds: float) -> None:
        server.frozen_until = self.now + seconds
        self.trouble_until = max(self.trouble_until, server.frozen_until)

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            self.check()
        self.now = max(self.now, until)

    def next_fate(self) -> Fate:
        return KIND if self.kind else next(self._fates)

    def next_delay_s(self) -> float:
        return 0.01 if self.kind else next(self._delays_s)

    def take_over(self, epoch: int) -> bool:
        if epoch <= self.epochs[-1]:
            return False
        self.epochs.append(epoch)
        return True

    def write(self, server: Server, epoch: int) -> None:
        if epoch == self.epochs[-1]:
            self.written.append(epoch)
        else:
            server.apply(EpochFenced(epoch))

    def leaders(self) -> list[Server]:
        return [server for server in self.servers if server.term.leads(server.now())]

    def check(self) -> None:
        assert all(server.questions <= 1 for server in self.servers), "two questions of one server are out"
        if self._exclusive:
            assert len(self.leaders()) <= 1, "two believe that they lead, though no clock drifts by more than the margin"

    def check_history(self) -> None:
        assert self.epochs == sorted(set(self.epochs)), "epochs strictly rise"
        assert self.written == sorted(self.written), "a write of an older epoch was taken after one of a newer"
        assert len(self.led) == len(set(self.led)), "an epoch was led twice"
        if self._exclusive:  # a server with a slow clock may believe late in what it won long ago; the store does not
            assert self.led == sorted(self.led), "an epoch was led after a newer one"


delays_s = st.one_of(st.floats(0.0, 0.3), st.floats(0.0, 3 * TTL_S))
fates = st.one_of(
    st.just(KIND),
    st.just(Fate(None, 0.05, True)),
    st.builds(lambda late_s: Fate(0.0, late_s, False), st.floats(0.0, TTL_S)),
    st.builds(Fate, st.one_of(st.none(), delays_s), delays_s, st.booleans()),
)
troubles = st.lists(st.tuples(st.floats(0.1, 2 * TTL_S), st.integers(0, 3), st.floats(0.0, 3 * TTL_S)), max_size=6)
"""(how long until the next, which server stands still, for how long)"""


def worlds(drifts: st.SearchStrategy[float]) -> st.SearchStrategy[World]:
    some = st.lists(drifts, min_size=2, max_size=4)
    return st.builds(World, some, st.lists(fates, min_size=1, max_size=30), st.lists(delays_s, min_size=1, max_size=10))


def live_through(world: World, troubles: list[tuple[float, int, float]]) -> None:
    """Let the world be unkind, then kind until all that went wrong is over."""
    world.run(100.0)
    for duration_s, which, frozen_s in troubles:
        world.freeze(world.servers[which % len(world.servers)], frozen_s)
        world.run(world.now + duration_s)
    world.kind = True
    world.run(world.trouble_until)


@settings(max_examples=100)
@given(worlds(st.floats(-0.09, 0.09)), troubles)
def test_one_leads_at_a_time_and_soon_after_all_trouble_one_leads_for_good(
    world: World, troubles: list[tuple[float, int, float]]
) -> None:
    live_through(world, troubles)

    world.run(world.now + TTL_S + 1)
    first = world.leaders()
    writes = len(world.written)
    world.run(world.now + 2 * TTL_S)

    assert len(first) == 1
    assert world.leaders() == first
    assert len(world.written) > writes
    world.check_history()


@settings(max_examples=100)
@given(worlds(st.floats(-0.7, 2.0)), troubles)
def test_whatever_the_clocks_do_the_store_takes_no_write_of_an_older_epoch(
    world: World, troubles: list[tuple[float, int, float]]
) -> None:
    live_through(world, troubles)

    world.run(world.now + 2 * TTL_S)

    world.check_history()


def test_when_the_leader_dies_another_one_leads_within_the_ttl_and_a_second() -> None:
    world = World([0.0, 0.0, 0.0], [KIND], [0.01])
    live_through(world, [])
    world.run(world.now + 12.3)
    [dead] = world.leaders()
    world.freeze(dead, 1_000.0)

    world.run(world.now + TTL_S + 1)

    assert [leader is dead for leader in world.leaders()] == [False]
    assert len(world.epochs) == 3


def test_a_leader_that_wakes_up_long_after_steps_down_and_its_writes_are_refused() -> None:
    world = World([0.0, 0.0], [KIND], [0.01])
    live_through(world, [])
    world.run(world.now + 5)
    [frozen] = world.leaders()
    world.freeze(frozen, 3 * TTL_S)

    world.run(world.now + 4 * TTL_S)

    assert not frozen.leading
    assert len(world.leaders()) == 1
    world.check_history()


def test_a_leader_that_resigns_is_followed_within_a_second() -> None:
    world = World([0.0, 0.0], [KIND], [0.01])
    live_through(world, [])
    world.run(world.now + 5)
    [first] = world.leaders()

    first.apply(Resign())
    world.run(world.now + ASK_MAX_S + 0.1)

    assert [leader is first for leader in world.leaders()] == [False]


def test_a_server_that_lets_others_stand_first_asks_after_the_end_of_the_lock_that_it_knows_of() -> None:
    term = term_in(ACQUIRING)
    term.deference_s = 1.5

    term.apply(Acquired(Busy("other", 4.0), ASKED_AT), NOW)
    assert term.state == Following(NOW + 5.5)

    term.apply(LockReleased(), NOW + 1)
    assert term.state == Following(NOW + 2.5, defers=True)


def test_a_server_whose_question_is_due_lets_others_ask_first_when_the_lock_is_released_but_not_again_and_again() -> None:
    term = term_in(FOLLOWING_DUE)
    term.deference_s = 1.5

    term.apply(LockReleased(), NOW)
    assert term.state == Following(NOW + 1.5, defers=True)

    term.apply(LockReleased(), NOW + 1)
    assert term.apply(Ticked(), NOW + 1.5) == [Acquire()]
