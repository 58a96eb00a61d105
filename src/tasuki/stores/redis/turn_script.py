"""A whole Turn as the calls of one script, and its answers. Pure but for the clock and the random bytes that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from tasuki.core.store_messages import Answers, Turn
from tasuki.stores.batching import PRUNE_BATCH
from tasuki.stores.redis import verbs
from tasuki.stores.redis.codec import Reply
from tasuki.stores.redis.verbs import Random, ScriptCall
from tasuki.stores.store import Clock
from tasuki.stores.texts import storable

Calls = list[tuple[str, ScriptCall[Any]]]
"""In order; the name is that of the field of Answers. Names in `_ONE_BY_ONE` come once for each answer."""

_ONE_BY_ONE = frozenset({"add_token", "revoke_token"})


def calls_of(turn: Turn, clock: Clock, random: Random, own_subject: str) -> Calls:
    """The order is Turn's promise."""
    return [*_reports(turn), *_duties(turn, clock), *_rest(turn, random, own_subject)]


def _reports(turn: Turn) -> Calls:
    calls: Calls = []
    if turn.finish:
        calls.append(("finish", verbs.report("finish", turn.finish)))
    if turn.fail:
        calls.append(("fail", verbs.report("fail", turn.fail)))
    if turn.start:
        calls.append(("start", verbs.start(turn.start)))
    if turn.renew:
        calls.append(("renew", verbs.renew(turn.renew)))
    if turn.release:
        calls.append(("release", verbs.release(turn.release, "")))
    if turn.cancel:
        calls.append(("cancel", verbs.cancel(turn.cancel)))
    if turn.requeue:
        calls.append(("requeue", verbs.requeue(turn.requeue)))
    return calls


def _duties(turn: Turn, clock: Clock) -> Calls:
    calls: Calls = []
    if turn.take_over:
        calls.append(("took_over", verbs.take_over(turn.take_over, turn.epoch)))
    if turn.reap:
        calls.append(("reap", verbs.reap(turn.epoch, turn.reap)))
    if turn.skip:
        calls.append(("skip", verbs.skip(turn.epoch, turn.skip)))
    if turn.promote:
        calls.append(("promote", verbs.promote(turn.epoch, turn.promote)))
    if turn.prune_after_s is not None:
        calls.append(("prune", verbs.prune(clock.wall() - turn.prune_after_s, turn.epoch, PRUNE_BATCH)))
    if turn.condemn is not None:
        calls.append(("condemn", verbs.condemn_blobs(turn.condemn.order(clock.wall()), turn.epoch)))
    if turn.forget_blobs:
        calls.append(("", verbs.forget_blobs(turn.forget_blobs, turn.epoch)))
    return calls


def _rest(turn: Turn, random: Random, own_subject: str) -> Calls:
    calls: Calls = []
    if turn.place_blobs:
        calls.append(("place_blobs", verbs.place_blobs(turn.place_blobs)))
    if turn.blobs_stored:
        calls.append(("blobs_stored", verbs.blobs_stored(turn.blobs_stored)))
    for token in turn.add_token:
        calls.append(("add_token", verbs.add_token(replace(token, label=storable(token.label)))))
    for token_id, actor in turn.revoke_token:
        calls.append(("revoke_token", verbs.revoke_token(token_id, actor)))
    if turn.submit:
        calls.append(("submit", verbs.submit(turn.submit, "return", own_subject)))
    if turn.rerun:
        calls.append(("rerun", verbs.submit(turn.rerun, "rerun", own_subject)))
    if turn.lease:
        calls.append(("lease", verbs.lease(turn.lease, random)))
    if turn.held:
        calls.append(("held", verbs.held(turn.held)))
    if turn.get:
        calls.append(("get", verbs.get(turn.get)))
    if turn.token:
        calls.append(("token", verbs.token(turn.token)))
    if turn.list_tokens:
        calls.append(("list_tokens", verbs.tokens()))
    return calls


def fill(answers: Answers, calls: Calls, replies: Sequence[Reply]) -> None:
    for (name, call), reply in zip(calls, replies, strict=True):
        answer = call.decode(reply)
        if name in _ONE_BY_ONE:
            setattr(answers, name, [*getattr(answers, name), answer])
        elif name:
            setattr(answers, name, answer)
