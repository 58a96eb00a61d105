"""A lease, a worker_id and a subject belong to the peer that was let in: attacks of tokens that are bound to nobody."""

import pytest

from tasuki.core.broker.events import ClusterView, Detach, Hinted, JobSeen, LogQuestion, Publish, WorkerDetached
from tasuki.core.job import JobSpec, Outcome, State
from tasuki.core.protocol import (
    AssignJobs,
    CancelJobs,
    CancelLeases,
    Claim,
    Ending,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloWorker,
    JobsFinished,
    JobsReleased,
    JobsStarted,
    ReadLog,
    Reply,
    Request,
    Welcome,
)
from tasuki.errors import Forbidden, InvalidInput
from tests.core.broker_stage import TCP, BrokerStage

VICTIM = "w1"


def hello(stage: BrokerStage, token: str, worker_id: str = VICTIM, **fields: object) -> int:
    """Say Hello as a worker of this token; the connection, which may have been refused."""
    conn = stage.open(TCP)
    said = {"msg_id": 7, "worker_id": worker_id, "incarnation": f"{worker_id}-1", "patterns": ("a.x",), "token": token}
    stage.ask(conn, HelloWorker(**{**said, **fields}))  # type: ignore[arg-type]
    return conn


def victim(stage: BrokerStage, *, bound: bool = True) -> int:
    token = stage.token("victim", "worker", "b.>", worker_id=VICTIM if bound else "")
    return stage.worker(VICTIM, credit=1, peer=TCP, token=token, patterns=("b.>",))


def beside(stage: BrokerStage, **config: object) -> BrokerStage:
    return BrokerStage(stage, server_id="second", shared=True, **config)


def two_servers() -> tuple[BrokerStage, BrokerStage]:
    first = BrokerStage(server_id="first", shared=True)
    second = beside(first)
    return first, second


def meet(first: BrokerStage, second: BrokerStage) -> None:
    """Let both servers know each other's workers."""
    for stage in (first, second):
        stage.apply(ClusterView((first.broker.info, second.broker.info), frozenset()))


def leased(stage: BrokerStage, **fields: object) -> Claim:
    stage.submit(stage.client(), "secret", subject="b.x", **fields)
    job = stage.store.get(["secret"])[0]
    assert job is not None
    assert job.lease is not None
    return Claim("secret", job.lease.lease_id, job.lease.attempt)


@pytest.mark.parametrize("online", [True, False])
def test_a_token_of_nobody_cannot_take_the_id_of_an_enrolled_worker(online: bool) -> None:
    stage = BrokerStage()
    conn = victim(stage)
    if not online:
        stage.close(conn)

    attacker = hello(stage, stage.token("attacker", "worker", "a.>"))

    assert isinstance(stage.hung_up[attacker], Forbidden)
    assert conn not in stage.hung_up


def test_nor_at_another_server_that_has_never_heard_of_the_worker() -> None:
    first, second = two_servers()
    victim(first)

    attacker = hello(second, second.token("attacker", "worker", "a.>"))

    assert isinstance(second.hung_up[attacker], Forbidden)


def test_the_id_of_a_connected_worker_is_in_use_at_all_servers() -> None:
    first, second = two_servers()
    victim(first, bound=False)
    meet(first, second)

    attacker = hello(second, second.token("attacker", "worker", "a.>"))

    assert isinstance(second.hung_up[attacker], Forbidden)


def test_a_worker_with_the_same_token_moves_to_another_server() -> None:
    first, second = two_servers()
    conn = victim(first, bound=False)
    meet(first, second)

    moved = hello(second, "secret-victim", patterns=("b.>",))

    assert moved not in second.hung_up
    [hint] = [command.hint for command in second.others if isinstance(command, Publish)]
    first.apply(Hinted(hint))
    assert conn in first.hung_up


def test_a_move_of_another_owner_ends_no_connection() -> None:
    first, second = two_servers()
    conn = victim(first, bound=False)
    second.apply(ClusterView((first.broker.info, second.broker.info), frozenset()))
    second.broker.cluster.servers["first"] = first.broker.info.__class__(server_id="first")  # its view is a second old

    attacker = hello(second, second.token("attacker", "worker", "a.>"))

    assert attacker not in second.hung_up
    for hint in [command.hint for command in second.others if isinstance(command, Publish)]:
        first.apply(Hinted(hint))
    assert conn not in first.hung_up


def test_an_enrolled_worker_takes_its_id_back_from_a_token_of_nobody() -> None:
    stage = BrokerStage()
    squatter = hello(stage, stage.token("attacker", "worker", "a.>"))

    conn = victim(stage)

    assert squatter in stage.hung_up
    assert conn not in stage.hung_up


@pytest.fixture
def intruded() -> tuple[BrokerStage, BrokerStage, Claim, int, int]:
    """A job of the victim at one server, and at another the attacker as the same worker_id, in the second before they meet."""
    first, second = two_servers()
    conn = victim(first, bound=False)
    claim = leased(first)
    attacker = hello(second, second.token("attacker", "worker", "a.>"), resumed=True)
    assert attacker not in second.hung_up
    return first, second, claim, conn, attacker


Intruded = tuple[BrokerStage, BrokerStage, Claim, int, int]


def test_what_another_token_holds_is_not_delivered_again(intruded: Intruded) -> None:
    _, second, _, _, attacker = intruded

    second.ask(attacker, Heartbeat(8))

    assert second.all(attacker, AssignJobs) == []


def test_an_impostor_that_knows_the_lease_cannot_start_renew_release_or_report_it(intruded: Intruded) -> None:
    first, second, claim, conn, attacker = intruded
    before = first.store.get(["secret"])

    second.ask(attacker, Heartbeat(8, [claim]))
    second.ask(attacker, JobsStarted([claim]))
    second.ask(attacker, JobsReleased([claim]))
    for outcome in (Outcome(result=b"forged"), Outcome(error_code="EXIT_CODE", permanent=True)):
        second.ask(attacker, JobsFinished([Ending(claim.job_id, claim.lease_id, claim.attempt, outcome)]))

    assert second.all(attacker, HeartbeatAnswer)[0].lost == [claim.lease_id]
    assert first.store.get(["secret"]) == before
    first.ask(conn, JobsFinished([Ending(claim.job_id, claim.lease_id, claim.attempt, Outcome(result=b"right"))]))
    [job] = first.store.get(["secret"])
    assert job is not None
    assert (job.state, job.outcome.result if job.outcome else b"") == (State.SUCCEEDED, b"right")


def test_cancels_and_log_reads_do_not_go_to_an_impostor(intruded: Intruded) -> None:
    first, second, claim, conn, attacker = intruded
    meet(first, second)
    client = second.client("admin", "boss")

    second.ask(client, CancelJobs(9, ["secret"]))
    [job] = second.store.get(["secret"])
    assert job is not None
    second.apply(JobSeen(client, 10, LogQuestion(job_id="secret", attempt=1), job))

    assert second.all(attacker, CancelLeases) == []
    assert second.all(attacker, ReadLog) == []
    assert second.all(client, Reply)[-1].corr_id == 10
    for hint in [command.hint for command in second.others if isinstance(command, Publish)]:
        first.apply(Hinted(hint))
    assert first.last(conn, CancelLeases).lease_ids == [claim.lease_id]


# ---------------------------------------------------------------------------------------------------- names that capture subjects


def test_a_worker_without_credit_captures_no_subject() -> None:
    stage = BrokerStage()
    stage.worker("zpe", patterns=("job.assign.>",))
    honest = stage.worker("honest", credit=1)

    stage.submit(stage.client(), "a", subject="job.assign.zpe")

    assert [grant.job_id for grant in stage.last(honest, AssignJobs).grants] == ["a"]


def test_a_last_token_that_names_a_worker_which_does_not_subscribe_is_a_token_like_any_other() -> None:
    stage = BrokerStage()
    stage.worker("node-3", credit=1, patterns=("elsewhere.>",))
    other = stage.worker("node-1", credit=1, patterns=("lt.>",))

    stage.submit(stage.client(), "a", subject="lt.g.node-3")

    assert [grant.job_id for grant in stage.last(other, AssignJobs).grants] == ["a"]


def test_a_worker_that_gave_credit_is_addressed_by_its_id_also_while_it_is_busy() -> None:
    stage = BrokerStage()
    named = stage.worker("zpe", credit=1)
    honest = stage.worker("honest", credit=5)
    client = stage.client()

    stage.submit(client, "a", "b", subject="job.assign.zpe")

    assert [grant.job_id for grant in stage.last(named, AssignJobs).grants] == ["a"]
    assert stage.all(honest, AssignJobs) == []
    stage.ask(named, GiveCredit(1))
    assert [grant.job_id for grant in stage.last(named, AssignJobs).grants] == ["b"]


def test_a_worker_of_another_server_is_addressed_only_after_it_gave_credit() -> None:
    first, second = two_servers()
    conn = first.worker("zpe", patterns=("job.assign.>",))
    honest = second.worker("honest", credit=1)
    meet(first, second)

    second.submit(second.client(), "a", subject="job.assign.zpe")
    assert [grant.job_id for grant in second.last(honest, AssignJobs).grants] == ["a"]

    first.ask(conn, GiveCredit(1))
    meet(first, second)
    second.ask(honest, GiveCredit(1))
    second.submit(second.client(token_id="bob"), "b", subject="job.assign.zpe")
    assert len(second.all(honest, AssignJobs)) == 1


@pytest.mark.parametrize("name", ["default", "zpe"])
def test_names_that_end_subjects_of_anybody_are_refused_as_worker_ids(name: str) -> None:
    stage = BrokerStage(apps=("zpe",))

    conn = hello(stage, stage.token("attacker", "worker"), name)

    assert isinstance(stage.hung_up[conn], InvalidInput)


def test_a_job_without_a_subject_ends_in_a_reserved_name() -> None:
    assert JobSpec(job_id="a").subject == "job.assign.default"


# ---------------------------------------------------------------------------------------------------- leases and their tokens


def test_a_worker_gets_no_longer_lease_and_grace_than_the_server_allows() -> None:
    stage = BrokerStage(lease_ttl_max_s=30.0, grace_max_s=10.0)
    token = stage.token("attacker", "worker")

    conn = stage.worker("w9", peer=TCP, token=token, ttl_s=3600.0, on_disconnect="keep", reconnect_grace_s=3600.0, credit=5)

    assert stage.last(conn, Welcome).lease_ttl_s == 30.0
    stage.submit(stage.client(), "a")
    [job] = stage.store.get(["a"])
    assert job is not None
    assert job.lease is not None
    assert (job.lease.expires_at - stage.clock.lease(), job.lease.reconnect_grace_s) == (32.0, 10.0)


@pytest.mark.parametrize("verb", ["token.revoke", "worker.revoke"])
def test_revoking_ends_the_leases_of_the_token_at_once(verb: str) -> None:
    stage = BrokerStage()
    token = stage.token("victim", "worker", worker_id="w9" if verb == "worker.revoke" else "")
    conn = stage.worker("w9", peer=TCP, token=token, ttl_s=600.0, on_disconnect="keep", reconnect_grace_s=3600.0, credit=2)
    stage.submit(stage.client(), "started", "unstarted")
    leases = {grant.job_id: grant for message in stage.all(conn, AssignJobs) for grant in message.grants}
    stage.ask(conn, JobsStarted([Claim("started", leases["started"].lease_id, 1)]))
    stage.close(conn)

    stage.request(stage.client("admin", "boss"), verb, token_id="victim", worker_id="w9")

    jobs = stage.store.get(["started", "unstarted"])
    assert [(job.state, job.losses) for job in jobs if job] == [(State.PENDING, 1), (State.PENDING, 0)]


def test_a_worker_that_is_detached_now_loses_its_jobs_and_is_told() -> None:
    stage = BrokerStage()
    token = stage.token("shared", "worker")
    conn = stage.worker("w9", peer=TCP, token=token, ttl_s=600.0, on_disconnect="keep", reconnect_grace_s=3600.0, credit=2)
    stage.submit(stage.client(), "started", "unstarted")
    leases = {grant.job_id: grant.lease_id for message in stage.all(conn, AssignJobs) for grant in message.grants}
    stage.ask(conn, JobsStarted([Claim("started", leases["started"], 1)]))
    other = stage.worker("w8", peer=TCP, token=token, credit=1)
    stage.submit(stage.client(), "other")

    boss = stage.client("admin", "boss")
    stage.ask(boss, Request(9, "detach", {"worker_id": "w9", "now": True}))
    [detach] = [command for command in stage.others if isinstance(command, Detach)]
    stage.apply(ClusterView((), frozenset({"w9"})))
    stage.apply(WorkerDetached(detach.worker_id))
    stage.turns()

    assert detach.now
    jobs = stage.store.get(["started", "unstarted", "other"])
    assert [(job.state, job.losses) for job in jobs if job] == [(State.PENDING, 1), (State.PENDING, 0), (State.ASSIGNED, 0)]
    assert sorted(stage.last(conn, CancelLeases).lease_ids) == sorted(leases.values())
    assert stage.all(other, CancelLeases) == []


def test_leases_that_another_server_granted_after_the_revocation_end_when_it_hears_of_it() -> None:
    first, second = two_servers()
    token = first.token("victim", "worker")
    conn = second.worker("w9", peer=TCP, token=token, credit=1)
    meet(first, second)
    first.request(first.client("admin", "boss"), "token.revoke", token_id="victim")
    second.submit(second.client(), "a")
    assert second.all(conn, AssignJobs)

    for hint in [command.hint for command in first.others if isinstance(command, Publish)]:
        second.apply(Hinted(hint))
    second.turns()

    [job] = second.store.get(["a"])
    assert conn in second.hung_up
    assert job is not None
    assert (job.state, job.losses) == (State.PENDING, 0)


def test_an_exchange_of_the_token_ends_no_lease() -> None:
    stage = BrokerStage()
    conn = victim(stage)
    leased(stage)

    answer = stage.request(conn, "worker.rotate", token_id="new", sha256="0" * 64)

    [job] = stage.store.get(["secret"])
    assert isinstance(answer, Reply)
    assert job is not None
    assert job.state is State.ASSIGNED
