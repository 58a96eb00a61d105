"""The blocking and the asynchronous client against a real server and a real worker."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.core.job import BROADCAST_WITHIN_S, JobSpec, State
from tasuki.errors import Conflict, DeadlineExceeded, InvalidInput, JobFailed, NotFound, TooLarge, Unauthorized, Unavailable
from tests.support.processes import ServerProcess, start_server, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


# ---------------------------------------------------------------------------------------------------- one job


def test_result_of_a_job(client: Client) -> None:
    job = client.submit(subject="math.square", payload=b"7", job_id="sq-7")
    assert job.result(timeout=30) == b"49"
    assert job.done
    assert job.result(timeout=30) == b"49"


def test_a_broadcast_reaches_each_worker_with_such_a_handler(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() - 2 * BROADCAST_WITHIN_S)  # the client's clock; the deadline is the server's

    jobs = client.broadcast(JobSpec(job_id="all", subject="math.square", payload=b"9"))

    assert [job.result(timeout=30) for job in jobs] == [b"81"]
    assert [one.array_id for one in client.list_jobs(array_id="all")] == ["all"]
    with pytest.raises(NotFound, match="no connected worker"):
        client.broadcast(JobSpec(job_id="none", subject="nobody.>"))


def test_async_client_does_the_same(server: ServerProcess) -> None:
    async def main() -> bytes:
        async with server.async_client() as client:
            job = await client.submit(subject="math.square", payload=b"8")
            return await job.result(timeout=30)

    assert asyncio.run(main()) == b"64"


def test_failed_job_raises_with_its_state_and_reason(client: Client) -> None:
    job = client.submit(subject="fail", payload=b"the disk was on fire", retries=0)
    with pytest.raises(JobFailed, match="the disk was on fire") as failed:
        job.result(timeout=30)
    ended = failed.value.outcome
    assert ended.state is State.FAILED
    assert ended.attempt == 1
    assert job.job_id in failed.value.message
    assert job.outcome(timeout=30).outcome.error_code == "HANDLER_ERROR"


def test_timeout_leaves_the_job_alone_and_its_result_can_be_picked_up_later(client: Client, tmp_path: Path) -> None:
    # Given a job that waits for a file
    gate = tmp_path / "gate"
    job = client.submit(subject="wait", payload=str(gate).encode())
    # When the caller's time runs out first
    with pytest.raises(DeadlineExceeded, match="goes on"):
        job.result(timeout=0.2)
    gate.touch()
    # Then the result is there for whoever asks by id
    assert client.job(job.job_id).result(timeout=30) == b"the gate is open"
    assert job.result(timeout=30) == b"the gate is open"


def test_another_client_gets_the_result_by_id(server: ServerProcess, tmp_path: Path) -> None:
    # Given a job of a client that has left
    gate = tmp_path / "gate"
    token = server.create_token("client")
    with server.client(token=token) as first:
        job_id = first.submit(subject="wait", payload=str(gate).encode()).job_id
    # When another one comes, before the end and after it
    with server.client(token=token) as second:
        waiting = second.job(job_id)
        assert not waiting.done
        gate.touch()
        assert waiting.result(timeout=30) == b"the gate is open"
    with server.client(token=token) as third:
        assert third.job(job_id).result(timeout=30) == b"the gate is open"
        again = third.submit(job_id=job_id, subject="wait", payload=str(gate).encode())
        # Then the same id with the same body is the same job, run once
        assert again.existed
        assert again.result(timeout=30) == b"the gate is open"
    assert len(gate.with_name("gate.runs").read_text().splitlines()) == 1


def test_same_id_with_another_body_is_a_conflict_that_names_the_fields_and_not_their_contents(client: Client) -> None:
    client.submit(job_id="twice", subject="echo.twice", payload=b"secret one", env={"KEY": "secret two"})
    with pytest.raises(Conflict) as refused:
        client.submit(job_id="twice", subject="echo.twice", payload=b"secret three", env={"KEY": "secret four"})
    assert set(refused.value.differs) == {"payload", "env"}
    assert "secret" not in refused.value.message
    # The first one is not disturbed.
    assert client.job("twice").result(timeout=30) == b"secret one"


def test_headers_priority_and_not_before_are_not_part_of_the_body(client: Client) -> None:
    first = client.submit(job_id="notes", subject="echo.notes", payload=b"x", headers={"a": "1"})
    assert first.result(timeout=30) == b"x"
    again = client.submit(job_id="notes", subject="echo.notes", payload=b"x", headers={"a": "2"}, priority=9)
    assert again.existed
    assert again.result(timeout=30) == b"x"


def test_unknown_id_is_an_error_of_its_own(client: Client) -> None:
    with pytest.raises(NotFound, match="never-submitted"):
        client.job("never-submitted").result(timeout=30)
    with pytest.raises(NotFound, match="never-submitted"):
        client.status("never-submitted")


def test_invalid_job_is_refused_by_name(client: Client) -> None:
    with pytest.raises(InvalidInput, match="priority"):
        client.submit(subject="noop", priority=11)
    with pytest.raises(InvalidInput, match="subject"):
        client.submit(subject="a..b")


@pytest.mark.parametrize("size_bytes", [100_000, 20_000_000])
def test_payload_of_a_program_that_is_too_large_is_refused_with_the_way_out(client: Client, size_bytes: int) -> None:
    began = time.monotonic()
    with pytest.raises(TooLarge, match=r"blob|file"):
        client.submit(exec="cat", payload=bytes(size_bytes))
    assert time.monotonic() - began < 5
    # And the client is none the worse for it.
    assert client.submit(subject="math.square", payload=b"3").result(timeout=30) == b"9"


def test_question_that_is_too_large_is_refused_and_not_sent_for_ever(client: Client) -> None:
    with pytest.raises(TooLarge, match="ask for less"):
        client.wait(asyncio.wait_for(client.aio.call("get", job_ids=["x" * 100] * 120_000), 30))
    assert client.submit(subject="math.square", payload=b"3").result(timeout=30) == b"9"


def test_list_of_wide_jobs_is_short(client: Client) -> None:
    notes = {f"k{n}": "x" * 6000 for n in range(2)}
    specs = [JobSpec(job_id=f"wide-{n}", subject="nobody.wide", headers=notes) for n in range(900)]
    client.submit_many(specs, watch=False)
    page = client.wait(asyncio.wait_for(client.aio.list_jobs(limit=900, subject="nobody.wide"), 30))
    assert [job.header_names for job in page] == [("k0", "k1")] * 900


def test_text_that_cannot_be_encoded_is_the_error_of_its_one_call(server: ServerProcess) -> None:
    async def main() -> bytes:
        async with server.async_client() as client, asyncio.timeout(15):
            # When calls of every kind hold half a surrogate pair
            with pytest.raises(InvalidInput, match=r"job 'half'.*surrogates"):
                await client.submit(job_id="half", subject="noop", exec="x", args=["f\udcff"])
            with pytest.raises(InvalidInput, match="surrogates"):
                await client.status("\udcff")
            with pytest.raises(InvalidInput, match="surrogates"):
                await client.cancel("\udcff")
            with pytest.raises(InvalidInput, match="surrogates"):
                await client.job("\udcff").result()
            # Then the connection goes on
            link = client._connection.link
            await client.submit(subject="noop")
            assert client._connection.link is link
            # And what was refused is not said again on a new one
            assert link is not None
            link.abort("the test cuts it")
            return await (await client.submit(subject="math.square", payload=b"4")).result()

    assert asyncio.run(main()) == b"16"


def test_text_that_cannot_be_encoded_while_there_is_no_connection_is_the_error_of_its_call(server: ServerProcess) -> None:
    async def main() -> None:
        async with server.async_client() as client, asyncio.timeout(15):
            assert client._connection.link is not None
            client._connection.link.abort("the test cuts it")
            bad = asyncio.ensure_future(client.submit(subject="noop", exec="\udcff"))
            good = asyncio.ensure_future(client.submit(subject="noop"))
            with pytest.raises(InvalidInput, match="surrogates"):
                await bad
            assert await (await good).result() == b""

    asyncio.run(main())


def test_token_that_cannot_be_encoded_fails_at_once(server: ServerProcess) -> None:
    with pytest.raises(InvalidInput, match="surrogates"):
        Client(server.url, token="\udcff", connect_timeout_s=5)


def test_job_that_no_frame_can_hold_is_refused_and_not_sent_for_ever(client: Client) -> None:
    with pytest.raises(TooLarge, match="job 'huge'"):
        client.wait(asyncio.wait_for(client.aio.submit(job_id="huge", subject="x" * 20_000_000), 30))
    assert client.submit(subject="math.square", payload=b"3").result(timeout=30) == b"9"


def test_bad_client_id_fails_at_once_with_the_reason(server: ServerProcess) -> None:
    with pytest.raises((InvalidInput, Unavailable), match="client_id"):
        Client(server.url, token=server.token, client_id="not a name!", connect_timeout_s=1.5)


def test_no_server_is_unavailable_with_address_and_reason(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"tcp://127\.0\.0\.1:1: Connection refused"):
        Client("tcp://127.0.0.1:1", token="x", connect_timeout_s=0.5)
    with pytest.raises(Unavailable, match="No such file"):
        Client(f"unix://{tmp_path}/socket", connect_timeout_s=0.5)


# ---------------------------------------------------------------------------------------------------- many jobs


def test_many_jobs_with_invalid_ones_between_them(client: Client) -> None:
    # Given 5,000 jobs, every fiftieth of them impossible
    client.submit(job_id="many-7", subject="echo.other", payload=b"before").result(timeout=30)
    specs = [
        JobSpec(job_id=f"many-{n}", subject="noop" if n % 50 else "not..valid", payload=str(n).encode()) for n in range(5000)
    ]
    # When they are submitted with strict=False
    handles = client.submit_many(specs, strict=False)
    # Then each good one has its result and each bad one its own error
    assert [handle.job_id for handle in handles] == [spec.job_id for spec in specs]
    for number, handle in enumerate(handles):
        if number == 7:
            with pytest.raises(Conflict):
                handle.result(timeout=30)
        elif number % 50 == 0:
            with pytest.raises(InvalidInput, match=r"not\.\.valid"):
                handle.result(timeout=30)
        else:
            assert handle.result(timeout=30) == b""


def test_many_jobs_strictly_raise_the_first_error_but_keep_the_good_ones(client: Client) -> None:
    specs = [JobSpec(job_id=f"strict-{n}", subject="noop" if n != 3 else "not..valid") for n in range(6)]
    with pytest.raises(InvalidInput):
        client.submit_many(specs)
    assert client.job("strict-5").result(timeout=30) == b""


def test_more_than_a_link_may_hold_is_submitted_in_parts(client: Client) -> None:
    specs = [JobSpec(job_id=f"bulk-{n}", subject="nobody.bulk", payload=bytes(60_000)) for n in range(1200)]
    handles = client.submit_many(specs, watch=False)
    assert len(handles) == 1200
    assert client.status("bulk-1199").state == "PENDING"


def test_many_large_jobs_and_all_their_results_at_once_for_a_client_that_comes_later(
    server: ServerProcess, client: Client
) -> None:
    # Given 1,200 jobs with 60,000 bytes of payload and of result each: 72 MB, more than a link may hold at once
    specs = [JobSpec(job_id=f"heavy-{n}", subject="echo.heavy", payload=bytes([n % 251]) * 60_000) for n in range(1200)]
    for handle in client.submit_many(specs):
        handle.outcome(timeout=20)

    async def main() -> list[bytes]:
        async with server.async_client() as later:
            # When another client asks for all of them in one go
            handles = [later.job(spec.job_id) for spec in specs]
            async with asyncio.timeout(30):
                return [await handle.result() for handle in handles]

    # Then all arrive
    assert [result[:1] for result in asyncio.run(main())] == [bytes([n % 251]) for n in range(1200)]


def test_client_is_shared_by_threads(client: Client) -> None:
    results: list[bytes] = []

    def work(number: int) -> None:
        for step in range(20):
            results.append(client.submit(subject="math.square", payload=str(number * 100 + step).encode()).result(timeout=30))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(map(int, results)) == sorted((n * 100 + s) ** 2 for n in range(8) for s in range(20))


def test_cancel_of_a_waiting_job_reaches_the_one_who_waits(client: Client) -> None:
    job = client.submit(subject="nobody.takes")
    answer = client.cancel(job.job_id, reason="changed my mind")
    assert answer[job.job_id].state == "CANCELED"
    with pytest.raises(JobFailed, match="changed my mind"):
        job.result(timeout=30)


# ---------------------------------------------------------------------------------------------------- ends


def test_closing_while_another_thread_waits_ends_the_wait(server: ServerProcess) -> None:
    # Given a thread that waits without end for a job that does not end
    client = server.client()
    job = client.submit(subject="nobody.takes")
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            job.result()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            seen.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    until(lambda: job._handle._job.waiter is not None, what="the thread waits")
    # When the client is closed
    client.close()
    # Then the wait ends with the reason
    waiter.join(5)
    assert not waiter.is_alive()
    assert isinstance(seen[0], Unavailable)
    assert "closed" in str(seen[0])
    client.close()


def test_ctrl_c_ends_the_wait_for_a_result_and_nothing_else(client: Client) -> None:
    # Given a main thread that waits for a job that does not end
    job = client.submit(subject="nobody.takes")

    def press() -> None:
        until(lambda: job._handle._job.waiter is not None, what="the main thread waits")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    # When Ctrl-C is pressed
    with pytest.raises(KeyboardInterrupt):
        job.result(timeout=20)
    presser.join(5)
    # Then the wait has left the client's loop, the job goes on, and so does the client
    until(lambda: len(asyncio.all_tasks(client._thread.loop)) == 1, what="only the client's own tick is left")
    assert client.status(job.job_id).state == "PENDING"
    assert client.submit(subject="math.square", payload=b"3").result(timeout=30) == b"9"
    client.close()
    assert not client._thread.thread.is_alive()


def test_closing_while_tasks_wait_ends_their_waits(server: ServerProcess) -> None:
    async def main() -> None:
        client = server.async_client()
        await client.open()
        job = await client.submit(subject="nobody.takes")
        waiting = asyncio.ensure_future(job.result())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await asyncio.wait_for(waiting, 30)
        with pytest.raises(Unavailable, match="closed"):
            await asyncio.wait_for(client.submit(subject="noop"), 30)

    asyncio.run(main())


def test_token_that_is_revoked_ends_every_wait_with_the_reason(server: ServerProcess) -> None:
    token_id, token = server.create_named_token("client")
    with server.client(token=token) as client, server.client() as admin:
        # Given somebody who waits for a result
        job = client.submit(subject="nobody.takes")
        # When the token is revoked
        admin.wait(admin.aio.call("token.revoke", token_id=token_id))
        # Then the wait ends, and later questions are refused as well
        with pytest.raises(Unauthorized, match="revoked"):
            job.result(timeout=30)
        with pytest.raises(Unauthorized, match="revoked"):
            client.wait(asyncio.wait_for(client.aio.status(job.job_id), 30))
        with pytest.raises(Unauthorized, match="revoked"):
            client.job(job.job_id).result(timeout=30)


def test_results_arrive_though_the_server_was_killed_and_started_again_meanwhile(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with start_server(tmp_path) as server, start_worker(server), server.client() as client:
        # Given jobs under way, one of which has ended already
        first = client.submit(subject="math.square", payload=b"5")
        assert first.result(timeout=30) == b"25"
        running = [client.submit(subject="wait", payload=str(gate).encode()) for _ in range(5)]
        queued = client.submit(subject="nobody.takes.yet")
        runs = gate.with_name("gate.runs")
        until(lambda: runs.exists() and len(runs.read_text().splitlines()) == 5, what="all five run")
        # When the server is killed, and started again on the same port
        server.kill()
        late: list[object] = []
        submitter = threading.Thread(target=lambda: late.append(client.submit(subject="math.square", payload=b"6")), daemon=True)
        submitter.start()
        server.restart()
        gate.touch()
        # Then nothing has to be started again: results come, and what was said meanwhile is said
        assert [job.result(timeout=15) for job in running] == [b"the gate is open"] * 5
        submitter.join(15)
        assert late[0].result(timeout=15) == b"36"
        assert client.status(queued.job_id).state == "PENDING"
        assert len(runs.read_text().splitlines()) == 5


# ---------------------------------------------------------------------------------------------------- embedded


def test_embedded_server_is_there_for_the_time_being(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given nothing that runs
    monkeypatch.setenv("TASUKI_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("TASUKI_URL", raising=False)
    with Client() as client:
        # When a client submits a command of its own user
        job = client.submit(exec="echo", args=["hello"], subject="job.assign.default", retries=0)
        # Then an embedded server and worker run it
        assert job.result(timeout=20).startswith(b"PK")
        owner = tmp_path / "data" / "tasuki.sqlite3.owner"
        assert owner.read_text().startswith("pid ")
        with Client() as second:  # which finds the one that is there
            assert second.job(job.job_id).result(timeout=30).startswith(b"PK")
    # And it leaves after its last client
    until(lambda: not owner.read_text(), timeout_s=20, what="the embedded server ends in order")
