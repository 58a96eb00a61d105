"""Outsiders write anything beside honest jobs, in any order: honest jobs are done, the others are told of, and no turn fails."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest
import redis
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tasuki.core.job import State, check_job_id
from tasuki.core.lifecycle import RETRY_DELAY_MAX_S
from tasuki.core.store_messages import Filter
from tasuki.stores.redis import key_check
from tasuki.stores.redis.codec import SHARED_TYPES
from tasuki.stores.redis.connection import connect
from tasuki.stores.redis.key_check import check_keys
from tasuki.testing.store_stage import PAST_LEASE_S
from tests.support.redis_app import BAD_IDS, PAYLOAD, TYPES, Zpe, make
from tests.support.redis_service import RedisService

HONEST = [f"honest-{number}" for number in range(4)]
OTHERS = ["other-1", "other-2", *BAD_IDS]
ROUNDS_MAX = 40
SERIES = 25  # examples between two looks at the clock

Action = Callable[[Zpe], object]


def submit(job_id: str) -> Action:
    return lambda zpe: zpe.stage.submit(job_id, subject="job.assign.zpe", payload=PAYLOAD, max_retries=99, max_losses=99)


def by_outsider(command: Action) -> Action:
    """Send an outsider's own command, which Redis refuses on a key that another one spoilt."""

    def act(zpe: Zpe) -> None:
        with suppress(redis.ResponseError):
            command(zpe)

    return act


def push_early(job_id: str) -> Action:
    """Push the id before its payload, as the wrong order of two commands does."""
    return by_outsider(lambda zpe: zpe.raw.lpush("zpe:queue", job_id))


def lease_and(end: str) -> Action:
    def act(zpe: Zpe) -> None:
        for grant in zpe.lease(limit=2):
            if end == "finish":
                zpe.stage.finish(grant, result=b"1", meta={"summary_text": "s", "freqs_csv": "f"})
            elif end == "fail":
                zpe.stage.fail(grant, message="no licence", permanent=grant.job_id not in HONEST)

    return act


def look_after(zpe: Zpe) -> None:
    """All that a leader and its clients do."""
    zpe.clock.advance(PAST_LEASE_S)
    zpe.stage.reap()
    zpe.stage.skip()
    zpe.stage.promote()
    ask(zpe)


def ask(zpe: Zpe) -> None:
    """All that is only read, also before a turn has put shared keys in order."""
    zpe.store.token("0" * 64)
    zpe.store.find(Filter())
    zpe.store.get([*HONEST, "other-1", "other-2"])
    zpe.store.ready_ahead("other-1")
    zpe.store.ready_queues()
    zpe.store.counts()
    zpe.store.tokens()


def spoil(name: str, kind: str) -> Action:
    return lambda zpe: make(zpe, f"zpe:{name}", kind)


kinds = st.sampled_from(sorted(TYPES))
shared = st.builds(spoil, st.sampled_from(sorted(SHARED_TYPES)), kinds)
own = st.builds(
    lambda name, job_id, kind: spoil(f"{name}:{job_id}", kind),
    st.sampled_from(["status", "lease", "retry_count", "result", "summary", "freqs"]),
    st.sampled_from(HONEST + OTHERS),
    kinds,
)
payloads = st.builds(lambda job_id, kind: spoil(f"payload:{job_id}", kind), st.sampled_from(OTHERS), kinds)
entries = st.builds(
    lambda name, job_id: by_outsider(lambda zpe: zpe.raw.zadd(f"zpe:{name}", {job_id: 0.0})),
    st.sampled_from(["delay", "lease:index"]),
    st.sampled_from(HONEST + OTHERS),
)
actions: st.SearchStrategy[Action] = st.one_of(
    st.builds(submit, st.sampled_from(HONEST)),
    st.builds(push_early, st.sampled_from(OTHERS)),
    st.builds(lease_and, st.sampled_from(["finish", "fail", "nothing"])),
    st.just(look_after),
    st.just(ask),
    shared,
    own,
    payloads,
    entries,
)


def problems_of(url: str) -> list[str]:
    with closing(connect(url, 5.0)) as client:
        return check_keys(client).problems


def mend(zpe: Zpe, url: str) -> None:
    """Do what the doctor says of jobs that are in no queue or index."""
    for problem in problems_of(url):
        if (command := re.search(r"(LPUSH|ZADD) [^,]*", problem)) is not None:
            zpe.raw.execute_command(*command.group().split())


@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.soak)])
def test_honest_jobs_are_done_beside_anything_that_outsiders_write(redis_service: RedisService, seconds: float) -> None:
    """Series of examples from the same seeds in each run, as many as the time allows."""

    @given(st.lists(actions, max_size=25))
    @settings(max_examples=SERIES)
    def honest_jobs_are_done(acts: list[Action]) -> None:
        check_honest_jobs_are_done(redis_service.url(), acts)

    deadline = time.monotonic() + seconds
    number = 0
    while time.monotonic() < deadline:
        seed(number)(honest_jobs_are_done)()
        number += 1


@contextmanager
def log_of(name: str) -> Iterator[list[str]]:
    """Yield the lines that a logger gets while the context lasts."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def check_honest_jobs_are_done(url: str, acts: list[Action]) -> None:
    with closing(Zpe(url)) as zpe, log_of("tasuki") as log:
        for act in (*acts, *map(submit, HONEST)):
            act(zpe)

        for _ in range(ROUNDS_MAX):
            look_after(zpe)
            zpe.clock.advance(RETRY_DELAY_MAX_S)
            lease_and("finish")(zpe)
            mend(zpe, url)
            if all(zpe.stage.job(job_id).state is State.SUCCEEDED for job_id in HONEST):
                break

        assert [zpe.stage.job(job_id).state for job_id in HONEST] == [State.SUCCEEDED] * len(HONEST)
        for job in zpe.store.find(Filter()).jobs:
            is_told = job.outcome is not None and job.outcome.message
            assert check_job_id(job.job_id)
            assert is_told or job.state in (State.SUCCEEDED, State.ASSIGNED, State.PENDING), job
            if job.state is State.PENDING:  # it waits for what an outsider has to bring or to mend: somebody has to know
                named = [*log, *problems_of(url)]
                assert any(re.search(rf"\b{re.escape(job.job_id)}\b", words) for words in named), (job, named)
        assert all(re.search(r" is a \w+ and must be a ", problem) for problem in problems_of(url))


def test_the_work_of_the_check_of_the_keys_is_bounded(redis_service: RedisService, monkeypatch: pytest.MonkeyPatch) -> None:
    url = redis_service.url()
    with closing(Zpe(url)) as zpe:
        zpe.push(*(f"job-{number}" for number in range(50)))
        zpe.stage.promote()
        zpe.raw.lrem("zpe:queue", 1, "job-7")
        zpe.raw.config_resetstat()

        assert problems_of(url) == ["job job-7 waits and is not in zpe:queue: LPUSH zpe:queue job-7"]

        calls = zpe.raw.info("commandstats")
        assert "cmdstat_lpos" not in calls, "no job is searched for in the list"
        assert calls["cmdstat_lrange"]["calls"] == 2, "the list is read once, and once more for what was missing"

        monkeypatch.setattr(key_check, "LIST_STEP", 10)
        monkeypatch.setattr(key_check, "QUEUE_MAX", 20)
        with closing(connect(url, 5.0)) as client:
            assert check_keys(client)[::2] == ([], False), "nothing is said of jobs of which the place is not known"
        monkeypatch.undo()
        zpe.raw.mset({f"cache:{number}": "of another program" for number in range(5_000)})
        monkeypatch.setattr(key_check, "SCANNED_MAX", 2_000)
        zpe.raw.config_resetstat()
        with closing(connect(url, 5.0)) as client:
            assert not check_keys(client).is_complete
        assert zpe.raw.info("commandstats")["cmdstat_scan"]["calls"] == 4


def test_the_check_of_the_keys_names_jobs_that_nobody_goes_on_with_before_all_else(redis_service: RedisService) -> None:
    url = redis_service.url()
    with closing(Zpe(url)) as zpe:
        zpe.push(*(f"job-{number}" for number in range(30)))
        zpe.lease()
        for number in range(30):
            make(zpe, f"zpe:freqs:job-{number}", "set")
        make(zpe, "zpe:lease:index", "list")

        first, *rest = problems_of(url)

    assert first == "job job-0 is leased and in no index: ZADD zpe:lease:index 0 job-0"
    assert all(" and must be a " in problem for problem in rest)
