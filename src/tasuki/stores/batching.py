"""Group commit: one Turn is one transaction on one store thread, whatever the number of jobs in it.

`execute` is the whole meaning of a Turn and has no thread in it; the simulator calls it too. `execute_surely` does it again when
what interrupted it passes (`retrying.py`). `StoreThread` owns the store: it opens it, runs turns, and gives the answers to a
callback. There is one hop to the thread and one back for each turn.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tasuki.core.store_messages import Answers, Turn
from tasuki.errors import TasukiError, TurnInterrupted, Unavailable
from tasuki.stores.retrying import Retries
from tasuki.stores.store import Feature, Store

logger = logging.getLogger("tasuki.store")
PRUNE_BATCH = 256  # jobs deleted per turn: small, so that pruning never stalls the hot path

T = TypeVar("T")

_NEWS = ("start", "routes")
_PROMISED = tuple(name for name in Turn.__struct_fields__ if name not in _NEWS)

Pause = Callable[[float], bool]
"""Waits that many seconds; False if it was woken because there is no point in waiting on."""


def execute(store: Store, turn: Turn) -> Answers:
    """Do everything in the turn, in one transaction. The order is Turn's promise."""
    answers = Answers()
    with store.turn():
        _fill(answers, store, turn)
    return answers


def is_lasting(turn: Turn) -> bool:
    """Whether it must outlive a power cut. A start alone need not: the lease was durable before, the worker shows it again when
    it is back, and its finish carries the time. So a short command waits for the disk once less."""
    return not turn.start or any(getattr(turn, name) for name in _PROMISED)


def execute_surely(store: Store, turn: Turn, pause: Pause) -> Answers:
    """The same, again and again while it is interrupted by what passes: a restart of the database, a deadlock.

    A turn whose commit was interrupted is not done again before it is known that it was not stored: if it was, the answers that
    were computed in it are the answers. `pause` waits, and says whether to go on.
    """
    retries = Retries(time.monotonic(), random.random)
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
                _fill(answers, store, turn)
            return answers
        except TurnInterrupted as error:
            was_stored = error.was_stored or was_stored
            wait_s = retries.wait_s(error.why, time.monotonic())
            if wait_s is None or not pause(wait_s):
                raise
            logger.info("a turn is tried again: %s", error.message)


def _fill(answers: Answers, store: Store, turn: Turn) -> None:
    fill_turn: Callable[[Answers, Turn], None] | None = getattr(store, "fill_turn", None)
    if fill_turn is not None:  # a store may do a whole turn in one call, with the meaning of what follows
        fill_turn(answers, turn)
        return
    if turn.finish:
        answers.finish = store.finish(turn.finish)
    if turn.fail:
        answers.fail = store.fail(turn.fail)
    if turn.start:
        answers.start = store.start(turn.start)
    if turn.renew:
        answers.renew = store.renew(turn.renew)
    if turn.release:
        answers.release = store.release(turn.release)
    if turn.cancel:
        answers.cancel = _by_order(store.cancel, turn.cancel, ("actor", "reason"))
    if turn.requeue:
        answers.requeue = _by_order(store.requeue, turn.requeue, ("actor", "reason", "generation"))
    if turn.take_over:
        answers.took_over = store.take_over(turn.take_over, turn.epoch)
    if turn.reap:
        answers.reap = store.reap(epoch=turn.epoch, limit=turn.reap)
    if turn.skip:
        answers.skip = store.skip(epoch=turn.epoch, limit=turn.skip)
    if turn.promote:
        answers.promote = store.promote(epoch=turn.epoch, limit=turn.promote)
    if turn.prune_after_s is not None:
        before = store.clock.wall() - turn.prune_after_s
        answers.prune = store.prune(before=before, epoch=turn.epoch, limit=PRUNE_BATCH)
    if turn.condemn is not None:
        answers.condemn = store.condemn_blobs(turn.condemn.order(store.clock.wall()), epoch=turn.epoch)
    if turn.forget_blobs:
        store.forget_blobs(turn.forget_blobs, epoch=turn.epoch)
    if turn.place_blobs:
        answers.place_blobs = store.place_blobs(turn.place_blobs)
    if turn.blobs_stored:
        answers.blobs_stored = store.blobs_stored(turn.blobs_stored)
    if turn.add_token:
        answers.add_token = [store.add_token(token) for token in turn.add_token]
    if turn.revoke_token:
        answers.revoke_token = [store.revoke_token(token_id, actor=who) for token_id, who in turn.revoke_token]
    if turn.submit:
        answers.submit = store.submit(turn.submit)
    if turn.rerun:
        answers.rerun = store.submit(turn.rerun, on_failed="rerun")
    if turn.lease:
        answers.lease = store.lease(turn.lease)
    if turn.held:
        answers.held = store.held(turn.held)
    if turn.get:
        answers.get = store.get(turn.get)
    if turn.token:
        answers.token = [store.token(sha256) for sha256 in turn.token]
    if turn.list_tokens:
        answers.list_tokens = store.tokens()


def _by_order(verb: Callable[..., Sequence[T]], orders: Sequence[tuple[Any, ...]], names: tuple[str, ...]) -> list[T]:
    """One call for all jobs of which the same is said, after the job_id, under these names; the answers in the orders' order."""
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, order in enumerate(orders):
        places.setdefault(order[1:], []).append(place)
    answers: dict[int, T] = {}
    for said, named in places.items():
        told = dict(zip(names, said, strict=True))
        answers.update(zip(named, verb([orders[place][0] for place in named], **told), strict=True))
    return [answers[place] for place in range(len(orders))]


class StoreThread:
    """Runs turns one after the other. `deliver` is called on this thread: it must only hand over (call_soon_threadsafe)."""

    def __init__(self, open_store: Callable[[], Store], deliver: Callable[[Turn, Answers | TasukiError], None]) -> None:
        self._open = open_store
        self._deliver = deliver
        self._turns: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tasuki-store", daemon=True)

    def open(self, holder: str) -> int:
        """Open the store. Returns the epoch if nobody but us can lead it, else 0. Errors of the opening are raised here."""
        self._holder = holder
        self._thread.start()
        answer = self._opened.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def submit(self, turn: Turn) -> None:
        """Have a turn executed after those before it."""
        self._turns.put(turn)

    def hurry(self) -> None:
        """From now on no turn waits for a database that is away."""
        self._closing.set()

    def close(self) -> None:
        """Finish what was submitted, close the store, end the thread. A turn that waits for its database is not waited for."""
        self.hurry()
        self._turns.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            store = self._open()
            epoch = 0 if Feature.SHARED in store.features else self._lead(store)
        except BaseException as error:  # noqa: BLE001 - raised again where `open` waits
            self._opened.put(error)
            return
        self._opened.put(epoch)
        try:
            while (turn := self._turns.get()) is not None:
                self._deliver(turn, self._attempt(store, turn))
        finally:
            store.close()

    def _lead(self, store: Store) -> int:
        """A store that nobody else can open: its user is its leader."""
        epoch = store.epoch()[0] + 1
        store.take_over(self._holder, epoch)
        return epoch

    def _attempt(self, store: Store, turn: Turn) -> Answers | TasukiError:
        try:
            return execute_surely(store, turn, lambda wait_s: not self._closing.wait(wait_s))
        except TasukiError as error:
            return error
        except Exception as error:  # a defect of ours must not end the store's thread: all waiting peers are told
            logger.exception("a turn failed")
            return Unavailable(f"the store failed: {type(error).__name__}: {error}")
