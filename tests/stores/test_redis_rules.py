"""Lua decides as core.lifecycle does, where it must: both are asked the same questions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasuki.core.job import JobSpec, Outcome, State
from tasuki.core.lifecycle import TRANSITIONS, JobEvent, after_failure, after_loss, is_late, skip_outcome, sources
from tasuki.core.subject import matches
from tasuki.stores.common import FairTurns
from tasuki.stores.redis.scripts import rules_script, script
from tasuki.stores.sql.lease import region_of
from tests.support.redis_service import RedisService

HELD = st.sampled_from(sorted(sources(JobEvent.RETRY)))
LEASED = st.sampled_from(sorted(sources(JobEvent.LOSE)))
COUNTS = st.integers(0, 70)
BACKOFFS = st.sampled_from([0.0, 0.1, 1.0, 10.0, 12.345678, 299.0, 1e6])
TEXTS = st.sampled_from(["it broke", "50 % %s %d", "四", ""])

VERDICT = """
local job = { failures = ARGV[2], losses = ARGV[3], cancel_requested = ARGV[4] == '1' and '1' or nil }
job.keep = ARGV[9] == '1' or nil
local facts = { max_retries = ARGV[5], max_losses = ARGV[5], backoff_s = ARGV[6] }
facts.delay_first_loss = ARGV[7] == 'loss' and ARGV[10] == '1' and '1' or nil
local verdict
if ARGV[7] == 'loss' then
  verdict = rules.after_loss(ARGV[1], job, facts, ARGV[8])
else
  verdict = rules.after_failure(ARGV[1], job, facts, ARGV[8], ARGV[9] == '1', ARGV[10], tonumber(ARGV[11]))
end
return { verdict.event, verdict.state, string.format('%.17g', verdict.delay_s), verdict.failures, verdict.losses, verdict.reason }
"""


class Asked:
    """Lua's rules, asked in a real Redis."""

    def __init__(self, service: RedisService) -> None:
        self._client: Any = service.client()

    def __call__(self, body: str, *arguments: object) -> Any:
        return self._client.eval(rules_script(body), 0, *map(str, arguments))


@pytest.fixture(scope="module")
def lua(redis_service: RedisService) -> Asked:
    return Asked(redis_service)


@given(
    state=HELD,
    failures=COUNTS,
    losses=COUNTS,
    cancel_requested=st.booleans(),
    max_retries=COUNTS,
    backoff_s=BACKOFFS,
    error_code=st.sampled_from(["EXIT_CODE", "CANCELED", "TIMED_OUT"]),
    permanent=st.booleans(),
    message=TEXTS,
    retry_in_s=st.sampled_from([None, 0.0, 12.5, 86_400.0]),
)
@settings(max_examples=150)
def test_the_verdict_on_a_failure_is_the_same(
    lua: Asked,
    state: State,
    failures: int,
    losses: int,
    cancel_requested: bool,
    max_retries: int,
    backoff_s: float,
    error_code: str,
    permanent: bool,
    message: str,
    retry_in_s: float | None,
) -> None:
    outcome = Outcome(error_code=error_code, message=message, permanent=permanent, retry_in_s=retry_in_s)
    wanted = after_failure(
        state,
        outcome,
        cancel_requested=cancel_requested,
        failures=failures,
        losses=losses,
        max_retries=max_retries,
        backoff_s=backoff_s,
    )

    what = message or error_code
    answer = lua(
        VERDICT,
        *(
            state,
            failures,
            losses,
            int(cancel_requested),
            max_retries,
            repr(backoff_s),
            "failure",
            error_code,
            int(permanent),
            what,
            "" if retry_in_s is None else repr(retry_in_s),
        ),
    )

    event, target, delay_s, *counters, reason = answer
    assert (event, target, float(delay_s), reason) == (wanted.event, wanted.state, wanted.delay_s, wanted.reason)
    assert counters == [wanted.failures, wanted.losses]


@given(
    state=LEASED,
    failures=COUNTS,
    losses=COUNTS,
    cancel_requested=st.booleans(),
    max_losses=COUNTS,
    backoff_s=BACKOFFS,
    keep=st.booleans(),
    delay_first=st.booleans(),
)
@settings(max_examples=150)
def test_the_verdict_on_a_loss_is_the_same(
    lua: Asked,
    state: State,
    failures: int,
    losses: int,
    cancel_requested: bool,
    max_losses: int,
    backoff_s: float,
    keep: bool,
    delay_first: bool,
) -> None:
    wanted = after_loss(
        state,
        cancel_requested=cancel_requested,
        keep=keep,
        failures=failures,
        losses=losses,
        max_losses=max_losses,
        backoff_s=backoff_s,
        worker_id="w %1",
        delay_first=delay_first,
    )

    counted = (state, failures, losses, int(cancel_requested), max_losses, repr(backoff_s))
    answer = lua(VERDICT, *counted, "loss", "w %1", int(keep), int(delay_first))

    event, target, delay_s, *counters, reason = answer
    assert (event, target, float(delay_s), reason) == (wanted.event, wanted.state, wanted.delay_s, wanted.reason)
    assert counters == [wanted.failures, wanted.losses]


def test_every_transition_is_the_same(lua: Asked) -> None:
    pairs = [(state, event) for state in State for event in JobEvent]
    body = "local found = {} for i = 1, #ARGV, 2 do found[#found + 1] = rules.after(ARGV[i], ARGV[i + 1]) or '' end return found"

    answer = lua(body, *(part for pair in pairs for part in pair))

    assert answer == [TRANSITIONS.get(pair, "") for pair in pairs]


@pytest.mark.parametrize("last", [None, Outcome(error_code="EXIT_CODE", message="it broke"), Outcome(error_code="EXIT_CODE")])
def test_what_is_too_late_is_the_same(lua: Asked, last: Outcome | None) -> None:
    words = "" if last is None else last.message or last.error_code
    body = """
        local words = ARGV[3] ~= '' and ARGV[3] or nil
        return { rules.is_late(ARGV[1], tonumber(ARGV[2])) and 1 or 0, rules.too_late(ARGV[1], words) }"""

    for not_after, wall in ((5.0, 5.0), (5.0, 5.0001), (1700000000.1236, 1.0)):
        answer = lua(body, repr(not_after), repr(wall), words)
        assert answer == [int(is_late(not_after, wall)), skip_outcome(not_after, last).message]


# -- routing and fairness, which are parts of the whole script ------------------------------------------------------

TOKENS = st.sampled_from(["a", "b", "ab", "A"])
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=4).map(".".join)
PATTERNS = st.tuples(st.lists(st.one_of(TOKENS, st.just("*")), max_size=3), st.sampled_from(["a", "*", ">"])).map(
    lambda parts: ".".join([*parts[0], parts[1]])
)


def whole(body: str) -> str:
    """The script up to where it would begin its turn, and something else instead."""
    text = script("rules", JobSpec(job_id=""), 60)
    return text[: text.index("-- One turn: all its verbs")] + body


@given(pairs=st.lists(st.tuples(PATTERNS, SUBJECTS), min_size=1, max_size=30))
@settings(max_examples=50)
def test_patterns_match_the_same_subjects(lua: Asked, pairs: list[tuple[str, str]]) -> None:
    body = whole("""
        local found = {}
        for i = 1, #ARGV, 2 do
          found[#found + 1] = fair.matches(ARGV[i], ARGV[i + 1]) and 1 or 0
        end
        return found""")

    answer = lua._client.eval(body, 0, *(part for pair in pairs for part in pair))

    assert answer == [int(matches(pattern, subject)) for pattern, subject in pairs]


@given(cases=st.lists(PATTERNS | PATTERNS.map("job.assign.".__add__) | PATTERNS.map("job.".__add__), min_size=1))
@settings(max_examples=50)
def test_a_pattern_is_the_same_range(lua: Asked, cases: list[str]) -> None:
    body = whole("""
        local found = {}
        for i = 1, #ARGV do
          local range = queues.range_of(ARGV[i])
          found[i] = { range.group or false, range.low, range.needs_match or range.is_literal or false }
        end
        return cjson.encode(found)""")

    found = json.loads(lua._client.eval(body, 0, *cases))

    for pattern, (group, low, is_checked) in zip(cases, found, strict=True):
        wanted, first, _, needs_match = region_of(pattern)
        is_literal = first == pattern
        assert (group or None, low.removesuffix("\0"), is_checked) == (wanted, first, needs_match or is_literal)


@given(
    deals=st.lists(
        st.tuples(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 9), min_size=1), st.integers(0, 20)),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=50)
def test_places_are_dealt_out_to_the_same_groups(
    redis_service: RedisService, lua: Asked, deals: list[tuple[dict[str, int], int]]
) -> None:
    lua._client.delete("rules:served", "rules:sequence")
    turns = FairTurns()
    body = whole("""
        local waiting, served = cjson.decode(ARGV[1]), {}
        fair.deal(waiting, tonumber(ARGV[2]), function(group, count)
          local got = math.min(count, waiting[group])
          waiting[group] = waiting[group] - got
          served[group] = (served[group] or 0) + got
          return got
        end)
        return cjson.encode(served)""")
    for waiting, limit in deals:
        left, wanted = dict(waiting), dict.fromkeys(waiting, 0)

        def take(group: str, count: int, left: dict[str, int] = left, wanted: dict[str, int] = wanted) -> list[str]:
            got = min(count, left[group])
            left[group] -= got
            wanted[group] += got
            return [group] * got

        turns.fill(waiting, limit, take)
        answer = lua._client.eval(body, 0, json.dumps(waiting), limit)
        found = {group: count for group, count in _parsed(answer).items() if count}
        assert found == {group: count for group, count in wanted.items() if count}


def _parsed(text: str) -> dict[str, int]:
    """Lua's empty table is a list."""
    found = json.loads(text)
    return found if isinstance(found, dict) else {}
