"""Several servers on one PostgreSQL: what is done at one is seen at all, and peers of one that dies go on at another."""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tasuki import Client
from tasuki.core.job import JobSpec
from tasuki.errors import DeadlineExceeded, NotFound, Unauthorized, Unavailable
from tests.e2e.stage import (
    LEAD_TTL_S,
    LEASE_TTL_S,
    LOST_WITHIN_S,
    SOON_S,
    Ledger,
    assert_one_finish_each,
    command_worker,
    in_background,
    jobs_worker,
    servers_seen,
    stdout_of,
    story,
    wait_until_met,
)
from tests.support.postgres_service import PostgresService
from tests.support.processes import ServerProcess, start_server, start_servers
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

POLLED_S = 1.0  # how often a server looks for what no hint told it
AWAY_S = 2.0  # how long the database does not answer
REVOKED_WITHIN_S = 2.0
PATIENT_LEASE_S = 12.0  # a worker leaves a silent server after two thirds, and stops its job 2 s later: of 3 s too little is left
MOVED_WITHIN_S = 20.0  # a client leaves a silent server after 12.5 s, if it knows another


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresService) -> Iterator[list[ServerProcess]]:
    """Two servers for all tests of this file that do no harm to them."""
    url = postgres.database()
    ttls = ("--lease-ttl", str(LEASE_TTL_S), "--lead-ttl", str(LEAD_TTL_S))
    with start_servers(tmp_path_factory.mktemp("pair"), 2, *ttls, store=url) as servers:
        wait_until_met(servers)
        yield servers
        assert all(server.running for server in servers), [server.output() for server in servers]
    postgres.drop(url)


def test_a_job_submitted_at_one_runs_at_another_and_its_result_comes_back_at_once(
    shared_pair: list[ServerProcess], ledger: Ledger
) -> None:
    # given: a client at one server, a worker at the other
    here, there = shared_pair
    with jobs_worker(there, ledger, "--subject", "across.>"), here.client() as client:
        client.submit(subject="across.0").result(SOON_S)

        # when: jobs come one by one
        times = []
        for n in range(9):
            began_at = time.monotonic()
            assert client.submit(subject=f"across.{n}").result(SOON_S) == b"1"
            times.append(time.monotonic() - began_at)

        # then: hints brought them there and their results back; by looking around alone each way takes half a second
        print(f"there and back: median {statistics.median(times) * 1000:.0f} ms")
        assert statistics.median(times) < POLLED_S / 2


def test_messages_reach_subscribers_at_every_server_and_answers_find_their_way_back(shared_pair: list[ServerProcess]) -> None:
    here, there = shared_pair
    large = bytes(range(256)) * 1200  # more than one notification of the database carries
    with here.client() as publisher, there.client() as subscriber, subscriber.subscribe("across.news.>") as messages:
        for number in range(20):
            publisher.publish("across.news.1", b"%d" % number, headers={"n": str(number)})
        publisher.publish("across.news.2", large)

        got = [next(messages) for _ in range(21)]

        assert [message.payload for message in got] == [*(b"%d" % number for number in range(20)), large]
        assert got[3].headers == {"n": "3"}
        with subscriber.subscribe("across.echo") as questions:
            answering = threading.Thread(target=lambda: subscriber.publish(next(questions).reply_to, b"yes"))
            answering.start()
            assert publisher.request("across.echo", timeout=SOON_S).payload == b"yes"
            answering.join()


def test_without_hints_jobs_results_and_cancels_are_found_all_the_same(
    tmp_path: Path, ledger: Ledger, postgres: PostgresService, postgres_url: str
) -> None:
    # given: a client at one server, a worker at the other, on a database that lets them send no hints
    ttls = ("--lease-ttl", str(LEASE_TTL_S), "--lead-ttl", str(LEAD_TTL_S))
    muted = _role_that_may_not_notify(postgres, postgres_url)
    with start_servers(tmp_path, 2, *ttls, store=muted) as (here, there):
        wait_until_met([here, there])
        with jobs_worker(there, ledger), here.client() as client:
            # when
            found = client.submit(subject="x.1", job_id="found")
            held = client.submit(subject="x.1", payload=f"hold {ledger.path}.never".encode(), job_id="held")
            assert "hints to other processes of this store are lost" in here.wait_for_output("permission denied")

            # then: the job, its result and a cancel find their way, because everybody also looks
            assert found.result(SOON_S) == b"1"
            ledger.wait_for("held")
            client.cancel("held")
            assert held.outcome(LOST_WITHIN_S).state == "CANCELED"
            assert ledger.attempts("held") == [1]


def test_cancel_through_another_server_stops_the_job(shared_pair: list[ServerProcess], ledger: Ledger, tmp_path: Path) -> None:
    here, there = shared_pair
    with (
        jobs_worker(here, ledger, "--subject", "stop.>"),
        command_worker(here, ledger, "--subject", "halt.>"),
        here.client() as client,
        there.client() as other,
    ):
        never = str(tmp_path / "never")
        jobs = [
            client.submit(subject="stop.1", payload=f"hold {never}".encode(), job_id="stop"),
            client.submit(subject="halt.1", exec="step", args=["hold", never], job_id="halt"),
            client.submit(subject="nobody.1", job_id="waits"),
        ]
        for job_id in ("stop", "halt"):
            ledger.wait_for(job_id)

        asked_at = time.monotonic()
        assert {job_id: view.requested for job_id, view in other.cancel("stop", "halt", "waits").items()} == {
            "stop": True,
            "halt": True,
            "waits": False,
        }

        assert [job.outcome(SOON_S).state for job in jobs] == ["CANCELED"] * 3
        assert time.monotonic() - asked_at < SOON_S / 5, "not by the lease's end, but because the worker was told"


def test_a_subject_that_ends_in_a_worker_of_another_server_goes_to_that_worker_only(
    shared_pair: list[ServerProcess], ledger: Ledger
) -> None:
    here, there = shared_pair
    with (
        jobs_worker(here, ledger, "--subject", "to.>", "--worker-id", "anna") as anna,
        jobs_worker(there, ledger, "--subject", "to.>", "--worker-id", "bert") as bert,
        here.client() as client,
        there.client() as other,
    ):
        for one in (client, other):
            until(lambda one=one: {"anna", "bert"} <= _workers(one), SOON_S, "both servers know both workers")

        jobs = [client.submit(subject=f"to.{name}", job_id=f"{name}-{n}") for n in range(10) for name in ("anna", "bert")]

        assert [job.result(SOON_S) for job in jobs] == [b"1"] * 20
        assert {run.pid for run in ledger.runs() if run.job_id.startswith("anna")} == {anna.pid}
        assert {run.pid for run in ledger.runs() if run.job_id.startswith("bert")} == {bert.pid}


def test_everything_is_seen_from_any_server(shared_pair: list[ServerProcess], ledger: Ledger) -> None:
    # given: a job that ended at one server's worker, and one that nobody takes
    here, there = shared_pair
    with jobs_worker(here, ledger, "--subject", "seen.>", "--worker-id", "watcher"), here.client() as client:
        assert client.submit(subject="seen.1", job_id="seen-ended").result(SOON_S) == b"1"
        client.submit(subject="unseen.1", job_id="unseen", watch=False)
        with there.client() as other:
            until(lambda: "watcher" in _workers(other), SOON_S, "the other server knows the worker")

            # when: the other one is asked, by the command line too
            listed = {job["job_id"] for job in _json(there, "list", "--json")["jobs"]}
            stats = _json(there, "stats", "--json")
            groups, workers = stats["groups"], {worker["worker_id"]: worker for worker in stats["workers"]}
            why, servers = other.explain("unseen"), servers_seen(other)

        # then
        assert {"seen-ended", "unseen"} <= listed
        assert (groups["seen"]["succeeded"], groups["unseen"]["pending"]) == (1, 1)
        assert "seen.>" in why.facts["nearest_patterns"]
        assert workers["watcher"]["patterns"] == ["seen.>"]
        assert {address for server in servers for address in server["addresses"]} == {here.url, there.url}
        assert [server["leads"] for server in servers].count(True) == 1


def test_the_audit_tells_at_any_server_who_made_and_revoked_a_token(shared_pair: list[ServerProcess]) -> None:
    here, there = shared_pair
    token_id, secret = here.create_named_token("client")
    with here.client() as client:
        client.wait(client.aio.call("token.revoke", token_id=token_id))

    rows = [row for row in _json(there, "token", "audit", "--json") if row["target"] == token_id]

    assert [row["action"] for row in rows] == ["token.revoke", "token.create"]
    assert all(row["actor"].startswith("token:") for row in rows)
    assert secret not in json.dumps(rows)


def test_a_token_revoked_at_one_server_ends_its_connections_at_the_other(
    shared_pair: list[ServerProcess], ledger: Ledger, tmp_path: Path
) -> None:
    # given: a client and a worker at one server, whose tokens are to be revoked; the worker runs a job
    here, there = shared_pair
    worker_token_id, worker_token = here.create_named_token("worker")
    client_token_id, client_token = here.create_named_token("client")
    gate = tmp_path / "gate"
    with (
        here.client() as admin,
        there.client() as witness,
        there.client(token=client_token) as client,
        jobs_worker(there, ledger, "--worker-id", "revoked", token=worker_token) as worker,
    ):
        job = admin.submit(subject="x.1", payload=f"hold {gate}".encode(), job_id="taken-away")
        ledger.wait_for("taken-away")
        until(lambda: admin.status("taken-away").state == "RUNNING", SOON_S, "the start is recorded")
        client.submit(subject="x.2", job_id="mine").result(SOON_S)

        # when: the other server revokes them
        revoked_at = time.monotonic()
        for token_id in (worker_token_id, client_token_id):
            admin.wait(admin.aio.call("token.revoke", token_id=token_id))

        # then: both connections end within two seconds, and the worker with its own
        until(lambda: not client.aio.connected, REVOKED_WITHIN_S, "the client's connection is cut")
        until(lambda: "revoked" not in _workers(witness), REVOKED_WITHIN_S, "the worker's connection is cut")
        print(f"both connections ended {time.monotonic() - revoked_at:.2f} s after the first was revoked")
        with pytest.raises(Unauthorized):
            client.status("mine")
        assert worker.wait(SOON_S) != 0

        # and: the worker's job is lost at once, and run elsewhere
        with jobs_worker(here, ledger):
            assert ledger.wait_for("taken-away", 2, LOST_WITHIN_S)
            gate.touch()
            assert job.result(SOON_S) == b"2"
        assert story(admin, "taken-away") == ["lost"]


def test_peers_of_a_killed_server_go_on_at_another_with_what_they_run(
    pair: list[ServerProcess], ledger: Ledger, tmp_path: Path
) -> None:
    # given: a client and two workers that were told of one server only, with running and waiting jobs
    doomed, survivor = pair
    gate = tmp_path / "gate"
    with (
        doomed.client() as client,
        client.subscribe("news") as messages,
        jobs_worker(doomed, ledger, "--subject", "hold.>") as handlers,
        command_worker(doomed, ledger, "--subject", "step.>", "--slots", "1") as commands,
    ):
        handled = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="handled")
        command = client.submit(subject="step.1", exec="step", args=["hold", str(gate)], job_id="command")
        queued = client.submit(subject="step.2", exec="step", job_id="queued")
        begun = [ledger.wait_for(job.job_id).pid for job in (handled, command)]

        # when: it is killed, and does not come back
        killed_at = time.monotonic()
        doomed.kill()

        # then: a new job starts through the other one
        assert client.submit(subject="hold.2", job_id="next").result(SOON_S) == b"1"
        moved_s = ledger.wait_for("next").at - time.time() + time.monotonic() - killed_at
        print(f"the next job began {moved_s * 1000:.0f} ms after the kill")

        # and: what ran goes on in its only attempt, past the lease it had from the dead server
        with survivor.client() as other:
            until(lambda: len(_workers(other)) == 2, SOON_S, "both workers are at the other server")
            expiry = _expiry(other, "command")
            until(lambda: _expiry(other, "command") > expiry + 1.0, SOON_S, "the other server renews the lease")
            gate.touch()
            assert handled.result(SOON_S) == b"1"
            assert stdout_of(command.result(SOON_S)) == "attempt 1\n"
            assert stdout_of(queued.result(SOON_S)) == "attempt 1\n"
            assert [run.pid for job in (handled, command) for run in ledger.of(job.job_id)] == begun
            assert story(other, "handled") == story(other, "command") == []
            assert (handlers.running, commands.running) == (True, True)
            assert_one_finish_each(other, ["handled", "next"], "hold")

            # and: its subscription has moved with the client
            other.publish("news", b"from the other one")
            assert next(messages).payload == b"from the other one"


def test_all_kinds_of_subscribers_of_a_killed_server_go_on_at_another(tmp_path: Path, postgres_url: str, ledger: Ledger) -> None:
    # given: at one server a reader over HTTP, a member of a queue group, and a worker that answers messages
    ttls = ("--lease-ttl", str(LEASE_TTL_S), "--lead-ttl", str(LEAD_TTL_S))
    with start_servers(tmp_path, 2, *ttls, "--http", "127.0.0.1:0", store=postgres_url) as servers:
        wait_until_met(servers)  # a client learns the others' addresses when it connects
        both = "http://" + ",".join(server.http_url.removeprefix("http://") for server in servers)
        with contextlib.ExitStack() as stack:
            reader, *clients = [stack.enter_context(servers[0].client(url)) for url in (both, *(one.url for one in servers))]
            is_first = _server_of(reader) == _server_of(clients[0])  # it chose one of the two
            (doomed, _), (client, other) = (servers, clients) if is_first else (servers[::-1], clients[::-1])
            events = stack.enter_context(reader.subscribe("news"))
            work = stack.enter_context(client.subscribe("work", queue="crew"))
            stack.enter_context(jobs_worker(doomed, ledger, "--answer", "echo"))
            until(lambda: _answers(other, "echo"), what="all three are subscribed")

            # when: it is killed, and does not come back
            doomed.kill()

            # then: each gets what is published at the other one from then on
            for messages, subject in ((events, "news"), (work, "work")):
                with in_background(lambda messages=messages: next(messages).payload) as taken:
                    until(partial(_published, other, subject, taken), MOVED_WITHIN_S, f"{subject} comes again")
                    assert taken.result() == b"on"
            until(lambda: _answers(other, "echo"), MOVED_WITHIN_S, "the worker answers again")


def _server_of(client: Client) -> str:
    assert client.aio.welcome is not None
    return client.aio.welcome.server_id


def _published(client: Client, subject: str, taken: Future[bytes]) -> bool:
    """Publish once more, and return whether it was taken."""
    client.publish(subject, b"on")
    return taken.done()


def _answers(client: Client, subject: str) -> bool:
    """Return whether somebody sends a request back."""
    try:
        return client.request(subject, b"are you there", timeout=0.5).payload == b"are you there"
    except (DeadlineExceeded, NotFound, Unavailable):
        return False


def test_peers_of_a_frozen_server_go_on_at_another_before_their_leases_are_over(
    tmp_path: Path, postgres_url: str, ledger: Ledger
) -> None:
    # given: a running job at one server
    ttls = ("--lease-ttl", str(PATIENT_LEASE_S), "--lead-ttl", str(LEAD_TTL_S))
    with start_servers(tmp_path, 2, *ttls, store=postgres_url) as servers:
        wait_until_met(servers)
        frozen, awake = servers
        gate = tmp_path / "gate"
        with frozen.client() as client, awake.client() as other, jobs_worker(frozen, ledger) as worker:
            job = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="kept")
            run = ledger.wait_for("kept")

            # when: it freezes for longer than the lease
            lease_ends_at = _expiry(other, "kept")
            frozen.signal(signal.SIGSTOP)

            # then: the worker has moved on in time, and renews its lease there
            until(lambda: len(_workers(other)) == 1, MOVED_WITHIN_S, "the worker is at the other server")
            expiry = _expiry(other, "kept")
            until(lambda: _expiry(other, "kept") > expiry + 1.0, SOON_S, "the other server renews the lease")

            # and: the client too, with the result of the only run
            gate.touch()
            assert job.result(MOVED_WITHIN_S) == b"1"
            assert [found.pid for found in ledger.of("kept")] == [run.pid]

            # and: when the frozen one wakes up, it changes nothing
            until(lambda: time.time() > lease_ends_at, PATIENT_LEASE_S, "the lease is over that it knows of")
            frozen.signal(signal.SIGCONT)
            with frozen.client() as back:
                assert back.status("kept").attempt == 1
                assert_one_finish_each(back, ["kept"], "hold")
            assert story(other, "kept") == []
            assert worker.running


def test_servers_that_are_restarted_one_after_the_other_under_load_cost_nothing(
    pair: list[ServerProcess], ledger: Ledger
) -> None:
    # given: a client and a worker that were told of one server, in the middle of many jobs
    ids = [f"rolling-{n}" for n in range(1000)]
    specs = [JobSpec(job_id=job_id, subject="load.1", payload=b"rest 0.05", max_losses=0, max_retries=0) for job_id in ids]
    with pair[0].client() as client, jobs_worker(pair[0], ledger, "--slots", "16") as worker:
        jobs = client.submit_many(specs)

        # when: each server is stopped in order and started again
        for server in pair:
            done = len(ledger.runs())
            until(lambda done=done: len(ledger.runs()) > done + 50, SOON_S, "jobs run between two restarts")
            assert server.stop() == 0
            server.restart()

        # then: every job was run once, and nobody noticed
        assert {job.result(3 * SOON_S) for job in jobs} == {b"1"}
        assert sorted(run.job_id for run in ledger.runs()) == sorted(ids)
        assert_one_finish_each(client, ids, "load")
        assert worker.running


@pytest.mark.parametrize("away", ["stopped", "frozen"])
def test_what_comes_while_the_database_is_away_is_done_when_it_is_back(
    pair: list[ServerProcess], ledger: Ledger, postgres: PostgresService, away: str
) -> None:
    here, there = pair
    with jobs_worker(there, ledger), here.client() as client:
        assert client.submit(subject="x.1").result(SOON_S) == b"1"
        stop, start = (postgres.stop, postgres.start) if away == "stopped" else (postgres.pause, postgres.resume)

        # when: somebody submits while nothing can be stored
        stop()
        try:
            with in_background(lambda: client.submit(subject="x.1", job_id="patient").result(2 * SOON_S)) as result:
                threading.Event().wait(AWAY_S)  # the time is the test's subject
                assert not result.done()
                start()

                # then: it was stored and run, once, and nobody was told an error
                assert result.result(2 * SOON_S) == b"1"
        finally:
            if away == "frozen":
                postgres.resume()
        assert ledger.attempts("patient") == [1]
        assert all(server.running for server in pair)


def test_a_client_learns_of_a_server_that_came_later_when_it_reconnects(
    tmp_path: Path, postgres_url: str, ledger: Ledger
) -> None:
    # given: a client that was given one address, at a server that had no company then
    with start_server(tmp_path, store=postgres_url, data="first") as first, first.client() as client:
        early = client.submit(subject="x.1", job_id="early")
        with start_server(tmp_path, store=postgres_url, data="later") as later, jobs_worker(later, ledger, "--subject", "x.2"):
            until(
                lambda: any(later.url in seen["addresses"] for seen in servers_seen(client)),
                SOON_S,
                "the later server has told where it is",
            )

            # when: its server restarts, and later dies for good
            first.kill()
            first.restart()
            until(lambda: first.url in _addresses(client), SOON_S, "the client is back at the restarted server")
            first.kill()

            # then: it goes on at the other
            assert client.submit(subject="x.2", job_id="late").result(SOON_S) == b"1"
            with jobs_worker(later, ledger, "--subject", "x.1"):
                assert early.result(SOON_S) == b"1"


def _role_that_may_not_notify(postgres: PostgresService, url: str) -> str:
    """The URL of the same database for a user who may do everything with the tables, and nothing else."""
    database = url.rpartition("/")[2]
    role = f"muted_{database}"
    for statement in (
        f"CREATE ROLE {role} LOGIN PASSWORD '{postgres.password}'",
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}",
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}",
        "REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC",
    ):
        postgres.execute(statement, url=url)
    return url.replace(f"//{postgres.user}:", f"//{role}:")


def _addresses(client: Client) -> list[str]:
    """Of the server that the client is connected to."""
    return list(servers_seen(client)[0]["addresses"])


def _json(server: ServerProcess, *arguments: str) -> Any:
    done = server.tasuki(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _workers(client: Client) -> set[str]:
    return {worker.worker_id for worker in client.workers()}


def _expiry(client: Client, job_id: str) -> float:
    return float(client.explain(job_id).facts["lease_expires_at"])
