"""Access over a real door: who is let in, and who may see and do what (docs/concepts.md, Tokens)."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.core.protocol import AssignJobs, BlobGet, Chunk, ErrorMessage, GiveCredit, Reply, Welcome
from tasuki.errors import Forbidden, NotFound, TasukiError, Unauthorized
from tests.doors.raw import RawPeer
from tests.support.processes import ServerProcess

pytestmark = pytest.mark.e2e
Served = Callable[[], None]


# ---------------------------------------------------------------------------------------------------- coming in


def client_hello(peer: RawPeer, token: str) -> ErrorMessage | Welcome:
    return peer.hello_client(token)  # type: ignore[return-value]


def worker_hello(peer: RawPeer, token: str) -> ErrorMessage | Welcome:
    return peer.hello_worker(token, patterns=("nothing.here",))  # type: ignore[return-value]


@pytest.mark.parametrize("hello", [client_hello, worker_hello])
@pytest.mark.parametrize("token", ["", "tsk_a_wrong", "x" * 30_000, "\0", "'; DROP TABLE tasuki_token; --", "ü" * 100])
def test_wrong_token_is_refused_with_a_code_and_without_an_echo(
    server: ServerProcess, others_are_served: Served, hello: Callable[[RawPeer, str], ErrorMessage], token: str
) -> None:
    with RawPeer(server.url) as peer:
        error = hello(peer, token)
        assert isinstance(error, ErrorMessage)
        assert error.code == "UNAUTHORIZED"
        assert not token or token not in error.message
        assert peer.ending() == []
    others_are_served()


def test_a_subject_below_job_submit_is_below_job_assign_on_every_listener(server: ServerProcess) -> None:
    with server.client(token=server.create_token("client", scope=["job.assign.books"])) as over_tcp:
        assert over_tcp.status(over_tcp.submit(subject="job.submit.books", watch=False).job_id).subject == "job.assign.books"
    with Client(f"unix://{server.folder.socket}") as over_unix:
        assert over_unix.status(over_unix.submit(subject="job.submit.books", watch=False).job_id).subject == "job.assign.books"


@pytest.mark.parametrize(
    ("kind", "as_client", "as_worker"),
    [("admin", None, "FORBIDDEN"), ("client", None, "FORBIDDEN"), ("worker", "UNAUTHORIZED", None)],
)
def test_each_kind_of_token_has_its_role(server: ServerProcess, kind: str, as_client: str | None, as_worker: str | None) -> None:
    token = server.create_token(kind)
    for hello, code in ((client_hello, as_client), (worker_hello, as_worker)):
        with RawPeer(server.url) as peer:
            answer = hello(peer, token)
            if code is None:
                assert isinstance(answer, Welcome)
                assert answer.kind == kind
            else:
                assert isinstance(answer, ErrorMessage)
                assert answer.code == code
                assert "token create" in answer.message
                assert peer.ending() == []


def test_expired_token_is_refused(server: ServerProcess) -> None:
    token = server.create_token("client", expires_at=time.time() - 1)
    with pytest.raises(Unauthorized, match="expired"):
        Client(server.url, token=token, connect_timeout_s=5)


def test_revoked_token_is_refused_and_its_connections_end(server: ServerProcess, others_are_served: Served) -> None:
    # Given a token in use
    token_id, token = server.create_named_token("client")
    with RawPeer(server.url) as peer:
        peer.as_client(token)
        # When it is revoked
        with server.client() as admin:
            admin.wait(admin.aio.call("token.revoke", token_id=token_id))
        # Then its connection ends with that reason, and nobody comes in with it any more
        error = peer.farewell()
        assert error.code == "UNAUTHORIZED"
        assert "revoked" in error.message
    with pytest.raises(Unauthorized, match="revoked"):
        Client(server.url, token=token, connect_timeout_s=5)
    others_are_served()


def test_tokens_are_not_in_the_log_nor_in_the_database_files(server: ServerProcess) -> None:
    secrets = [server.create_token("client"), server.token]
    with server.client(token=secrets[0]) as client:
        client.submit(subject="noop").result(timeout=30)
    assert not any(secret in server.output() for secret in secrets)
    for path in server.data.rglob("*"):
        if path.is_file() and path != server.folder.token_file:
            data = path.read_bytes()
            assert not any(secret.encode() in data for secret in secrets), path
    assert server.folder.token_file.stat().st_mode & 0o777 == 0o600


# ---------------------------------------------------------------------------------------------------- whose job it is


@pytest.fixture(scope="module")
def owner(server: ServerProcess) -> Iterator[Client]:
    with server.client(token=server.create_token("client")) as client:
        yield client


@pytest.fixture(scope="module")
def stranger(server: ServerProcess) -> Iterator[Client]:
    with server.client(token=server.create_token("client")) as client:
        yield client


@pytest.fixture(scope="module")
def overseer(server: ServerProcess) -> Iterator[Client]:
    """A client whose token's scope covers the jobs."""
    with server.client(token=server.create_token("client", scope=["echo.private.>"])) as client:
        yield client


@pytest.fixture(scope="module")
def elsewhere(server: ServerProcess) -> Iterator[Client]:
    """A client whose token's scope covers other jobs."""
    with server.client(token=server.create_token("client", scope=["echo.public.>"])) as client:
        yield client


@pytest.fixture(scope="module")
def admin(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def finished(owner: Client) -> str:
    job = owner.submit(subject="echo.private.one", payload=b"the secret result")
    assert job.result(timeout=30) == b"the secret result"
    return job.job_id


@pytest.fixture
def pending(owner: Client) -> str:
    return owner.submit(subject="nobody.takes", watch=False).job_id


VERBS: dict[str, Callable[[Client, str], object]] = {
    "status": lambda client, job_id: client.status(job_id),
    "result-in-status": lambda client, job_id: client.call("get", job_ids=[job_id], result=True),
    "explain": lambda client, job_id: client.explain(job_id),
    "watch": lambda client, job_id: client.job(job_id).result(timeout=30),
    "cancel": lambda client, job_id: client.cancel(job_id),
    "retry": lambda client, job_id: client.retry(job_id),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("who", ["stranger", "elsewhere"])
def test_job_of_another_submitter_does_not_exist_for_a_client(
    request: pytest.FixtureRequest, owner: Client, finished: str, who: str, verb: str
) -> None:
    client: Client = request.getfixturevalue(who)
    with pytest.raises(NotFound) as refused:
        VERBS[verb](client, finished)
    # The same words as for a job that is not there: its existence is not told either.
    with pytest.raises(NotFound) as unknown:
        VERBS[verb](client, "no-such-job")
    assert refused.value.message.replace(finished, "no-such-job") == unknown.value.message
    assert owner.status(finished).state == "SUCCEEDED"
    assert owner.status(finished).generation == 0


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("who", ["owner", "overseer", "admin"])
def test_submitter_scope_and_admin_may_see_and_do_everything_with_a_job(
    request: pytest.FixtureRequest, finished: str, who: str, verb: str
) -> None:
    assert VERBS[verb](request.getfixturevalue(who), finished)


def test_one_foreign_id_among_own_ones_refuses_the_whole_cancel(stranger: Client, owner: Client, pending: str) -> None:
    mine = stranger.submit(subject="nobody.takes", watch=False).job_id
    with pytest.raises(NotFound):
        stranger.cancel(mine, pending)
    assert owner.status(pending).state == "PENDING"
    assert stranger.status(mine).state == "PENDING"


def test_find_shows_only_what_a_client_may_see(
    owner: Client, stranger: Client, overseer: Client, admin: Client, finished: str, pending: str
) -> None:
    def seen(client: Client, **filter: object) -> set[str]:
        return {job["job_id"] for job in client.call("find", limit=1000, **filter)["jobs"]}

    assert {finished, pending} <= seen(owner)
    assert {finished, pending} <= seen(admin)
    assert finished in seen(overseer)
    assert pending not in seen(overseer)
    assert not {finished, pending} & seen(stranger)
    # Asking for another's jobs by name of the submitter, or with a scope of one's own, does not help.
    submitter = owner.status(finished).submitter
    assert not {finished, pending} & seen(stranger, submitter=submitter)
    assert not {finished, pending} & seen(stranger, scope=[">"])


def test_same_id_and_body_from_another_submitter_gives_nothing_away(stranger: Client, finished: str) -> None:
    with pytest.raises(Forbidden) as refused:
        stranger.submit(job_id=finished, subject="echo.private.one", payload=b"the secret result")
    assert "secret" not in refused.value.message


def test_same_id_and_other_body_from_another_submitter_names_no_fields(stranger: Client, finished: str) -> None:
    """A Conflict would tell a stranger, guess by guess, what another's job contains."""
    with pytest.raises(TasukiError) as refused:
        stranger.submit(job_id=finished, subject="echo.private.one", payload=b"a guess")
    assert refused.value.code == "FORBIDDEN"


def test_rerun_of_anothers_failed_job_is_refused(owner: Client, stranger: Client) -> None:
    body = {"subject": "fail", "payload": b"no", "retries": 0}
    job = owner.submit(**body)
    assert job.outcome(timeout=30).state == "FAILED"
    with pytest.raises(Forbidden):
        stranger.submit(job_id=job.job_id, on_failed="rerun", **body)
    assert owner.status(job.job_id).generation == 0


def test_scope_of_a_client_token_limits_where_it_may_submit(overseer: Client) -> None:
    with pytest.raises(Forbidden, match="scope"):
        overseer.submit(subject="math.square", payload=b"2")
    assert overseer.submit(subject="echo.private.two", payload=b"yes").result(timeout=30) == b"yes"


def test_scope_of_a_worker_token_limits_what_it_may_take(server: ServerProcess) -> None:
    token = server.create_token("worker", scope=["render.eu.>"])
    for patterns, allowed in [(("render.eu.*",), True), (("render.us.*",), False), ((">",), False), (("render.>",), False)]:
        with RawPeer(server.url) as peer:
            answer = peer.hello_worker(token, patterns=patterns)
            assert isinstance(answer, Welcome if allowed else ErrorMessage), (patterns, answer)


@pytest.mark.parametrize("verb", ["counts", "workers", "token.list", "token.create", "token.revoke"])
def test_operators_verbs_need_an_admin_token(stranger: Client, admin: Client, verb: str) -> None:
    with pytest.raises(Forbidden, match="admin"):
        stranger.wait(stranger.aio.call(verb, token_id="x", kind="admin", sha256="5" * 64))


def test_token_list_shows_no_hashes(admin: Client) -> None:
    rows = admin.wait(admin.aio.call("token.list"))
    assert rows
    assert all("sha256" not in row for row in rows)


# ---------------------------------------------------------------------------------------------------- blobs


@pytest.fixture(scope="module")
def blob(server: ServerProcess, owner: Client, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(job_id, sha256) of a job with a large input that nobody has taken."""
    path: Path = tmp_path_factory.mktemp("blob") / "input.bin"
    path.write_bytes(os.urandom(100_000))
    job = owner.submit(subject="blob.private.one", files=[path], watch=False)
    return job.job_id, hashlib.sha256(path.read_bytes()).hexdigest()


def read_blob(peer: RawPeer, job_id: str, sha256: str) -> str:
    """The error's code, or "read"."""
    msg_id = peer.next_id()
    peer.send(BlobGet(msg_id, sha256, job_id))
    answer = peer.answer(msg_id)
    assert isinstance(answer, Chunk | ErrorMessage)
    return answer.code if isinstance(answer, ErrorMessage) else "read"


def test_input_of_a_job_is_read_by_those_who_may_see_it_and_nobody_else(
    server: ServerProcess, owner: Client, blob: tuple[str, str]
) -> None:
    tokens = {
        "admin": (server.token, "read"),
        "scope": (server.create_token("client", scope=["blob.private.*"]), "read"),
        "stranger": (server.create_token("client"), "NOT_FOUND"),
    }
    for who, (token, expected) in tokens.items():
        with RawPeer(server.url) as peer:
            peer.as_client(token)
            assert read_blob(peer, *blob) == expected, who


def test_knowing_a_sha256_is_not_enough(server: ServerProcess, blob: tuple[str, str]) -> None:
    # Given a stranger with a job of its own
    with RawPeer(server.url) as peer:
        peer.as_client(server.create_token("client"))
        with server.client(token=server.create_token("client")) as client:
            own = client.submit(subject="nobody.takes", watch=False).job_id
        # When it asks for the blob through that job, or through none
        assert read_blob(peer, own, blob[1]) == "NOT_FOUND"
        assert read_blob(peer, "no-such-job", blob[1]) == "NOT_FOUND"


def test_result_blob_is_read_only_by_those_who_may_see_the_job(server: ServerProcess, owner: Client, stranger: Client) -> None:
    job = owner.submit(subject="big", payload=b"200000")
    ended = job.outcome(timeout=30)
    assert ended.outcome.result_ref is not None
    assert len(job.result(timeout=30)) == 199_680
    with pytest.raises(NotFound):
        stranger.wait(stranger.aio.result_bytes(ended))


def test_worker_reads_the_inputs_of_the_job_it_holds_and_no_others(
    server: ServerProcess, owner: Client, blob: tuple[str, str], tmp_path: Path
) -> None:
    # Given a job with an input, for a worker that speaks bytes
    path = tmp_path / "own.bin"
    path.write_bytes(os.urandom(100_000))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    token = server.create_token("worker")
    job_id = owner.submit(subject="blob.worker.one", files=[path], watch=False).job_id
    with RawPeer(server.url) as peer:
        peer.as_worker(token, worker_id="blob-reader", patterns=("blob.worker.*",))
        # Before it holds the job it may not read it
        assert read_blob(peer, job_id, sha256) == "NOT_FOUND"
        peer.send(GiveCredit(1))
        assert isinstance(peer.receive(), AssignJobs)
        # Then it may, and it alone, and nothing else
        assert read_blob(peer, job_id, sha256) == "read"
        with RawPeer(server.url) as other:
            other.as_worker(token, worker_id="other-reader", patterns=("nothing.here",))
            assert read_blob(other, job_id, sha256) == "NOT_FOUND"
            assert read_blob(other, *blob) == "NOT_FOUND"
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        assert isinstance(peer.ask("get", job_ids=[job_id]), Reply)
