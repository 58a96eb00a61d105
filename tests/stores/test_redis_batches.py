"""The Redis store does in one go for many jobs what it does for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import redis

from tasuki.core.job import JobSpec, Outcome, State, body_hash
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.store_messages import Grant, HeldLease, LeaseRequest, LeaseStatus, Report, Submission
from tasuki.stores.redis.codec import INSIDE_MAX_BYTES
from tasuki.stores.redis.store import RedisStore
from tasuki.testing.clocks import FakeClock

OWN, OTHER = "job.assign.zpe", "math.square"
LARGE = b"x" * (INSIDE_MAX_BYTES + 1)
MANY = 300  # above what Redis keeps a small sorted set as a list for


class Zpe:
    """A store, its clock, and a raw client beside it."""

    def __init__(self, url: str) -> None:
        self.clock = FakeClock()
        self.store = RedisStore.open(url, app="zpe", clock=self.clock)
        self.raw: Any = redis.Redis(port=urlsplit(url).port or 0, db=int(urlsplit(url).path.strip("/")))

    def submit(self, *specs: JobSpec) -> list[Any]:
        return list(self.store.submit([Submission(spec, "alice", body_hash(spec)) for spec in specs]))

    def lease(self, limit: int, ttl_s: float = 15.0) -> list[Grant]:
        request = LeaseRequest(worker_id="w", incarnation="1", patterns=(">",), limit=limit, ttl_s=ttl_s)
        return list(self.store.lease([request])[0])

    def payloads(self) -> set[str]:
        return {key.decode() for key in self.raw.keys("zpe:payload:*")}


@pytest.fixture
def zpe(redis_url: str) -> Iterator[Zpe]:
    app = Zpe(redis_url)
    yield app
    app.raw.close()
    app.store.close()


def test_a_payload_has_a_key_of_its_own_if_outsiders_look_for_it_or_it_is_large(zpe: Zpe) -> None:
    zpe.submit(
        JobSpec(job_id="own", subject=OWN, payload=b"7"),
        JobSpec(job_id="small", subject=OTHER, payload=b"7"),
        JobSpec(job_id="large", subject=OTHER, payload=LARGE),
    )

    assert zpe.payloads() == {"zpe:payload:own", "zpe:payload:large"}


@pytest.mark.parametrize("subject", [OWN, OTHER])
@pytest.mark.parametrize("payload", [b"", b"7", LARGE])
def test_wherever_it_stands_a_payload_comes_back_with_the_job_and_with_the_grant(zpe: Zpe, subject: str, payload: bytes) -> None:
    spec = JobSpec(job_id="a", subject=subject, payload=payload)
    zpe.submit(spec)

    [grant], [job] = zpe.lease(1), zpe.store.get(["a"])

    assert msgspec.msgpack.decode(grant.spec, type=JobSpec) == spec
    assert job is not None
    assert job.spec == spec
    assert zpe.submit(spec)[0].created is False


def test_grants_of_payloads_here_and_there_are_not_mixed_up(zpe: Zpe) -> None:
    specs = [
        JobSpec(job_id=f"j{number}", subject=(OWN, OTHER)[number % 2], payload=b"%d" % number + LARGE * (number % 3 == 0))
        for number in range(12)
    ]
    zpe.submit(*specs)

    grants = zpe.lease(12)

    found = {grant.job_id: msgspec.msgpack.decode(grant.spec, type=JobSpec) for grant in grants}
    assert found == {spec.job_id: spec for spec in specs}


def test_an_id_twice_in_one_batch_is_one_job(zpe: Zpe) -> None:
    spec = JobSpec(job_id="a", subject=OTHER)

    first, second = zpe.submit(spec, spec)

    assert (first.created, second.created) == (True, False)
    assert len(zpe.lease(5)) == 1


def test_new_jobs_beside_known_ones_are_created(zpe: Zpe) -> None:
    known, new = JobSpec(job_id="known", subject=OTHER), JobSpec(job_id="new", subject=OTHER)
    zpe.submit(known)

    assert [answer.created for answer in zpe.submit(known, new)] == [False, True]


def test_of_two_renewals_of_one_lease_in_one_batch_the_later_counts(zpe: Zpe) -> None:
    zpe.submit(JobSpec(job_id="a", subject=OTHER))
    [grant] = zpe.lease(1)
    claims = [HeldLease("a", "w", "1", grant.lease_id, grant.attempt, ttl_s) for ttl_s in (60.0, 5.0)]

    assert zpe.store.renew(claims) == [LeaseStatus.GO_ON, LeaseStatus.GO_ON]

    [job] = zpe.store.get(["a"])
    assert job is not None
    assert job.lease is not None
    assert job.lease.expires_at == zpe.clock.lease() + 5.0 + LEASE_MARGIN_S


def test_many_jobs_keep_their_order_through_one_batch(zpe: Zpe) -> None:
    ids = [f"j{number:04d}" for number in range(MANY)]
    zpe.submit(*(JobSpec(job_id=job_id, subject=OTHER) for job_id in ids))

    grants = zpe.lease(MANY)

    assert [grant.job_id for grant in grants] == ids
    recorded = zpe.store.finish([Report(grant.job_id, "w", grant.lease_id, 1, Outcome(result=b"49")) for grant in grants])
    assert {answer.state for answer in recorded} == {State.SUCCEEDED}
    assert (zpe.raw.zcard("zpe:lease:index"), zpe.raw.zcard("zpe:ended")) == (0, MANY)
