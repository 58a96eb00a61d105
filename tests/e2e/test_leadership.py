"""One of the servers does the duties, under an epoch that only grows; when it dies, freezes or goes, another one does them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stage import (
    LEAD_TTL_S,
    LEASE_TTL_S,
    LOST_WITHIN_S,
    SOON_S,
    Ledger,
    jobs_worker,
    leader_of,
    servers_seen,
    story,
    wait_until_met,
)
from tests.support.postgres_service import PostgresService
from tests.support.processes import ServerProcess, start_servers
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

TAKEN_OVER_WITHIN_S = LEAD_TTL_S + 1.0
LOADED_S = 1.0  # for a machine with more processes than cores
LONG_LEASE_TTL_S = 8.0  # longer than PostgreSQL takes to come back


@pytest.fixture
def trio(tmp_path: Path, postgres_url: str) -> Iterator[list[ServerProcess]]:
    """Three servers on one database, of which one leads."""
    with start_servers(tmp_path, 3, *_ttls(LEASE_TTL_S), store=postgres_url) as servers:
        wait_until_met(servers)
        leader_of(servers)
        yield servers


def _ttls(lease_ttl_s: float) -> tuple[str, ...]:
    return ("--lease-ttl", str(lease_ttl_s), "--lead-ttl", str(LEAD_TTL_S))


def registered(postgres: PostgresService, url: str) -> tuple[int, str]:
    """(epoch, holder), as the store knows them."""
    ((epoch, holder),) = postgres.execute("SELECT epoch, holder FROM tasuki_scopeepoch WHERE scope = 'leader'", url=url)
    return int(epoch), str(holder)


def test_a_killed_leader_is_followed_by_another_within_its_ttl_and_a_second(
    trio: list[ServerProcess], postgres: PostgresService, postgres_url: str
) -> None:
    # given: one leads, and everybody knows which
    first = leader_of(trio)
    others = [server for server in trio if server is not first]
    assert [server.leads for server in trio].count(True) == 1
    assert registered(postgres, postgres_url)[0] == first.led()[-1]
    with others[0].client() as client:
        until(lambda: sum(server["leads"] for server in servers_seen(client)) == 1, SOON_S, "others know the leader")

    # when
    killed_at = time.monotonic()
    first.kill()

    # then
    second = leader_of(others, TAKEN_OVER_WITHIN_S + LOADED_S)
    print(f"another one led {time.monotonic() - killed_at:.2f} s after the kill, with a ttl of {LEAD_TTL_S:g} s")
    assert second.led()[-1] > first.led()[-1]
    assert registered(postgres, postgres_url)[0] == second.led()[-1]

    # and: the one that was killed follows when it is back
    first.restart()
    wait_until_met(trio)
    assert [server.leads for server in (first, second)] == [False, True]


def test_a_leader_that_ends_in_order_hands_over_at_once(trio: list[ServerProcess]) -> None:
    first = leader_of(trio)
    others = [server for server in trio if server is not first]

    assert first.stop() == 0

    # A follower asks every second, or when the ttl that it was told is over: with neither it would take the ttl and more.
    ended_at = time.monotonic()
    second = leader_of(others, LEAD_TTL_S)
    print(f"another one led {time.monotonic() - ended_at:.2f} s after the end of the first")
    assert second.led()[-1] > first.led()[-1]
    with second.client() as client:
        until(lambda: len(servers_seen(client)) == 2, SOON_S / 2, "the others do not count it any more")


def test_a_leader_that_was_frozen_steps_down_and_its_writes_are_refused(
    trio: list[ServerProcess], ledger: Ledger, tmp_path: Path, postgres: PostgresService, postgres_url: str
) -> None:
    # given: a leader, and at another server two workers that have more to do than one of them can
    first = leader_of(trio)
    others = [server for server in trio if server is not first]
    gate = tmp_path / "gate"
    with others[0].client() as client, jobs_worker(others[0], ledger, "--slots", "1", "--subject", "a.>") as doomed:
        client.submit(subject="a.1", payload=f"hold {gate}".encode(), job_id="lost")
        assert ledger.wait_for("lost").pid == doomed.pid
        with jobs_worker(others[0], ledger):
            # when: it is frozen for three ttls
            first.signal(signal.SIGSTOP)
            frozen_at = time.monotonic()

            # then: another one leads in time, and does the duties: it reaps and promotes
            second = leader_of(others, TAKEN_OVER_WITHIN_S + LOADED_S)
            doomed.kill()
            retried = client.submit(subject="b.1", payload=b"stumble", backoff_s=0.1, job_id="retried")
            assert retried.result(SOON_S) == b"2"
            ledger.wait_for("lost", 2, LOST_WITHIN_S)
            threading.Event().wait(max(0.0, frozen_at + 3 * LEAD_TTL_S - time.monotonic()))  # the time is the test's subject

            # and: when the first one goes on, it steps down by itself, and nothing of the new epoch is undone
            before = registered(postgres, postgres_url)
            first.signal(signal.SIGCONT)
            first.wait_for_output("leads no more")
            wait_until_met(trio)
            assert (first.leads, second.leads) == (False, True)
            assert registered(postgres, postgres_url) == before
            assert before[0] == second.led()[-1] > first.led()[-1]
            gate.touch()
            assert client.job("lost").result(SOON_S) == b"2"
            assert story(client, "lost") == ["lost"]


def test_a_restart_of_postgresql_costs_no_running_job_anything(
    tmp_path: Path, postgres: PostgresService, postgres_url: str, ledger: Ledger
) -> None:
    # given: two servers, and at each a worker that runs a job
    gate = tmp_path / "gate"
    with start_servers(tmp_path, 2, *_ttls(LONG_LEASE_TTL_S), store=postgres_url) as servers:
        wait_until_met(servers)
        leader_of(servers)
        here, there = servers
        with (
            here.client() as client,
            jobs_worker(here, ledger, "--subject", "a.>"),
            jobs_worker(there, ledger, "--subject", "b.>"),
        ):
            jobs = [client.submit(subject=f"{name}.1", payload=f"hold {gate}".encode(), job_id=name) for name in ("a", "b")]
            for job in jobs:
                ledger.wait_for(job.job_id)

            # when: the database is gone for a moment, shorter than a lease
            stopped_at = time.monotonic()
            postgres.restart("immediate")
            away_s = time.monotonic() - stopped_at
            assert away_s < LONG_LEASE_TTL_S

            # then: soon one leads again, jobs are taken and retried, and the running ones are still in their first attempt
            retried = client.submit(subject="a.2", payload=b"stumble", backoff_s=0.1, job_id="retried")
            assert retried.result(2 * SOON_S) == b"2"
            until(lambda: sum(server.leads for server in servers) == 1, SOON_S, "one leads again")
            expiry = client.explain("b").facts["lease_expires_at"]
            until(
                lambda: client.explain("b").facts["lease_expires_at"] > expiry + LONG_LEASE_TTL_S / 2,
                2 * LONG_LEASE_TTL_S,
                "leases are renewed",
            )
            gate.touch()
            assert [job.result(SOON_S) for job in jobs] == [b"1", b"1"]
            assert [ledger.attempts(job.job_id) for job in jobs] == [[1], [1]]
            assert story(client, "a") == story(client, "b") == []
        assert all(server.running for server in servers)
