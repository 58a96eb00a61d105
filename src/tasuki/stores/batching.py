"""Group commit: one Turn is one transaction on one store thread, whatever the number of jobs in it.

`execute` is the whole meaning of a Turn and has no thread in it; the simulator calls it too. `execute_surely` repeats a turn that
was interrupted by a passing problem (`Retries`). `StoreThread` owns the store: it opens it, runs turns, and gives the answers to
a callback. There is one hop to the thread and one back for each turn.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from operator import attrgetter

from tasuki.core.store_messages import VERBS, Answers, Turn
from tasuki.errors import TasukiError, TurnInterrupted, Unavailable
from tasuki.stores.common import Retries
from tasuki.stores.store import Feature, Store

logger = logging.getLogger("tasuki.store")
REAP_WITHIN_S = 2.0  # a leader tries for LEADER_RETRY_S; with LAPSE_SHARE of a lease before it, renewed leases are not over yet

_fields = attrgetter(*(verb.name for verb in VERBS))
_LASTING = tuple(verb.name for verb in VERBS if verb.lasting)

Pause = Callable[[float], bool]
"""Waits that many seconds; returns False if the wait was ended early because the turn must not be tried again."""


def execute(store: Store, turn: Turn) -> Answers:
    """Run all verbs of the turn, in the order of `VERBS`, in one transaction."""
    answers = Answers()
    with store.turn():
        _fill(answers, store, turn)
    return answers


def is_lasting(turn: Turn) -> bool:
    """Return whether the turn must survive a power cut: not if it has only starts (see `VERBS`)."""
    return not turn.start or any(getattr(turn, name) for name in _LASTING)


def execute_surely(store: Store, turn: Turn, pause: Pause) -> Answers:
    """Execute a turn, and repeat it while passing problems interrupt it: a restart of the database, a deadlock.

    A turn whose commit was interrupted is not repeated before it is known that it was not stored: if it was, the answers that
    were computed in it are the answers. `pause` waits between tries, and says whether to continue.
    """
    began = time.monotonic()
    retries: Retries | None = None
    answers = Answers()
    was_stored: Callable[[], bool] | None = None
    while True:
        try:
            if was_stored is not None:
                if was_stored():
                    return answers
                was_stored = None
            answers = Answers()
            with store.turn(lasting=is_lasting(turn)):
                _check_reaping(turn, time.monotonic() - began)
                _fill(answers, store, turn)
            return answers
        except TurnInterrupted as error:
            was_stored = error.was_stored or was_stored
            level = logging.INFO if retries is None else logging.DEBUG  # one line for each turn of an outage, not for each try
            retries = retries or Retries(began, random.random, leads=bool(turn.epoch))
            wait_s = retries.wait_s(error.why, time.monotonic())
            if wait_s is None or not pause(wait_s):
                raise
            logger.log(level, "a turn is tried again: %s", error.message)


def _check_reaping(turn: Turn, waited_s: float) -> None:
    """Raise Unavailable for a turn that was to end leases and has waited for the store: nobody could renew them meanwhile. The
    network, or a database that stood still, may have held it up and carried it out after all."""
    if turn.reap and waited_s > REAP_WITHIN_S:
        raise Unavailable(f"the store took the turn after {waited_s:.1f} s, too late to end leases in it; nothing was stored")


def _fill(answers: Answers, store: Store, turn: Turn) -> None:
    fill_turn: Callable[[Answers, Turn], None] | None = getattr(store, "fill_turn", None)
    if fill_turn is not None:  # a store may run a whole turn in one call, with the same meaning
        fill_turn(answers, turn)
        return
    for verb, asked in zip(VERBS, _fields(turn), strict=True):
        if asked:
            setattr(answers, verb.name, verb.call(getattr(store, verb.method or verb.name), asked, turn.epoch, store.clock.wall))
    answers.notes = store.notes()


class StoreThread:
    """Runs turns one after the other. `deliver` is called on this thread: it must only hand over (call_soon_threadsafe)."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        deliver: Callable[[Turn, Answers | TasukiError], None],
        rests_after_s: float | None = None,
    ) -> None:
        """With `rests_after_s` the store closes its connection when nothing was asked for so long. Then turns that ask nothing,
        as those of idle workers' heartbeats, are answered without it."""
        self._open = open_store
        self._deliver = deliver
        self._rests_after_s = rests_after_s
        self._turns: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._closing = threading.Event()
        self.fires = False
        """True if the store has definitions; known once it is open."""
        self._thread = threading.Thread(target=self._run, name="tasuki-store", daemon=True)

    def open(self, holder: str) -> int:
        """Open the store; return the epoch if only its opener can lead it, else 0. Errors of the opening are raised here."""
        self._holder = holder
        self._thread.start()
        answer = self._opened.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def submit(self, turn: Turn) -> None:
        """Queue a turn behind those submitted before."""
        self._turns.put(turn)

    def hurry(self) -> None:
        """Let no turn wait any longer for a database that is away."""
        self._closing.set()

    def close(self) -> None:
        """Run the queued turns, close the store, end the thread. A turn does not wait for a database that is away."""
        self.hurry()
        self._turns.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            store = self._open()
            self.fires = Feature.DEFINITIONS in store.features
            epoch = 0
            if Feature.SHARED not in store.features:  # its only user leads it
                epoch = store.epoch()[0] + 1
                store.take_over(self._holder, epoch)
        except BaseException as error:  # noqa: BLE001 - raised again where `open` waits
            self._opened.put(error)
            return
        self._opened.put(epoch)
        try:
            self._serve(store)
        finally:
            store.close()

    def _serve(self, store: Store) -> None:
        rest: Callable[[], None] | None = getattr(store, "rest", None) if self._rests_after_s is not None else None
        rests, rest_at = False, time.monotonic() + (self._rests_after_s or 0.0)
        while True:
            try:
                turn = self._turns.get(timeout=None if rest is None or rests else max(0.0, rest_at - time.monotonic()))
            except queue.Empty:
                assert rest is not None
                rest()
                rests = True
                continue
            if turn is None:
                return
            if rest is not None and not any(_fields(turn)):
                self._deliver(turn, Answers() if rests else self._attempt(store, turn))
                continue
            rests = False
            self._deliver(turn, self._attempt(store, turn))
            rest_at = time.monotonic() + (self._rests_after_s or 0.0)

    def _attempt(self, store: Store, turn: Turn) -> Answers | TasukiError:
        try:
            return execute_surely(store, turn, lambda wait_s: not self._closing.wait(wait_s))
        except TasukiError as error:
            return error
        except Exception as error:  # a defect of ours must not end the store's thread: all waiting peers are told
            logger.exception("a turn failed")
            return Unavailable(f"the store failed: {type(error).__name__}: {error}")
