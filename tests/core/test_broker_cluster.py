"""Several brokers on one store: what each hints at, what it hears, and what it looks for by itself."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.core.broker.cluster import POLL_INTERVAL_S, POLLED_JOBS, SPARE_LOOKERS
from tasuki.core.broker.events import AskEnded, AskRevoked, ClusterView, Elected, Hinted, Publish, SomeEnded, SomeRevoked
from tasuki.core.broker.other_servers import READY_SUBJECTS_MAX
from tasuki.core.cluster_messages import Hint
from tasuki.core.election import TakeOver
from tasuki.core.job import JobSpec, State
from tasuki.core.protocol import (
    CancelJobs,
    CancelLeases,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloClient,
    JobsFinished,
    Results,
    SubmitJobs,
    Welcome,
)
from tasuki.core.store_messages import Takes
from tasuki.errors import ProtocolError, Unauthorized
from tests.core.broker_stage import TCP, UNIX, BrokerStage, ending


class Pair:
    """Two servers, `a` and `b`, that know of each other."""

    def __init__(self) -> None:
        self.a = BrokerStage(shared=True, server_id="a", host="one")
        self.b = BrokerStage(beside=self.a, shared=True, server_id="b", host="two")
        self.a.broker.addresses, self.b.broker.addresses = ("tcp://a:7000",), ("tcp://b:7000",)
        self.meet()

    def meet(self, detached: frozenset[str] = frozenset()) -> None:
        both = ClusterView((self.a.broker.info, self.b.broker.info), detached)
        self.a.apply(both)
        self.b.apply(both)

    def hints(self, stage: BrokerStage) -> list[Hint]:
        found = [command.hint for command in stage.others if isinstance(command, Publish)]
        stage.others = [command for command in stage.others if not isinstance(command, Publish)]
        return found

    def carry(self) -> None:
        """Every hint reaches the other side, and what follows from it happens."""
        for sender, receiver in ((self.a, self.b), (self.b, self.a)):
            for hint in self.hints(sender):
                receiver.apply(Hinted(hint))
                receiver.turns()


@pytest.fixture
def pair() -> Pair:
    return Pair()


def asked(stage: BrokerStage, kind: Any) -> list[Any]:
    found = [command for command in stage.others if isinstance(command, kind)]
    stage.others = [command for command in stage.others if not isinstance(command, kind)]
    return found


def test_a_job_submitted_here_is_taken_by_a_worker_there(pair: Pair) -> None:
    client, worker = pair.a.client(), pair.b.worker(credit=1)
    pair.a.submit(client, "job")
    assert pair.b.grants(worker) == []
    pair.carry()
    assert [grant.job_id for grant in pair.b.grants(worker)] == ["job"]


def test_a_result_reported_there_reaches_the_client_here(pair: Pair) -> None:
    client, worker = pair.a.client(), pair.b.worker(credit=1)
    pair.a.submit(client, "job")
    pair.carry()
    [grant] = pair.b.grants(worker)
    pair.b.ask(worker, JobsFinished([ending(grant, result=b"42")]))
    assert pair.a.all(client, Results) == []
    pair.carry()
    [item] = pair.a.last(client, Results).items
    assert (item.job_id, item.state, item.outcome.result) == ("job", State.SUCCEEDED, b"42")


def test_what_stays_within_one_server_is_not_told(pair: Pair) -> None:
    client, worker = pair.a.client(), pair.a.worker(credit=1)
    pair.hints(pair.a)  # that the worker came
    pair.a.submit(client, "job")
    [grant] = pair.a.grants(worker)
    pair.a.ask(worker, JobsFinished([ending(grant)]))
    assert pair.hints(pair.a) == []


def test_a_server_that_is_alone_tells_nobody_and_remembers_nothing() -> None:
    stage = BrokerStage(shared=True)
    client = stage.client()
    stage.submit(client, "job")
    assert asked(stage, Publish) == []
    assert not stage.broker.cluster.ready


def test_a_lost_hint_of_an_end_is_made_good_by_asking(pair: Pair) -> None:
    client, worker = pair.a.client(), pair.b.worker(credit=1)
    pair.a.submit(client, "job")
    pair.carry()
    [grant] = pair.b.grants(worker)
    pair.b.ask(worker, JobsFinished([ending(grant)]))
    pair.hints(pair.b)  # lost
    # When time passes, the watched job is asked for
    pair.a.pass_time(POLL_INTERVAL_S)
    [ask] = asked(pair.a, AskEnded)
    assert ask.job_ids == ["job"]
    pair.a.apply(SomeEnded(pair.a.store.ended_among(ask.job_ids)))
    pair.a.turns()
    assert [item.job_id for item in pair.a.last(client, Results).items] == ["job"]


def test_many_watched_jobs_are_asked_for_in_turns(pair: Pair) -> None:
    client = pair.a.client()
    for start in range(0, POLLED_JOBS + 1000, 1000):
        pair.a.submit(client, *(f"job-{n}" for n in range(start, start + 1000)))
    looked: set[str] = set()
    for _ in range(2):
        pair.a.pass_time(POLL_INTERVAL_S)
        for ask in asked(pair.a, AskEnded):
            assert len(ask.job_ids) <= POLLED_JOBS
            looked.update(ask.job_ids)
    assert len(looked) == POLLED_JOBS + 1000


def test_a_cancel_here_reaches_the_worker_there_at_once(pair: Pair) -> None:
    client, worker = pair.a.client(), pair.b.worker(credit=1)
    pair.a.submit(client, "job")
    pair.carry()
    [grant] = pair.b.grants(worker)
    pair.a.ask(client, CancelJobs(77, ["job"]))
    pair.carry()
    assert pair.b.last(worker, CancelLeases).lease_ids == [grant.lease_id]


def test_a_worker_that_moved_leaves_no_second_self_behind(pair: Pair) -> None:
    token = pair.a.token("lab", "worker")
    old = pair.a.worker("w1", peer=TCP, token=token)
    pair.carry()
    pair.b.worker("w1", peer=TCP, token=token, resumed=True)
    pair.carry()
    assert isinstance(pair.a.hung_up[old], ProtocolError)
    assert "w1" not in pair.a.broker.workers
    assert "w1" in pair.b.broker.workers


def test_another_start_of_a_worker_elsewhere_does_not_end_this_one(pair: Pair) -> None:
    old = pair.a.worker("w1", incarnation="first")
    pair.b.worker("w1", incarnation="second")
    pair.carry()
    assert old not in pair.a.hung_up


def test_a_token_revoked_there_ends_its_connections_here(pair: Pair) -> None:
    victim = pair.a.client(token_id="victim")
    admin = pair.b.client("admin", "root")
    pair.b.request(admin, "token.revoke", token_id="victim")
    pair.carry()
    assert isinstance(pair.a.hung_up[victim], Unauthorized)


def test_a_revocation_whose_hint_was_lost_is_found_within_two_seconds(pair: Pair) -> None:
    victim = pair.a.client(token_id="victim")
    pair.a.store.revoke_token("victim", actor="root")
    pair.a.pass_time(POLL_INTERVAL_S)
    [ask] = asked(pair.a, AskRevoked)
    assert ask.token_ids == ["victim"]
    pair.a.apply(SomeRevoked(pair.a.store.revoked_among(ask.token_ids)))
    assert isinstance(pair.a.hung_up[victim], Unauthorized)
    assert POLL_INTERVAL_S < 2


def test_a_job_addressed_to_a_worker_there_is_left_for_it(pair: Pair) -> None:
    here, there = pair.a.worker("w1", credit=1), pair.b.worker("w2", credit=1)
    pair.meet()
    client = pair.a.client()
    pair.a.submit(client, "job", subject="job.assign.x.w2")
    assert pair.a.grants(here) == []
    pair.carry()
    assert [grant.job_id for grant in pair.b.grants(there)] == ["job"]


def test_when_its_server_is_gone_a_job_addressed_to_a_worker_goes_to_another(pair: Pair) -> None:
    here = pair.a.worker("w1", credit=1)
    pair.b.worker("w2", credit=1)
    pair.meet()
    pair.a.submit(pair.a.client(), "job", subject="job.assign.x.w2")
    pair.a.apply(ClusterView((pair.a.broker.info,)))
    pair.a.pass_time(1.0)
    assert [grant.job_id for grant in pair.a.grants(here)] == ["job"]


def test_a_detached_worker_gets_nothing_and_work_again_when_it_is_attached(pair: Pair) -> None:
    worker = pair.a.worker("w1", credit=1)
    pair.meet(detached=frozenset({"w1"}))
    pair.a.submit(pair.a.client(), "job")
    pair.a.pass_time(1.0)
    assert pair.a.grants(worker) == []
    pair.meet()
    pair.a.turns()
    assert [grant.job_id for grant in pair.a.grants(worker)] == ["job"]


def test_a_welcome_lists_all_live_servers(pair: Pair) -> None:
    conn = pair.a.client()
    assert pair.a.last(conn, Welcome).servers == ("tcp://a:7000", "tcp://b:7000")


def test_many_new_subjects_are_told_as_everything(pair: Pair) -> None:
    client = pair.a.client()
    specs = [JobSpec(job_id=f"job-{n}", subject=f"s.{n}") for n in range(READY_SUBJECTS_MAX + 1)]
    pair.a.ask(client, SubmitJobs(5, specs))
    [hint] = pair.hints(pair.a)
    assert hint.everything
    assert hint.ready == ()


def lookers(stage: BrokerStage, hint: Hint) -> list[str]:
    """The workers for which the store is asked after this hint."""
    stage.apply(Hinted(hint))
    turn = stage.broker.next_turn(stage.now())
    return [request.worker_id for request in turn.lease] if turn is not None else []


def test_one_job_elsewhere_is_looked_for_by_few_of_many_idle_workers(pair: Pair) -> None:
    for number in range(20):
        pair.b.worker(f"w{number}", credit=1)

    assert len(lookers(pair.b, Hint(server_id="a", ready=("render.x",), ready_jobs=1))) == 1 + SPARE_LOOKERS


def test_many_jobs_elsewhere_are_looked_for_by_as_many_workers(pair: Pair) -> None:
    client = pair.a.client()
    workers = [pair.b.worker(f"w{number}", credit=1) for number in range(20)]

    pair.a.submit(client, *(f"job-{number}" for number in range(20)))
    pair.carry()

    assert [len(pair.b.grants(worker)) for worker in workers] == [1] * 20


def test_a_hint_that_does_not_say_how_many_jobs_there_are_sends_everybody(pair: Pair) -> None:
    for number in range(5):
        pair.b.worker(f"w{number}", credit=1)

    assert len(lookers(pair.b, Hint(server_id="a", ready=("render.x",)))) == 5


def test_a_job_elsewhere_is_looked_for_by_the_worker_that_its_subject_names(pair: Pair) -> None:
    for number in range(20):
        pair.b.worker(f"w{number}", credit=1)

    assert "w17" in lookers(pair.b, Hint(server_id="a", ready=("render.w17",), ready_jobs=1))


def test_a_job_elsewhere_is_looked_for_by_workers_of_every_kind_and_program(pair: Pair) -> None:
    for number in range(20):
        takes = Takes.COMMANDS if number < 19 else Takes.HANDLERS
        pair.b.worker(f"w{number}", credit=1, takes=takes, execs=("render",) if number == 18 else ("other",))

    assert {"w18", "w19"} < set(lookers(pair.b, Hint(server_id="a", ready=("render.x",), ready_jobs=1)))


def test_delayed_jobs_that_became_ready_are_told_by_their_number(pair: Pair) -> None:
    pair.a.apply(TakeOver(1))
    pair.a.turns()
    pair.a.apply(Elected(1))
    client = pair.a.client()
    pair.a.submit(client, "one", "two", not_before=pair.a.clock.wall() + 5.0)
    pair.hints(pair.a)

    pair.a.pass_time(6.0)

    [hint] = pair.hints(pair.a)
    assert (len(hint.ready), hint.ready_jobs) == (1, 2)


def test_a_worker_that_is_only_busier_than_before_changes_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = pair.b.worker("w2", credit=1)
    pair.meet()
    noted: list[str] = []
    monkeypatch.setattr(pair.a.broker, "note_live_workers", lambda: noted.append("noted"))

    pair.b.ask(worker, GiveCredit(3))
    pair.meet()
    assert noted == []

    pair.b.worker("w3")
    pair.meet()
    assert noted == ["noted"]


def test_the_own_user_of_one_machine_is_not_that_of_another(pair: Pair) -> None:
    names = []
    for stage in (pair.a, pair.b):
        conn = stage.open(UNIX)
        stage.ask(conn, HelloClient(msg_id=1, client_id="me"))
        names.append(stage.last(conn, Welcome).identity)
    assert names == ["node:one:1000", "node:two:1000"]


def test_servers_and_workers_of_all_are_described(pair: Pair) -> None:
    pair.b.worker("w2")
    pair.meet()
    admin = pair.a.client("admin", "root")
    servers = pair.a.request(admin, "servers").body  # type: ignore[union-attr]
    workers = pair.a.request(admin, "workers").body  # type: ignore[union-attr]
    assert [server["server_id"] for server in servers] == ["a", "b"]
    assert [(worker["server_id"], worker["worker_id"]) for worker in workers] == [("b", "w2")]


@pytest.mark.parametrize("role", ["client", "worker"])
def test_a_server_that_comes_later_is_told_with_the_next_heartbeat_once(role: str) -> None:
    first = BrokerStage(shared=True, server_id="a")
    first.broker.addresses = ("tcp://a:7000",)
    conn = first.client() if role == "client" else first.worker()
    second = BrokerStage(beside=first, shared=True, server_id="b")
    second.broker.addresses = ("tcp://b:7000",)
    first.apply(ClusterView((first.broker.info, second.broker.info)))
    for msg_id in (41, 42):
        first.ask(conn, Heartbeat(msg_id))
    assert [answer.servers for answer in first.all(conn, HeartbeatAnswer)] == [("tcp://a:7000", "tcp://b:7000"), ()]


def test_a_node_that_leads_takes_only_what_nobody_else_subscribes_to_and_everything_once_it_leads_no_more() -> None:
    a = BrokerStage(shared=True, server_id="a", node_id="n1")
    b = BrokerStage(beside=a, shared=True, server_id="b", node_id="n2")
    own = a.worker("a", credit=8, patterns=("mail.>", "report.>"))
    beside = a.worker("a2", patterns=("report.old",))  # has asked for nothing: it does not count
    other = b.worker("b", credit=1, patterns=("mail.>",))
    a.apply(ClusterView((a.broker.info, b.broker.info), frozenset()))
    epoch = a.store.epoch()[0] + 1
    assert a.store.take_over("a", epoch)
    a.apply(Elected(epoch))
    client = a.node()

    # When it leads, it leaves others their jobs, also while these are busy
    for job_id, subject in (("mail-1", "mail.x"), ("mail-2", "mail.y"), ("report", "report.old")):
        a.ask(client, SubmitJobs(1, [JobSpec(job_id=job_id, subject=subject)]))
    assert [grant.job_id for grant in a.grants(own)] == ["report"]
    b.apply(Hinted(Hint(everything=True)))
    b.turns()
    assert [grant.job_id for grant in b.grants(other)] == ["mail-1"]
    a.pass_time(POLL_INTERVAL_S)
    assert [grant.job_id for grant in a.grants(own)] == ["report"]

    # When it leads no more, it takes the rest
    a.apply(Elected(0))
    a.turns()
    assert [grant.job_id for grant in a.grants(own)] == ["report", "mail-2"]
    assert a.grants(beside) == []


def test_a_node_that_leads_takes_what_others_subscribed_to_once_they_are_gone() -> None:
    a = BrokerStage(shared=True, server_id="a", node_id="n1")
    b = BrokerStage(beside=a, shared=True, server_id="b", node_id="n2")
    own, _ = a.worker("a", credit=8), b.worker("b", credit=1)
    both = ClusterView((a.broker.info, b.broker.info), frozenset())
    a.apply(both)
    epoch = a.store.epoch()[0] + 1
    assert a.store.take_over("a", epoch)
    a.apply(Elected(epoch))
    a.ask(a.node(), SubmitJobs(1, [JobSpec(job_id="one", subject="mail.x")]))
    assert a.grants(own) == []

    # A detached worker counts as gone
    a.apply(ClusterView(both.servers, frozenset({"b"})))
    a.turns()
    assert [grant.job_id for grant in a.grants(own)] == ["one"]
