"""Messages through a broker: who gets them, who may send them, and what is told to whoever may not."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tasuki.core.access import Identity, PeerKind, in_scope
from tasuki.core.broker.events import ClusterView, Deliver, Relay, Relayed
from tasuki.core.broker.state import QUEUES_MAX, SUBSCRIBERS_MAX
from tasuki.core.protocol import (
    MESSAGE_PAYLOAD_MAX_BYTES,
    NO_RECEIVERS,
    ErrorMessage,
    PublishedMessage,
    PublishMessages,
    Reply,
    Request,
)
from tasuki.core.subscribers import QUEUES_TOLD_MAX, SUBSCRIPTIONS_MAX, Subscribers
from tasuki.errors import Forbidden, InvalidInput
from tests.core.broker_stage import BrokerStage

INBOX = "_INBOX.9f86d081884c7d659a2feaa0c55ad015"
numbers = itertools.count(100)


def subscribe(stage: BrokerStage, conn: int, pattern: str, queue: str = "", verb: str = "subscribe") -> Reply | ErrorMessage:
    stage.tell(conn, Request(next(numbers), verb, {"pattern": pattern, "queue": queue}))
    answer = stage.sent[conn].pop()
    assert isinstance(answer, Reply | ErrorMessage)
    return answer


def publish(stage: BrokerStage, conn: int, *items: PublishedMessage, confirm: bool = False) -> dict[int, list[str]]:
    """Publish, and return what each connection gets: subjects, with the queue group if there is one."""
    stage.others.clear()
    stage.tell(conn, PublishMessages(next(numbers), list(items), confirm))
    got: dict[int, list[str]] = {}
    for command in stage.others:
        assert isinstance(command, Deliver)
        for receiver in command.conns:
            queue = f"@{command.message.queue}" if command.message.queue else ""
            got.setdefault(receiver, []).extend(item.subject + queue for item in command.message.items)
    return got


def to(*subjects: str) -> list[PublishedMessage]:
    return [PublishedMessage(subject, b"1") for subject in subjects]


# --- routes


def test_a_message_goes_to_every_connection_whose_pattern_matches_once_and_in_order() -> None:
    stage = BrokerStage()
    one, two, worker = stage.client(token_id="a"), stage.client(token_id="b"), stage.worker()
    for conn, pattern in ((one, "prices.>"), (one, "prices.*"), (two, "prices.fx"), (worker, "*.fx")):
        assert isinstance(subscribe(stage, conn, pattern), Reply)

    got = publish(stage, two, *to("prices.fx", "prices.eq", "other", "prices.fx"))

    assert got == {one: ["prices.fx", "prices.eq", "prices.fx"], two: ["prices.fx"] * 2, worker: ["prices.fx"] * 2}


def test_of_a_queue_group_one_member_gets_a_message_and_all_get_their_share() -> None:
    stage = BrokerStage()
    conns = [stage.client(token_id=f"m{number}") for number in range(4)]
    for conn in conns[:3]:
        subscribe(stage, conn, "mail.*", "senders")
    subscribe(stage, conns[3], "mail.>")

    got = [publish(stage, conns[3], *to("mail.a")) for _ in range(6)] + [
        publish(stage, conns[3], *to("mail.a", "mail.b", "mail.c"))
    ]

    assert all(one[conns[3]][0] == "mail.a" for one in got)
    shares = [[subject for one in got for subject in one.get(conn, ())] for conn in conns[:3]]
    assert [len(share) for share in shares] == [3, 3, 3]
    assert all(subject.endswith("@senders") for share in shares for subject in share)


def test_a_subscription_ends_with_unsubscribe_and_with_its_connection() -> None:
    stage = BrokerStage()
    one, two = stage.client(token_id="a"), stage.client(token_id="b")
    for conn in (one, two):
        subscribe(stage, conn, "a.>")
        subscribe(stage, conn, "a.>")  # the same again is the same
    assert isinstance(subscribe(stage, one, "a.>", verb="unsubscribe"), Reply)
    assert isinstance(subscribe(stage, one, "a.>", verb="unsubscribe"), ErrorMessage)
    assert publish(stage, two, *to("a.b")) == {two: ["a.b"]}

    stage.close(two)

    assert len(stage.broker.messages) == 0
    assert publish(stage, one, *to("a.b")) == {}


def test_nobody_reads_the_inbox_of_another() -> None:
    stage = BrokerStage()
    nosy, asker = stage.client(token_id="a"), stage.client(token_id="b")
    for pattern in (">", "*.>", f"*.{INBOX.partition('.')[2]}.*"):
        assert isinstance(subscribe(stage, nosy, pattern), Reply)
    for pattern in ("_INBOX.>", "_INBOX.*.1", "_INBOX.short.*"):
        assert isinstance(subscribe(stage, nosy, pattern), ErrorMessage)
    subscribe(stage, asker, f"{INBOX}.*")

    assert publish(stage, nosy, *to(f"{INBOX}.1")) == {asker: [f"{INBOX}.1"]}


def test_a_question_that_nobody_hears_is_answered_so() -> None:
    stage = BrokerStage()
    asker = stage.client()
    subscribe(stage, asker, f"{INBOX}.*")

    publish(stage, asker, PublishedMessage("nobody.there", b"?", f"{INBOX}.1"))

    [command] = stage.others
    assert isinstance(command, Deliver)
    assert command.message.items == [PublishedMessage(f"{INBOX}.1", b"", "", NO_RECEIVERS)]


def test_a_connection_and_a_token_have_so_many_subscriptions() -> None:
    stage = BrokerStage()
    conns = [stage.client(token_id="a") for _ in range(SUBSCRIBERS_MAX // SUBSCRIPTIONS_MAX + 1)]
    taken = [subscribe(stage, conn, f"a.{number}") for conn in conns[:-1] for number in range(SUBSCRIPTIONS_MAX)]
    assert {type(answer) for answer in taken} == {Reply}

    refused, late = subscribe(stage, conns[0], "b"), subscribe(stage, conns[-1], "b")

    assert isinstance(refused, ErrorMessage)
    assert isinstance(late, ErrorMessage)
    assert ("use wider patterns" in refused.message, "subscriptions to messages" in late.message) == (True, True)
    stage.close(conns[0])
    assert isinstance(subscribe(stage, conns[-1], "b"), Reply)


def test_a_token_has_so_many_queue_groups_which_its_connections_share() -> None:
    stage = BrokerStage()
    *full, last = [stage.client(token_id="a") for _ in range(QUEUES_MAX // SUBSCRIPTIONS_MAX + 1)]
    for conn, number in itertools.product(full, range(SUBSCRIPTIONS_MAX)):
        assert isinstance(subscribe(stage, conn, f"a.{conn}.{number}", "g"), Reply)

    refused = subscribe(stage, last, "b", "g")

    assert isinstance(refused, ErrorMessage)
    assert refused.code == "OVERLOADED"
    assert publish(stage, last, *to("b")) == {}
    assert isinstance(subscribe(stage, last, f"a.{full[0]}.7", "g"), Reply)  # a further member of a group
    assert isinstance(subscribe(stage, stage.client(token_id="b"), "b", "g"), Reply)  # another token
    assert isinstance(subscribe(stage, full[0], f"a.{full[0]}.8", "g", verb="unsubscribe"), Reply)
    assert isinstance(subscribe(stage, last, "b", "g"), Reply)


@pytest.mark.parametrize("queue", ["x" * 65, "a\nb"])
def test_a_queue_group_has_a_name_that_can_be_shown(queue: str) -> None:
    with pytest.raises(InvalidInput, match="queue group"):
        Subscribers().add(1, "a", queue)


# --- what may be published


def test_only_a_refusal_or_a_wish_is_answered() -> None:
    stage = BrokerStage()
    conn = stage.client()
    before = len(stage.sent[conn])
    publish(stage, conn, *to("a"))
    assert len(stage.sent[conn]) == before

    publish(stage, conn, *to("a"), confirm=True)

    assert stage.last(conn, Reply).body is None


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (PublishedMessage("a.*"), "INVALID"),
        (PublishedMessage("a..b"), "INVALID"),
        (PublishedMessage("a", reply_to="b.>"), "INVALID"),
        (PublishedMessage("a", bytes(MESSAGE_PAYLOAD_MAX_BYTES + 1)), "TOO_LARGE"),
        (PublishedMessage("a", headers={str(number): "" for number in range(65)}), "TOO_LARGE"),
        (PublishedMessage("a", headers={"x": "y" * 16_384}), "TOO_LARGE"),
    ],
    ids=["wildcard", "empty-token", "reply-to", "payload", "headers", "header"],
)
def test_a_message_that_is_refused_keeps_no_other_from_its_way(bad: PublishedMessage, code: str) -> None:
    stage = BrokerStage()
    conn = stage.client()
    subscribe(stage, conn, ">")

    got = publish(stage, conn, PublishedMessage("first"), bad, PublishedMessage("last"))

    assert got == {conn: ["first", "last"]}
    assert (stage.last(conn, ErrorMessage).code, "1 of 3" in stage.last(conn, ErrorMessage).message) == (code, True)


# --- scopes


def identity(*scope: str, kind: PeerKind = PeerKind.CLIENT) -> Identity:
    return Identity(kind, "token:t", scope)


@pytest.mark.parametrize(
    ("scope", "may_publish", "may_subscribe", "may_submit"),
    [
        ((), True, True, True),
        (("prices.>",), True, True, True),
        (("publish:prices.>",), True, False, False),
        (("subscribe:prices.>",), False, True, False),
        (("publish:prices.>", "subscribe:prices.*"), True, True, False),
        (("render.>",), False, False, False),
        (("publish:prices.>", "prices.fx"), True, True, True),
    ],
    ids=str,
)
def test_a_scope_gives_the_rights_that_it_names(
    scope: tuple[str, ...], may_publish: bool, may_subscribe: bool, may_submit: bool
) -> None:
    who = identity(*scope)
    rights = ((who.check_publish, may_publish), (who.check_subscribe, may_subscribe), (who.check_submit, may_submit))
    for check, allowed in rights:
        if allowed:
            check("prices.fx")
        else:
            with pytest.raises(Forbidden, match="this token may not"):
                check("prices.fx")
    assert in_scope(scope, "prices.fx") == may_submit
    assert identity(*scope, kind=PeerKind.WORKER).may_see("token:other", "prices.fx") is False
    who.check_publish(f"{INBOX}.1")  # whoever is asked may answer


def test_a_pattern_must_be_covered_by_the_scope_as_a_whole() -> None:
    with pytest.raises(Forbidden):
        identity("subscribe:prices.*").check_subscribe("prices.>")
    identity("subscribe:prices.>").check_subscribe("prices.*.eurusd")


@pytest.mark.parametrize("scope", [("publish:prices.>",), ("subscribe:prices.>",)], ids=str)
def test_a_right_to_messages_is_none_to_jobs_of_a_subject_with_its_name(scope: tuple[str, ...]) -> None:
    # A worker that takes everything would run such a job.
    for subject in ("publish:prices.x", "subscribe:prices.x"):
        with pytest.raises(Forbidden):
            identity(*scope).check_submit(subject)
        assert not identity(*scope).may_see("token:other", subject)
        assert not in_scope(scope, subject)


@pytest.mark.parametrize("kind", ["client", "worker"])
def test_the_scope_of_the_token_counts_at_the_broker(kind: str) -> None:
    stage = BrokerStage()
    if kind == "client":
        conn = stage.client("client", "limited", "publish:a.>", "subscribe:b.>")
    else:
        token = stage.token("limited", "worker", "jobs.>", "publish:a.>", "subscribe:b.>")
        conn = stage.worker(token=token, patterns=("jobs.>",))
    listener = stage.client("admin", "boss")
    subscribe(stage, listener, ">")

    assert publish(stage, conn, *to("a.x", "c.x")) == {listener: ["a.x"]}
    assert stage.last(conn, ErrorMessage).code == "FORBIDDEN"
    refused, taken = subscribe(stage, conn, "a.x"), subscribe(stage, conn, "b.x")
    assert isinstance(refused, ErrorMessage)
    assert refused.code == "FORBIDDEN"
    assert isinstance(taken, Reply)


def test_a_new_token_has_a_scope_of_patterns() -> None:
    stage = BrokerStage()
    admin = stage.client("admin", "boss")

    def create(token_id: str, *scope: str) -> Reply | ErrorMessage:
        row = {"token_id": token_id, "kind": "client", "sha256": f"{next(numbers):064x}", "scope": list(scope)}
        stage.ask(admin, Request(next(numbers), "token.create", row))
        answer = stage.sent[admin][-1]
        assert isinstance(answer, Reply | ErrorMessage)
        return answer

    assert isinstance(create("all", "publish:>", "subscribe:*", "jobs.>"), Reply)
    assert isinstance(create("wrong", "publish:a.>.b"), ErrorMessage)


# --- several servers


class Pair:
    """Servers `a` and `b` on one store."""

    def __init__(self) -> None:
        self.a = BrokerStage(shared=True, server_id="a")
        self.b = BrokerStage(beside=self.a, shared=True, server_id="b")
        self.meet()

    def meet(self) -> None:
        for stage in (self.a, self.b):
            stage.apply(ClusterView((self.a.broker.info, self.b.broker.info), frozenset()))

    def publish(self, conn: int, *items: PublishedMessage) -> tuple[list[str], list[str]]:
        """Publish at `a`, and return what the subscribers of both get."""
        self.a.others.clear()
        self.b.others.clear()
        self.a.tell(conn, PublishMessages(next(numbers), list(items)))
        for command in self.a.others:
            if isinstance(command, Relay):
                self.b.apply(Relayed(command.messages))
        return delivered(self.a), delivered(self.b)


def delivered(stage: BrokerStage) -> list[str]:
    commands = [command for command in stage.others if isinstance(command, Deliver)]
    return [f"{item.subject}@{one.message.queue}" for one in commands for _ in one.conns for item in one.message.items]


def test_a_message_reaches_the_subscribers_of_every_server_once() -> None:
    pair = Pair()
    here, there, also = pair.a.client(token_id="a"), pair.b.client(token_id="b"), pair.b.client(token_id="c")
    for stage, conn in ((pair.a, here), (pair.b, there), (pair.b, also)):
        subscribe(stage, conn, "x.>")

    assert pair.publish(here, *to("x.1", "y.1")) == (["x.1@"], ["x.1@", "x.1@"])


def test_a_queue_group_over_several_servers_gets_a_message_once() -> None:
    pair = Pair()
    here, there = pair.a.client(token_id="a"), pair.b.client(token_id="b")
    subscribe(pair.b, there, "x.*", "g")
    assert pair.publish(here, *to("x.1")) == ([], [])  # nobody knows of the group yet
    pair.meet()

    assert pair.publish(here, *to("x.1", "y.1")) == ([], ["x.1@g"])
    subscribe(pair.a, here, "x.>", "g")
    assert pair.publish(here, *to("x.1")) == (["x.1@g"], [])  # a member that is near is served first


def test_queue_groups_at_other_servers_that_do_not_match_cost_a_message_nothing() -> None:
    pair = Pair()
    here = pair.a.client(token_id="a")
    queues = tuple((f"x.{number}.*", "g") for number in range(QUEUES_TOLD_MAX))
    told = msgspec.structs.replace(pair.b.broker.info, queues=queues)
    pair.a.apply(ClusterView((told,), frozenset()))

    pair.publish(here, *to("x.7.a"))

    [relayed] = [command for command in pair.a.others if isinstance(command, Relay)]
    assert [message.queues for message in relayed.messages] == [{"g": "b"}]
    assert pair.a.broker.cluster.members.nodes_visited < 10
    pair.a.apply(ClusterView((msgspec.structs.replace(told, queues=queues[:7]),), frozenset()))
    pair.publish(here, *to("x.7.b"))
    assert [command.messages[0].queues for command in pair.a.others if isinstance(command, Relay)] == [{}]


def test_a_server_tells_others_of_so_many_queue_groups() -> None:
    there: Subscribers[int] = Subscribers()
    for number in range(QUEUES_TOLD_MAX + 1):
        there.add(number, f"x.{number}", "g")
    there.add(QUEUES_TOLD_MAX + 1, "x.0", "g")

    assert (len(there.queues), there.queues[0]) == (QUEUES_TOLD_MAX, ("x.0", "g"))
    there.remove(0, "x.0", "g")
    there.remove(QUEUES_TOLD_MAX + 1, "x.0", "g")
    assert (len(there.queues), there.queues[-1]) == (QUEUES_TOLD_MAX, (f"x.{QUEUES_TOLD_MAX}", "g"))


def test_an_answer_finds_the_inbox_at_another_server_and_stays_here_if_it_is_here() -> None:
    pair = Pair()
    here, there = pair.a.client(token_id="a"), pair.b.client(token_id="b")
    subscribe(pair.b, there, f"{INBOX}.*")
    assert pair.publish(here, *to(f"{INBOX}.1")) == ([], [f"{INBOX}.1@"])

    subscribe(pair.a, here, f"{INBOX}.*")

    assert pair.publish(here, *to(f"{INBOX}.1")) == ([f"{INBOX}.1@"], [])
    nobody = pair.publish(here, PublishedMessage("nobody", b"", f"{INBOX}.1"))
    assert nobody == ([], [])  # somebody may be subscribed at a server that this one does not know


def test_a_server_that_is_alone_relays_nothing() -> None:
    stage = BrokerStage(shared=True)
    assert publish(stage, stage.client(), *to("a")) == {}
