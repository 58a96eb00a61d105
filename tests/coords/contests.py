"""Many who want the leader's lock at once, over whatever real server keeps it."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tasuki.coords.coordination import Coordination
from tasuki.core.election import Busy, Locked
from tests.support.waiting import until

TTL_S = 10.0
SERVERS = 8
ROUNDS = 12


def acquire_together(coordinations: Sequence[Coordination], floor: int) -> list[Locked | Busy]:
    together = threading.Barrier(len(coordinations))

    def acquire(number: int) -> Locked | Busy:
        coordinations[number].detached()  # connected before the race begins
        together.wait()
        return coordinations[number].acquire("leader", f"server-{number}", TTL_S, floor)

    with ThreadPoolExecutor(len(coordinations)) as pool:
        return list(pool.map(acquire, range(len(coordinations))))


def one_of_many_gets_it(open_one: Callable[[], Coordination]) -> None:
    answers = acquire_together([open_one() for _ in range(SERVERS)], floor=4)

    assert sorted(type(answer).__name__ for answer in answers) == ["Busy"] * (SERVERS - 1) + ["Locked"]
    assert Locked(5) in answers


def never_two_hold_it_and_epochs_strictly_rise(open_one: Callable[[], Coordination]) -> None:
    inside = threading.Lock()
    epochs: list[int] = []

    def take_turns(number: int) -> int:
        coordination, won = open_one(), 0
        while won < ROUNDS:
            answer = coordination.acquire("leader", f"server-{number}", TTL_S, 0)
            if isinstance(answer, Locked):
                assert inside.acquire(blocking=False), f"epoch {answer.epoch} was given while another one was held"
                epochs.append(answer.epoch)
                won += 1
                inside.release()
                assert coordination.release("leader", f"server-{number}", answer.epoch)
        return won

    with ThreadPoolExecutor(SERVERS) as pool:
        assert list(pool.map(take_turns, range(SERVERS))) == [ROUNDS] * SERVERS

    assert epochs == list(range(1, SERVERS * ROUNDS + 1))


def it_ends_by_itself(open_one: Callable[[], Coordination]) -> None:
    one, two = open_one(), open_one()
    two.detached()
    begun_at = time.monotonic()
    one.acquire("leader", "one", 0.5, 0)

    until(lambda: two.acquire("leader", "two", TTL_S, 0) == Locked(2), what="the lock is over")

    assert time.monotonic() - begun_at >= 0.5
    assert not one.renew("leader", "one", 1, TTL_S)
