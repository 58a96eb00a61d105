"""The client's decisions: what is said again, what is not, and what is told to those who wait."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from tasuki.core.address import Address
from tasuki.core.client_machine import (
    BEAT_QUICK_S,
    RETRY_AFTER_S,
    WATCH_MAX,
    Call,
    CallAnswered,
    ClientMachine,
    Failed,
    ResultsArrived,
    Unsendable,
    Unwatch,
    Watch,
    WatchRefused,
    Welcomed,
)
from tasuki.core.job import JobSpec, Outcome, State
from tasuki.core.machine import Closed, Hangup, Now, Opened, Peer, Received, Send, Ticked
from tasuki.core.protocol import (
    HANDSHAKE_TIMEOUT_S,
    Acceptance,
    Accepted,
    ErrorMessage,
    Heartbeat,
    HeartbeatAnswer,
    HelloClient,
    JobResult,
    Message,
    Reply,
    Request,
    Results,
    SubmitJobs,
    Welcome,
)
from tasuki.core.reconnect import HELLO_QUICK_S, Connect
from tasuki.errors import InvalidInput, NotFound, TasukiError, Unavailable

IDLE_S = 60.0
ONE, OTHER = Address("tcp", "10.0.0.1", 7000), Address("tcp", "10.0.0.2", 7000)
M = TypeVar("M")


class Bench:
    """A machine on a bench: the test is the server and the clock."""

    def __init__(self, *addresses: Address) -> None:
        hello = HelloClient(msg_id=0, client_id="c1", token="t")
        self.machine = ClientMachine(hello, addresses=addresses or (ONE,), jitter=lambda: 1.0)
        self.time = 1000.0
        self.conn = 0

    def do(self, event: Any) -> list[Any]:
        return self.machine.apply(event, Now(self.time, self.time + 1e9))

    def hear(self, message: Message) -> list[Any]:
        return self.do(Received(self.conn, message))

    def after(self, seconds: float) -> list[Any]:
        self.time += seconds
        return self.do(Ticked())

    def connect(self, **fields: Any) -> list[Any]:
        self.conn += 1
        [hello] = sent(self.do(Opened(self.conn, Peer("tcp"))), HelloClient)
        usual = {"version": 2, "server_id": "s", "identity": "token:c", "kind": "client", "idle_timeout_s": IDLE_S}
        return self.hear(Welcome(corr_id=hello.msg_id, **{**usual, **fields}))

    def lose(self) -> list[Any]:
        return self.do(Closed(self.conn, "cut"))

    def submit(self, ticket: int, *job_ids: str) -> list[Any]:
        specs = [JobSpec(job_id=job_id) for job_id in job_ids]
        return self.do(Call(ticket, lambda msg_id: SubmitJobs(msg_id, specs), watch=job_ids))

    def accept(self, commands: list[Any], *exceptions: Acceptance) -> list[Any]:
        [submit] = sent(commands, SubmitJobs)
        return self.hear(Accepted(submit.msg_id, len(submit.specs), list(exceptions)))


def sent(commands: list[Any], kind: type[M]) -> list[M]:
    return [command.message for command in commands if isinstance(command, Send) and isinstance(command.message, kind)]


def only(commands: list[Any], kind: type[M]) -> list[M]:
    return [command for command in commands if isinstance(command, kind)]


def watched(commands: list[Any]) -> list[list[str]]:
    return [request.params["job_ids"] for request in sent(commands, Request) if request.verb == "watch"]


def result(job_id: str) -> JobResult:
    return JobResult(job_id, State.SUCCEEDED, 1, Outcome())


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.connect()
    return bench


# ---------------------------------------------------------------------------------------------------- coming in


def test_what_is_called_before_the_welcome_waits_for_it() -> None:
    bench = Bench()
    assert only(bench.do(Ticked()), Connect) == [Connect(ONE)]
    assert bench.submit(1, "a") == []
    commands = bench.connect()
    assert len(only(commands, Welcomed)) == 1
    assert [[spec.job_id for spec in submit.specs] for submit in sent(commands, SubmitJobs)] == [["a"]]


@pytest.mark.parametrize("code", ["UNAUTHORIZED", "FORBIDDEN", "VERSION", "INVALID"])
def test_a_hello_that_is_refused_for_good_fails_all_that_waits_and_all_that_comes(code: str) -> None:
    bench = Bench()
    bench.submit(1, "a")
    bench.do(Watch(["b"]))
    bench.conn = 1
    bench.do(Opened(1, Peer("tcp")))
    commands = bench.hear(ErrorMessage(0, code, "no"))
    assert [failed.error.code for failed in only(commands, Failed)] == [code]
    assert [answered.ticket for answered in only(commands, CallAnswered)] == [1]
    assert [refused.job_ids for refused in only(commands, WatchRefused)] == [["b"]]
    bench.lose()
    assert only(bench.after(60.0), Connect) == []
    [answered] = only(bench.submit(2, "c"), CallAnswered)
    assert answered.error is not None
    assert [refused.job_ids for refused in only(bench.do(Watch(["d"])), WatchRefused)] == [["d"]]


def test_a_server_that_is_busy_is_tried_again() -> None:
    bench = Bench()
    bench.conn = 1
    bench.do(Opened(1, Peer("tcp")))
    assert bench.hear(ErrorMessage(0, "UNAVAILABLE", "busy")) == []
    bench.lose()
    assert len(only(bench.after(1.0), Connect)) == 1


def test_a_hello_that_is_not_answered_is_given_up() -> None:
    bench = Bench()
    bench.do(Opened(1, Peer("tcp")))
    assert only(bench.after(HANDSHAKE_TIMEOUT_S - 1.0), Hangup) == []
    assert len(only(bench.after(2.0), Hangup)) == 1


def test_a_hello_that_is_not_answered_is_given_up_sooner_where_there_is_another_server() -> None:
    bench = Bench(ONE, OTHER)
    bench.do(Opened(1, Peer("tcp")))
    assert only(bench.after(HELLO_QUICK_S - 0.5), Hangup) == []
    assert len(only(bench.after(1.0), Hangup)) == 1


def test_with_several_servers_it_beats_more_often_and_leaves_after_two_beats_without_an_answer() -> None:
    bench = Bench(ONE, OTHER)
    bench.connect()
    beats, left_after_s = 0, 0.0
    while left_after_s == 0.0:
        commands = bench.after(0.5)
        beats += len(sent(commands, Heartbeat))
        left_after_s = bench.time - 1000.0 if only(commands, Hangup) else 0.0
    assert beats == 2
    assert 2 * BEAT_QUICK_S < left_after_s <= 3 * BEAT_QUICK_S


def test_a_server_that_the_welcome_names_makes_several() -> None:
    bench = Bench(ONE)
    bench.do(Ticked())
    bench.connect(servers=("tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000"))
    assert len(sent(bench.after(BEAT_QUICK_S), Heartbeat)) == 1
    bench.lose()
    [dial] = only(bench.after(0.0), Connect)
    assert dial.address == OTHER


def test_it_says_which_versions_it_speaks() -> None:
    [hello] = sent(Bench().do(Opened(1, Peer("tcp"))), HelloClient)
    assert (hello.oldest, hello.version) == (1, 2)


@pytest.mark.parametrize("version", [0, 3])
def test_a_server_that_answers_with_another_version_is_refused_for_good(version: int) -> None:
    bench = Bench()
    bench.submit(1, "a")
    commands = bench.connect(version=version)
    [failed] = only(commands, Failed)
    assert failed.error.code == "VERSION"
    assert "this side speaks 1 to 2" in failed.error.message
    assert len(only(commands, Hangup)) == 1
    bench.lose()
    assert only(bench.after(60.0), Connect) == []


def test_messages_of_an_older_connection_are_not_heard(bench: Bench) -> None:
    bench.lose()
    bench.connect()
    assert bench.do(Received(1, Results([result("a")]))) == []


def test_it_beats_while_nothing_happens_and_leaves_a_server_that_does_not_answer(bench: Bench) -> None:
    [beat] = sent(bench.after(IDLE_S / 3), Heartbeat)
    bench.hear(HeartbeatAnswer(beat.msg_id))
    hung_up = False
    for _ in range(60):
        hung_up = hung_up or bool(only(bench.after(1.0), Hangup))
    assert hung_up


# ---------------------------------------------------------------------------------------------------- calls


def test_a_submit_that_was_not_answered_is_said_again_with_the_same_jobs(bench: Bench) -> None:
    first = bench.submit(1, "a", "b")
    bench.lose()
    again = bench.connect()
    [one], [two] = sent(first, SubmitJobs), sent(again, SubmitJobs)
    assert one.specs == two.specs
    assert one.msg_id != two.msg_id
    assert bench.hear(Accepted(one.msg_id, 2)) == []
    [answered] = only(bench.accept(again), CallAnswered)
    assert (answered.ticket, answered.error) == (1, None)


def test_what_was_answered_is_not_said_again(bench: Bench) -> None:
    bench.accept(bench.submit(1, "a"))
    bench.lose()
    assert sent(bench.connect(), SubmitJobs) == []


def test_a_call_that_is_not_safe_to_repeat_fails_with_its_connection(bench: Bench) -> None:
    bench.do(Call(1, lambda msg_id: Request(msg_id, "requeue")))
    [answered] = only(bench.lose(), CallAnswered)
    assert isinstance(answered.error, Unavailable)
    assert sent(bench.connect(), Request) == []


ONCE = {
    "requeue": lambda msg_id: Request(msg_id, "requeue", {"job_ids": ["a"]}),
    "token.revoke": lambda msg_id: Request(msg_id, "token.revoke", {"token_id": "t"}),
    "rerun": lambda msg_id: SubmitJobs(msg_id, [JobSpec(job_id="a")], on_failed="rerun"),
}


@pytest.mark.parametrize("make", ONCE.values(), ids=ONCE)
def test_what_sets_something_going_again_is_said_once_and_its_outcome_is_not_known(bench: Bench, make: Any) -> None:
    # Given a call that may have been carried out, and whose job may have succeeded since
    assert len(only(bench.do(Call(1, make)), Send)) == 1
    # When the connection is lost before the answer
    [answered] = only(bench.lose(), CallAnswered)
    # Then the caller hears that it is not known, and it is not said again
    assert isinstance(answered.error, Unavailable)
    assert "not known" in answered.error.message
    again = bench.connect()
    assert sent(again, Request) + sent(again, SubmitJobs) == []


@pytest.mark.parametrize("make", ONCE.values(), ids=ONCE)
def test_what_is_said_once_is_not_said_again_after_not_now_either(bench: Bench, make: Any) -> None:
    [call] = only(bench.do(Call(1, make)), Send)
    [answered] = only(bench.hear(ErrorMessage(call.message.msg_id, "UNAVAILABLE", "the store is busy")), CallAnswered)
    assert "the store is busy" in answered.error.message
    assert "not known" in answered.error.message
    assert only(bench.after(RETRY_AFTER_S * 2), Send) == []


@pytest.mark.parametrize("make", ONCE.values(), ids=ONCE)
def test_what_is_said_once_waits_for_the_first_connection_through_dials_that_fail(make: Any) -> None:
    bench = Bench()
    assert bench.do(Call(1, make)) == []
    assert bench.do(Closed(0, "nobody listens")) == []
    commands = bench.connect()
    assert len(sent(commands, Request) + sent(commands, SubmitJobs)) == 1


def test_a_call_that_cannot_be_sent_is_answered_with_its_error_and_not_said_again(bench: Bench) -> None:
    # Given a call that was made while there was no connection, so that it is sent with the Welcome
    bench.lose()
    bench.submit(1, "a")
    bench.submit(2, "b")
    [bad, good] = sent(bench.connect(), SubmitJobs)
    # When the driver cannot encode it
    error = InvalidInput("surrogates not allowed")
    assert bench.do(Unsendable(bad.msg_id, error)) == [CallAnswered(1, error=error)]
    # Then only the others are said again
    bench.lose()
    [again] = sent(bench.connect(), SubmitJobs)
    assert again.specs == good.specs


def test_a_watch_that_cannot_be_sent_is_split_and_the_bad_id_refused(bench: Bench) -> None:
    [request] = sent(bench.do(Watch(["a", "bad"])), Request)
    error = InvalidInput("surrogates not allowed")
    singles = sent(bench.do(Unsendable(request.msg_id, error)), Request)
    assert [single.params["job_ids"] for single in singles] == [["a"], ["bad"]]
    assert bench.do(Unsendable(singles[1].msg_id, error)) == [WatchRefused(["bad"], error)]
    bench.lose()
    assert watched(bench.connect()) == [["a"]]


def test_a_hello_that_cannot_be_sent_fails_for_good() -> None:
    bench = Bench()
    [hello] = sent(bench.do(Opened(1, Peer("tcp"))), HelloClient)
    commands = bench.do(Unsendable(hello.msg_id, InvalidInput("surrogates not allowed")))
    assert len(only(commands, Failed)) == len(only(commands, Hangup)) == 1
    bench.do(Closed(1, "hung up"))
    assert only(bench.after(60.0), Connect) == []


@pytest.mark.parametrize("code", ["UNAVAILABLE", "OVERLOADED"])
def test_a_call_that_was_refused_for_now_is_said_again_after_a_while(bench: Bench, code: str) -> None:
    [first] = sent(bench.submit(1, "a"), SubmitJobs)
    assert bench.hear(ErrorMessage(first.msg_id, code, "not now")) == []
    assert sent(bench.after(RETRY_AFTER_S / 2), SubmitJobs) == []
    again = bench.after(RETRY_AFTER_S)
    assert len(sent(again, SubmitJobs)) == 1
    assert only(bench.accept(again), CallAnswered)[0].error is None


@pytest.mark.parametrize("code", ["DISK_FULL", "INVALID", "FORBIDDEN", "NOT_FOUND"])
def test_other_errors_are_the_callers_answer(bench: Bench, code: str) -> None:
    [first] = sent(bench.submit(1, "a"), SubmitJobs)
    [answered] = only(bench.hear(ErrorMessage(first.msg_id, code, "no")), CallAnswered)
    assert isinstance(answered.error, TasukiError)
    assert answered.error.code == code
    assert sent(bench.after(10.0), SubmitJobs) == []


@pytest.mark.parametrize("code", ["PROTOCOL", "TOO_LARGE"])
def test_calls_under_way_when_the_server_could_not_read_one_are_answered_with_that_and_not_said_again(
    bench: Bench, code: str
) -> None:
    # Given a call under way, and then an error of the connection, after which it is closed
    bench.submit(1, "a")
    [answered] = only(bench.hear(ErrorMessage(0, code, "cannot be read")), CallAnswered)
    bench.lose()
    bench.submit(2, "b")
    # Then the call has that error, and only what was called later is said on the next connection
    assert answered.ticket == 1
    assert answered.error is not None
    assert answered.error.code == code
    assert [[spec.job_id for spec in submit.specs] for submit in sent(bench.connect(), SubmitJobs)] == [["b"]]


def test_an_error_of_the_protocol_before_the_welcome_ends_no_call(bench: Bench) -> None:
    bench.submit(1, "a")
    bench.lose()
    bench.conn += 1
    bench.do(Opened(bench.conn, Peer("tcp")))
    assert bench.hear(ErrorMessage(0, "PROTOCOL", "no Hello within 10 s")) == []
    bench.lose()
    assert len(sent(bench.connect(), SubmitJobs)) == 1


def test_pauses_between_connections_that_die_young_grow(bench: Bench) -> None:
    pauses = []
    for _ in range(5):
        bench.lose()
        began = bench.time
        while not only(bench.after(0.01), Connect):
            pass
        pauses.append(bench.time - began)
        bench.connect()
    assert pauses == sorted(pauses)
    assert pauses[-1] > 1.0


def test_a_reply_goes_to_the_call_it_answers(bench: Bench) -> None:
    [one] = sent(bench.do(Call(1, lambda msg_id: Request(msg_id, "get"))), Request)
    [two] = sent(bench.do(Call(2, lambda msg_id: Request(msg_id, "find"))), Request)
    assert bench.hear(Reply(two.msg_id, "two")) == [CallAnswered(2, "two")]
    assert bench.hear(Reply(one.msg_id, "one")) == [CallAnswered(1, "one")]
    assert bench.hear(Reply(one.msg_id, "one")) == []


# ---------------------------------------------------------------------------------------------------- results


def test_accepted_jobs_are_asked_for_after_a_reconnect_until_they_arrive(bench: Bench) -> None:
    bench.accept(bench.submit(1, "a", "b"))
    assert only(bench.hear(Results([result("a")])), ResultsArrived) == [ResultsArrived([result("a")])]
    bench.lose()
    assert watched(bench.connect()) == [["b"]]
    bench.hear(Results([result("b")]))
    bench.lose()
    assert watched(bench.connect()) == []


def test_refused_jobs_are_not_watched(bench: Bench) -> None:
    bench.accept(bench.submit(1, "a", "b"), Acceptance(0, "a", "", "CONFLICT", "other body"))
    bench.lose()
    assert watched(bench.connect()) == [["b"]]


def test_what_nobody_waits_for_is_not_asked_for(bench: Bench) -> None:
    bench.do(Watch(["a", "b"]))
    bench.do(Unwatch(["a"]))
    bench.lose()
    assert watched(bench.connect()) == [["b"]]


def test_many_watched_jobs_are_asked_for_in_batches(bench: Bench) -> None:
    job_ids = [f"job-{number}" for number in range(WATCH_MAX + 1)]
    assert [len(some) for some in watched(bench.do(Watch(job_ids)))] == [WATCH_MAX, 1]


def test_a_refused_watch_is_split_to_find_the_unknown_job(bench: Bench) -> None:
    [request] = sent(bench.do(Watch(["a", "ghost"])), Request)
    singles = sent(bench.hear(ErrorMessage(request.msg_id, "NOT_FOUND", "no")), Request)
    assert [single.params["job_ids"] for single in singles] == [["a"], ["ghost"]]
    assert bench.hear(Reply(singles[0].msg_id, {})) == []
    [refused] = only(bench.hear(ErrorMessage(singles[1].msg_id, "NOT_FOUND", "no")), WatchRefused)
    assert refused.job_ids == ["ghost"]
    assert isinstance(refused.error, NotFound)
    bench.lose()
    assert watched(bench.connect()) == [["a"]]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "OVERLOADED", "DISK_FULL"])
def test_a_watch_that_was_refused_for_now_is_asked_again_whole(bench: Bench, code: str) -> None:
    [request] = sent(bench.do(Watch(["a", "b"])), Request)
    assert bench.hear(ErrorMessage(request.msg_id, code, "not now")) == []
    bench.hear(Results([result("b")]))
    assert watched(bench.after(RETRY_AFTER_S / 2)) == []
    assert watched(bench.after(RETRY_AFTER_S)) == [["a"]]
    assert watched(bench.after(RETRY_AFTER_S)) == []
