"""Build the script calls of a whole Turn and fill its answers from their replies. Pure but for the clock and random bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from tasuki.core.store_messages import VERBS, Answers, Turn
from tasuki.stores.common import storable
from tasuki.stores.redis import verbs
from tasuki.stores.redis.codec import Reply
from tasuki.stores.redis.verbs import Random, ScriptCall
from tasuki.stores.store import Clock

Calls = list[tuple[str, ScriptCall[Any]]]
"""(verb, call) in the order of `VERBS`; a verb of `_ONE_BY_ONE` has one call for each of its items."""


class _Settings(NamedTuple):
    """Values that calls need beside what the turn asks."""

    epoch: int
    clock: Clock
    random: Random
    own_subject: str


_CALLS: dict[str, Callable[[Any, _Settings], ScriptCall[Any]]] = {
    "finish": lambda reports, _: verbs.report("finish", reports),
    "fail": lambda reports, _: verbs.report("fail", reports),
    "start": lambda claims, _: verbs.start(claims),
    "renew": lambda claims, _: verbs.renew(claims),
    "release": lambda claims, _: verbs.release(claims, ""),
    "cancel": lambda orders, _: verbs.cancel(orders),
    "requeue": lambda orders, _: verbs.requeue(orders),
    "take_over": lambda holder, settings: verbs.take_over(holder, settings.epoch),
    "reap": lambda limit, settings: verbs.reap(settings.epoch, limit),
    "skip": lambda limit, settings: verbs.skip(settings.epoch, limit),
    "promote": lambda limit, settings: verbs.promote(settings.epoch, limit),
    "prune": lambda kept, settings: verbs.prune(settings.clock.wall() - kept.age_s, settings.epoch, kept.limit),
    "condemn_blobs": lambda ages, settings: verbs.condemn_blobs(ages.order(settings.clock.wall()), settings.epoch),
    "forget_blobs": lambda places, settings: verbs.forget_blobs(places, settings.epoch),
    "place_blobs": lambda claims, _: verbs.place_blobs(claims),
    "blobs_stored": lambda places, _: verbs.blobs_stored(places),
    "add_token": lambda token, _: verbs.add_token(replace(token, label=storable(token.label))),
    "revoke_token": lambda item, _: verbs.revoke_token(*item),
    "submit": lambda submissions, settings: verbs.submit(submissions, "return", settings.own_subject),
    "rerun": lambda submissions, settings: verbs.submit(submissions, "rerun", settings.own_subject),
    "lease": lambda requests, settings: verbs.lease(requests, settings.random),
    "held": lambda holders, _: verbs.held(holders),
    "get": lambda job_ids, _: verbs.get(job_ids),
    "token": lambda sha256s, _: verbs.token(sha256s),
    "tokens": lambda _none, _: verbs.tokens(),
}

_ONE_BY_ONE = frozenset({"add_token", "revoke_token", "tokens"})


def calls_of(turn: Turn, clock: Clock, random: Random, own_subject: str) -> Calls:
    settings = _Settings(turn.epoch, clock, random, own_subject)
    calls: Calls = []
    for verb in VERBS:
        if asked := getattr(turn, verb.name):
            build = _CALLS[verb.name]
            parts = asked if verb.name in _ONE_BY_ONE else (asked,)
            calls += [(verb.name, build(part, settings)) for part in parts]
    return calls


def fill(answers: Answers, calls: Calls, replies: Sequence[Reply]) -> None:
    """Decode the replies into the fields of `answers` that their verbs name."""
    for (name, call), reply in zip(calls, replies, strict=True):
        answer = call.decode(reply)
        if name in _ONE_BY_ONE:
            setattr(answers, name, [*getattr(answers, name), answer])
        else:
            setattr(answers, name, answer)
