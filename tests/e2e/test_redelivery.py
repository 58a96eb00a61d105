"""Redelivery between the server's word and the worker's: shown with a worker that speaks the bare protocol."""

from __future__ import annotations

import io
import itertools
import time
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.core.job import Outcome
from tasuki.core.protocol import (
    AssignJobs,
    Ending,
    GiveCredit,
    Heartbeat,
    JobsFinished,
    JobsRecorded,
    Message,
)
from tests.doors.raw import RawPeer
from tests.e2e.stage import LOST_WITHIN_S, SOON_S, Ledger, in_background, jobs_worker, story
from tests.support.processes import ServerProcess

pytestmark = pytest.mark.e2e

SUCCESS = Outcome(result=b"mine", result_sha256=sha256(b"mine").hexdigest())


def next_of(peer: RawPeer, kind: type[Message], timeout: float = SOON_S) -> Message:
    """The next message of this kind; others are left out."""
    deadline = time.monotonic() + timeout
    while True:
        message = peer.receive(max(0.01, deadline - time.monotonic()))
        assert message is not None, f"the server hung up instead of sending {kind.__name__}"
        if isinstance(message, kind):
            return message


def test_an_assignment_without_a_sign_is_sent_again_with_growing_waits(
    shared_server: ServerProcess, shared_client: Client
) -> None:
    # given: a worker that takes a job and says nothing
    with RawPeer(shared_server.url).as_worker(shared_server.create_token("worker"), patterns=("silent.>",)) as peer:
        peer.send(GiveCredit(1))
        job = shared_client.submit(subject="silent.1", job_id="silent")
        first = next_of(peer, AssignJobs).grants[0]
        times = [time.monotonic()]

        # when: it keeps silent about it
        again = []
        for _ in range(2):
            again.append(next_of(peer, AssignJobs).grants[0])
            times.append(time.monotonic())

        # then: the same attempt under the same lease comes again, each time later
        assert {(grant.job_id, grant.attempt, grant.lease_id) for grant in again} == {("silent", 1, first.lease_id)}
        waits = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert waits[0] > 1.5
        assert waits[1] > 1.5 * waits[0]

        # and: its report is taken
        peer.send(JobsFinished([Ending("silent", first.lease_id, 1, SUCCESS)]))
        assert next_of(peer, JobsRecorded).recorded == [first.lease_id]
        assert job.result(SOON_S) == b"mine"
        assert shared_client.status("silent").attempt == 1


def test_a_finish_is_recorded_once_however_often_it_is_said(shared_server: ServerProcess, shared_client: Client) -> None:
    with RawPeer(shared_server.url).as_worker(shared_server.create_token("worker"), patterns=("twice.>",)) as peer:
        peer.send(GiveCredit(1))
        job = shared_client.submit(subject="twice.1", job_id="twice")
        grant = next_of(peer, AssignJobs).grants[0]

        for _ in range(2):
            peer.send(JobsFinished([Ending("twice", grant.lease_id, 1, SUCCESS)]))
            assert next_of(peer, JobsRecorded).recorded == [grant.lease_id]

        # and: another outcome of the same attempt is refused
        other = Outcome(result=b"other", result_sha256=sha256(b"other").hexdigest())
        peer.send(JobsFinished([Ending("twice", grant.lease_id, 1, other)]))
        assert [lease_id for lease_id, _ in next_of(peer, JobsRecorded).fenced] == [grant.lease_id]
        assert job.result(SOON_S) == b"mine"
        assert shared_client.counts()["twice"].succeeded == 1


def test_a_finish_after_the_lease_was_given_to_another_is_fenced(server: ServerProcess, client: Client, ledger: Ledger) -> None:
    # given: a worker that took a job, never renewed it, and lost it to another one
    with RawPeer(server.url).as_worker(server.create_token("worker"), patterns=("late.>",)) as peer:
        peer.send(GiveCredit(1))
        job = client.submit(subject="late.1", job_id="late")
        grant = next_of(peer, AssignJobs).grants[0]
        with jobs_worker(server, ledger, "--slots", "1"):
            ledger.wait_for("late", 2, LOST_WITHIN_S)
            assert job.result(SOON_S) == b"2"

    # when: it says that it has finished, on a new connection or an old one
    with RawPeer(server.url).as_worker(server.create_token("worker"), patterns=("late.>",)) as peer:
        peer.send(Heartbeat(peer.next_id()), JobsFinished([Ending("late", grant.lease_id, 1, SUCCESS)]))
        refused = next_of(peer, JobsRecorded).fenced

    # then: refused, with a reason, and kept in the job's story; the result stays what it was
    assert [lease_id for lease_id, reason in refused if reason] == [grant.lease_id]
    assert story(client, "late") == ["lost", "fenced"]
    assert client.job("late").result(SOON_S) == b"2"


def test_the_smallest_result_of_a_command_that_the_protocol_allows_is_taken_by_all_that_read_it(
    shared_server: ServerProcess, shared_client: Client, tmp_path: Path
) -> None:
    # given: a worker of another make that runs commands, and ends them with no more than docs/wire.md asks for
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        for name, content in (("stdout.log", ""), ("stderr.log", ""), ("result.json", "{}")):
            members.writestr(name, content)
    result = archive.getvalue()
    smallest = Outcome(result=result, result_sha256=sha256(result).hexdigest())
    token = shared_server.create_token("worker")
    with (
        RawPeer(shared_server.url).as_worker(token, patterns=("bare.>",), takes="commands", execs=("tool",)) as peer,
        # when: somebody runs one there
        in_background(shared_server.tasuki, "run", "--subject", "bare.1", "--job-id", "bare", "tool") as run,
    ):
        peer.send(GiveCredit(1))
        [grant] = next_of(peer, AssignJobs).grants
        peer.send(JobsFinished([Ending("bare", grant.lease_id, 1, smallest)]))
        assert next_of(peer, JobsRecorded).recorded == [grant.lease_id]

    # then: it has succeeded and written nothing, for everybody who asks
    ran = run.result()
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    logs = shared_server.tasuki("logs", "bare")
    assert (logs.returncode, logs.stdout, logs.stderr) == (0, "", "")
    extracted = shared_server.tasuki("result", "bare", "--extract", str(tmp_path / "out"))
    assert extracted.returncode == 0, extracted.stderr
    assert (tmp_path / "out" / "stdout.log").read_bytes() == b""
    assert shared_client.job("bare").outcome(SOON_S).state == "SUCCEEDED"
