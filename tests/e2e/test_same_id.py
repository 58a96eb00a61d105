"""One id is one job, however often and from wherever it is submitted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tasuki import AsyncClient, Client
from tasuki.errors import Conflict, NotFound
from tests.e2e.stage import SOON_S, Ledger, jobs_worker
from tests.support.processes import ServerProcess

pytestmark = pytest.mark.e2e

CONNECTIONS, SUBMITS_EACH = 50, 20


def test_a_thousand_concurrent_submits_of_one_id_are_one_run(
    shared_server: ServerProcess, shared_client: Client, ledger: Ledger
) -> None:
    async def crowd() -> list[bytes]:
        clients = [AsyncClient(shared_server.url, token=shared_server.token) for _ in range(CONNECTIONS)]
        await asyncio.gather(*(client.open() for client in clients))
        try:
            submits = [
                client.submit(subject="one.1", payload=b"rest 0.05", job_id="the-one")
                for _ in range(SUBMITS_EACH)
                for client in clients
            ]
            handles = await asyncio.gather(*submits)
            return await asyncio.gather(*(handle.result(2 * SOON_S) for handle in handles))
        finally:
            await asyncio.gather(*(client.close() for client in clients))

    with jobs_worker(shared_server, ledger):
        results = asyncio.run(crowd())

        assert results == [b"1"] * (CONNECTIONS * SUBMITS_EACH)
        assert ledger.attempts("the-one") == [1]
        assert shared_client.counts()["one"].succeeded == 1

        # and: long after, it is still the same job
        again = shared_client.submit(subject="one.1", payload=b"rest 0.05", job_id="the-one")
        assert again.existed
        assert again.result(SOON_S) == b"1"
        assert ledger.attempts("the-one") == [1]


def test_another_body_under_the_same_id_is_a_conflict_that_names_the_difference(shared_client: Client) -> None:
    shared_client.submit(subject="body.1", payload=b"secret one", job_id="body", watch=False)

    with pytest.raises(Conflict) as caught:
        shared_client.submit(subject="body.1", payload=b"secret two", args=["a"], job_id="body", watch=False)

    assert "payload" in str(caught.value)
    assert "args" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_conflict_does_not_disturb_the_wait_for_the_first_submit(
    shared_server: ServerProcess, shared_client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: a job that this client waits for
    gate = tmp_path / "gate"
    with jobs_worker(shared_server, ledger):
        job = shared_client.submit(subject="wait.1", payload=f"hold {gate}".encode(), job_id="waited-for")
        ledger.wait_for("waited-for")

        # when: the same client submits another body under its id
        with pytest.raises(Conflict):
            shared_client.submit(subject="wait.1", payload=b"other", job_id="waited-for")

        # then: only that submit was refused
        gate.touch()
        assert job.result(SOON_S) == b"1"


def test_an_unknown_id_is_an_error_of_its_own(shared_client: Client) -> None:
    for ask in (shared_client.status, shared_client.explain, shared_client.cancel, shared_client.retry):
        with pytest.raises(NotFound, match="no-such-job"):
            ask("no-such-job")
    with pytest.raises(NotFound, match="no-such-job"):
        shared_client.job("no-such-job").result(SOON_S)
