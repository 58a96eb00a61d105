"""A worker behind NAT: it has HTTPS to the server, through a line that the test cuts and mends, and nothing else."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tasuki import Client
from tasuki.cli.output import ExitCode
from tasuki.core.access import token_sha256
from tasuki.core.address import parse_url
from tasuki.server.assembly import make_secret
from tests.e2e.stage import SOON_S, Ledger, command_worker, stdout_of
from tests.e2e.wire import Wire
from tests.support.certificates import TestAuthority
from tests.support.processes import ServerProcess, WorkerProcess, alive, start_server
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

LEASE_TTL_S = 2.0
CUT_S = 3 * LEASE_TTL_S
HTTP_LEASE_TTL_S = 60.0  # the default of `tasuki worker` over HTTP
BACK_S = 15.0  # the longest pause between two tries to connect is 5 s; the rest is for a machine with more processes than cores
STORY_S = 60.0
TALK = 'echo one; echo "progress 0.4 warm" >&3; while [ ! -e "$1" ]; do sleep 0.02; done; echo two'


class Place:
    """A server with an HTTPS door, and what its workers need to come in."""

    def __init__(self, folder: Path, server: ServerProcess, authority: TestAuthority) -> None:
        self.folder, self.server, self.authority = folder, server, authority
        self.ledger = Ledger(folder / "ledger")
        (folder / "talk.sh").write_text(TALK)

    @property
    def http_port(self) -> int:
        return parse_url(self.server.http_url)[0].port

    def client(self) -> Client:
        return self.server.client(self.server.unix_url)

    def ask(self, verb: str, **params: Any) -> Any:
        with self.client() as client:
            return client.wait(client.aio.call(verb, **params))

    def gate(self, name: str) -> Path:
        return self.folder / f"gate-{name}"


class Seat(NamedTuple):
    """A worker of one subject, its line, its folder and its token."""

    name: str
    wire: Wire
    token_id: str
    process: WorkerProcess
    folder: Path


@contextlib.contextmanager
def seated(place: Place, name: str, *, takes: str = "", wire: Wire | None = None, folder: Path | None = None) -> Iterator[Seat]:
    """`tasuki worker --to https://…` for the subjects `name.>`, connected."""
    token_id, secret = secrets.token_hex(6), make_secret("worker")
    place.ask("token.create", token_id=token_id, kind="worker", sha256=token_sha256(secret), scope=[], expires_at=None)
    token_file = place.folder / f"{token_id}.token"
    token_file.touch(0o600)
    token_file.write_text(secret)
    folder = folder or place.folder / f"worker-{name}"
    with contextlib.ExitStack() as stack:
        wire = wire or stack.enter_context(Wire("127.0.0.1", place.http_port))
        worker = command_worker(
            f"https://127.0.0.1:{wire.port}",
            place.ledger,
            *("--exec", f"talk=/bin/sh {place.folder / 'talk.sh'} {{args}}"),
            *("--subject", f"{takes or name}.>", "--worker-id", name, "--data", str(folder), "--slots", "2"),
            *("--tls-ca", place.authority.ca, "--token-file", str(token_file)),
            *("--lease-ttl", f"{LEASE_TTL_S:g}", "--reconnect-grace", "0"),
            log=place.folder / f"{token_id}.log",
        )
        yield Seat(name, wire, token_id, stack.enter_context(worker), folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("https")
    authority = TestAuthority(folder / "ca")
    cert, key = authority.issue()
    with start_server(folder, "--http", "127.0.0.1:0", "--tls-cert", cert, "--tls-key", key) as server:
        yield Place(folder, server, authority)


@pytest.fixture(scope="module")
def client(place: Place) -> Iterator[Client]:
    with place.client() as client:
        yield client


@pytest.fixture(scope="module")
def lab(place: Place) -> Iterator[Seat]:
    """A worker whose line is good."""
    with seated(place, "lab") as seat:
        yield seat


def hold(client: Client, place: Place, name: str, subject: str) -> Any:
    """A job that waits for its gate, and runs."""
    job = client.submit(subject=f"{subject}.1", exec="step", args=["hold", str(place.gate(name))], job_id=name)
    place.ledger.wait_for(name)
    return job


def test_it_offers_its_programs_and_is_given_no_other(lab: Seat, client: Client) -> None:
    other = client.submit(subject="lab.1", exec="nobodys")

    assert client.submit(subject="lab.1", exec="step").outcome(BACK_S).state == "SUCCEEDED"
    [offered] = [worker.execs for worker in client.workers() if worker.worker_id == lab.name]
    assert offered == ("step", "talk")
    assert (client.status(other.job_id).attempt, client.explain(other.job_id).facts["why"]) == (0, "OTHER_KIND")
    client.cancel(other.job_id)


# ---------------------------------------------------------------------------------------------------- the line is cut


class Story(NamedTuple):
    """The fate of the jobs of three workers whose lines were cut."""

    kept: Seat
    kept_result: str
    kept_cut_s: float
    taken: Seat
    taken_result: str
    taken_runs: int
    saved_result: str
    saved_state: str
    """Before its worker was started again."""


@pytest.fixture(scope="module")
def cut_off(place: Place) -> Iterator[Cut]:
    """The story takes some seconds of waiting: it goes on beside the tests that do not need it."""
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        yield pool.submit(_story, place, stack)


def _story(place: Place, stack: contextlib.ExitStack) -> Story:
    with ThreadPoolExecutor(3) as pool:
        seats = list(pool.map(lambda name: stack.enter_context(seated(place, name)), ("kept", "taken", "saved")))
    kept, taken, saved = seats
    client = stack.enter_context(place.client())
    jobs = {seat.name: hold(client, place, seat.name, seat.name) for seat in seats}
    # when: their lines are cut, each in its own way; two of the jobs end, and for the third there is another worker
    kept.wire.freeze()
    taken.wire.cut()
    saved.wire.cut()
    began = time.monotonic()
    for name in ("kept", "saved"):
        place.gate(name).touch()
    stack.enter_context(seated(place, "other", takes="taken"))
    # and: one is killed when its result is on disk; its next process has a line
    until(lambda: any((saved.folder / "endings" / "saved").glob("*")), BACK_S, "the ending is saved")
    saved.process.kill()
    saved_state = str(client.status("saved").state)
    saved.wire.mend()
    saved.process.start_again()
    # and: the others have theirs again, when the other worker has done the job of one, and after three lease times
    place.ledger.wait_for("taken", 2, BACK_S)
    place.gate("taken").touch()
    taken_result = stdout_of(jobs["taken"].result(BACK_S))
    taken.wire.mend()
    until(lambda: time.monotonic() - began >= CUT_S, CUT_S + 1, "three lease times are over")
    kept_cut_s = time.monotonic() - began
    kept.wire.mend()
    return Story(
        kept,
        stdout_of(jobs["kept"].result(BACK_S)),
        kept_cut_s,
        taken,
        taken_result,
        len({run.pid for run in place.ledger.of("taken")}),
        stdout_of(jobs["saved"].result(BACK_S)),
        saved_state,
    )


Cut = Future[Story]


# ---------------------------------------------------------------------------------------------------- while the line is good


def test_a_cancel_reaches_the_worker_within_a_second_and_logs_and_progress_come_through(
    place: Place, client: Client, cut_off: Cut, lab: Seat
) -> None:
    job = client.submit(subject="lab.1", exec="talk", args=[str(place.gate("talk"))], job_id="talk")
    pieces = client.logs("talk")
    assert next(pieces) == b"one\n"
    until(lambda: client.status("talk").progress == 0.4, SOON_S, "progress is told")
    place.gate("talk").touch()
    assert b"".join(pieces) == b"two\n"
    assert stdout_of(job.result(SOON_S)) == "one\ntwo\n"

    hold(client, place, "canceled", "lab")
    [run] = place.ledger.of("canceled")
    began = time.monotonic()
    client.cancel("canceled")
    until(lambda: not Path(f"/proc/{run.pid}").exists(), SOON_S, "it is stopped")
    assert time.monotonic() - began < 1.0
    until(lambda: client.status("canceled").state == "CANCELED", SOON_S, "it is canceled")


@pytest.mark.parametrize("running", [False, True], ids=["idle", "with a job"])
def test_a_worker_says_little(place: Place, client: Client, cut_off: Cut, lab: Seat, running: bool) -> None:
    if running:
        hold(client, place, "quiet", "lab")
    before, began = (lab.wire.said_records, lab.wire.carried_bytes, lab.wire.connections), time.monotonic()

    # a heartbeat, its answer through the poll, and the next poll, three times or more
    until(lambda: lab.wire.said_records >= before[0] + 9, SOON_S, "it goes on")

    lasted_s = time.monotonic() - began
    beats = lasted_s / (LEASE_TTL_S / 3)
    records, carried, connections = (
        after - earlier
        for after, earlier in zip((lab.wire.said_records, lab.wire.carried_bytes, lab.wire.connections), before, strict=True)
    )
    per_second = carried / beats / (HTTP_LEASE_TTL_S / 3)
    print(f"{records / beats:.1f} records and {carried / beats:.0f} bytes per heartbeat: {per_second:.0f} bytes/s by default")
    assert records <= 6 * (beats + 1)
    assert per_second <= 2000 / 4
    assert connections <= 1
    place.gate("quiet").touch()
    if running:
        until(lambda: client.status("quiet").state == "SUCCEEDED", SOON_S, "it has ended")


# ---------------------------------------------------------------------------------------------------- when it was cut


def test_a_job_goes_on_while_the_line_is_cut_and_its_result_is_accepted(place: Place, client: Client, cut_off: Cut) -> None:
    told = cut_off.result(STORY_S)

    assert told.kept_cut_s >= CUT_S
    assert told.kept_result == "attempt 1\n"
    assert place.ledger.attempts("kept") == [1]
    assert "connection lost" in told.kept.process.output()
    assert client.status("kept").attempt == 1


def test_what_another_worker_took_meanwhile_is_the_others_and_the_first_result_is_kept_aside(
    client: Client, cut_off: Cut
) -> None:
    told = cut_off.result(STORY_S)

    assert (told.taken_result, told.taken_runs) == ("attempt 2\n", 2)
    aside = told.taken.folder / "kept-aside" / "taken-1"
    until(lambda: (aside / "about.json").exists(), BACK_S, "it is kept aside")
    about = json.loads((aside / "about.json").read_bytes())
    assert (about["job_id"], about["attempt"], about["error_code"]) == ("taken", 1, None)
    assert stdout_of((aside / about["file"]).read_bytes()) == "attempt 1\n"
    assert client.status("taken").attempt == 2


def test_a_result_that_waits_on_disk_is_accepted_from_the_next_process(place: Place, cut_off: Cut) -> None:
    told = cut_off.result(STORY_S)

    assert told.saved_state != "SUCCEEDED"
    assert told.saved_result == "attempt 1\n"
    assert place.ledger.attempts("saved") == [1]


# ---------------------------------------------------------------------------------------------------- others that end


def test_a_server_that_is_killed_and_started_again_takes_the_result(
    place: Place, client: Client, cut_off: Cut, lab: Seat
) -> None:
    cut_off.result(STORY_S)
    job = hold(client, place, "outlives", "lab")

    place.server.kill()
    place.server.restart()
    lab.wire.target = ("127.0.0.1", place.http_port)
    place.gate("outlives").touch()

    assert stdout_of(job.result(BACK_S)) == "attempt 1\n"
    assert place.ledger.attempts("outlives") == [1]
    assert lab.process.running


def test_a_worker_whose_token_is_revoked_stops_its_jobs_and_says_why(
    place: Place, client: Client, cut_off: Cut, lab: Seat
) -> None:
    cut_off.result(STORY_S)
    hold(client, place, "orphan", "lab")
    [run] = place.ledger.of("orphan")

    place.ask("token.revoke", token_id=lab.token_id)

    assert lab.process.wait(SOON_S) == ExitCode.FORBIDDEN
    assert not alive(run.pid)
    assert f"token {lab.token_id} was revoked" in lab.process.output()
