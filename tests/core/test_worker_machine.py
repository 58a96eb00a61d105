"""The worker's decisions: deadlines, doubles, endings that are kept, leaving."""

from __future__ import annotations

import pytest

from tasuki.core.job import OnDisconnect, Outcome
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.machine import Closed, Hangup, Received, Send, Ticked
from tasuki.core.protocol import (
    HANDSHAKE_TIMEOUT_S,
    CancelLeases,
    Ending,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    JobsFinished,
    JobsRecorded,
    JobsReleased,
    JobsStarted,
    Reply,
    Subscribe,
)
from tasuki.core.reconnect import HELLO_QUICK_S, Connect
from tasuki.core.worker.events import (
    AttemptEnded,
    AttemptReturned,
    ChangePatterns,
    Drain,
    EndingSaved,
    Exit,
    Forget,
    KeepRejected,
    Restored,
    Run,
    Save,
    Started,
    Stop,
)
from tasuki.core.worker.machine import ALONE_S, SAVE_AFTER_S, SEEN_S, STARTED_AFTER_S
from tests.core.worker_bench import ONE, OTHER, TTL_S, Bench, assign, grant, only, sent, welcome


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.answer_beats(bench.connect())
    return bench


# ---------------------------------------------------------------------------------------------------- coming in


def test_it_dials_says_hello_and_gives_credit_for_all_its_places() -> None:
    bench = Bench(capacity=3)
    assert only(bench.do(Ticked()), Connect) == [Connect(ONE)]
    hello = bench.open()
    assert (hello.worker_id, hello.incarnation, hello.patterns, hello.resumed) == ("w1", "one", ("a.*",), False)
    commands = bench.hear(welcome(hello.msg_id))
    assert sent(commands, GiveCredit) == [GiveCredit(3)]
    assert len(sent(commands, Heartbeat)) == 1


def test_after_a_lost_connection_it_says_that_it_was_here_before_and_names_what_it_holds(bench: Bench) -> None:
    bench.hear(assign())
    bench.lose()
    hello = bench.open()
    assert hello.resumed
    commands = bench.hear(welcome(hello.msg_id))
    [beat] = sent(commands, Heartbeat)
    assert [claim.lease_id for claim in beat.claims] == ["lease-a-1"]
    assert sent(commands, GiveCredit) == [GiveCredit(1)]


def test_messages_of_an_older_connection_are_not_heard(bench: Bench) -> None:
    bench.lose()
    bench.connect()
    assert only(bench.do(Received(1, assign())), Run) == []


@pytest.mark.parametrize("code", ["UNAUTHORIZED", "FORBIDDEN", "VERSION", "INVALID", "TOO_LARGE"])
def test_a_refusal_that_will_not_change_ends_the_worker(code: str) -> None:
    bench = Bench()
    bench.open()
    [end] = only(bench.hear(ErrorMessage(0, code, "no")), Exit)
    assert end.error is not None
    assert end.error.code == code
    bench.lose()
    assert only(bench.after(60.0), Connect) == []


@pytest.mark.parametrize(
    "error", [ErrorMessage(0, "UNAVAILABLE", "busy"), ErrorMessage(0, "PROTOCOL", "?"), ErrorMessage(9, "INVALID", "")]
)
def test_other_errors_do_not(bench: Bench, error: ErrorMessage) -> None:
    assert only(bench.hear(error), Exit) == []


def test_it_tries_its_addresses_in_turn_the_lost_one_last() -> None:
    bench = Bench(ONE, OTHER)
    [first] = only(bench.do(Ticked()), Connect)
    bench.answer_beats(bench.connect())
    bench.time += 5.0
    bench.lose()
    dialed = []
    for _ in range(3):
        [dial] = only(bench.after(10.0), Connect)
        dialed.append(dial.address)
        bench.do(Closed(0, "refused"))
    [other] = {ONE, OTHER} - {first.address}
    assert dialed == [other, first.address, other]


def test_a_server_that_the_welcome_names_is_turned_to() -> None:
    bench = Bench()
    bench.do(Ticked())
    hello = bench.open()
    bench.hear(welcome(hello.msg_id, servers=("tcp://10.0.0.2:7000",)))
    bench.lose()
    [dial] = only(bench.after(0.0), Connect)
    assert dial.address == OTHER


def test_a_server_that_answers_with_a_version_that_nobody_asked_for_ends_the_worker() -> None:
    bench = Bench()
    hello = bench.open()
    [end] = only(bench.hear(welcome(hello.msg_id, version=3)), Exit)
    assert end.error is not None
    assert end.error.code == "VERSION"
    assert "this side speaks 1 to 2" in end.error.message


def test_a_hello_that_is_not_answered_is_given_up() -> None:
    bench = Bench()
    bench.open()
    assert only(bench.after(HANDSHAKE_TIMEOUT_S - 0.5), Hangup) == []
    assert len(only(bench.after(1.0), Hangup)) == 1


def test_a_hello_that_is_not_answered_is_given_up_sooner_where_there_is_another_server() -> None:
    bench = Bench(ONE, OTHER)
    bench.open()
    assert only(bench.after(HELLO_QUICK_S - 0.5), Hangup) == []
    assert len(only(bench.after(1.0), Hangup)) == 1


# ---------------------------------------------------------------------------------------------------- deadlines


def test_heartbeats_go_out_every_third_of_the_ttl(bench: Bench) -> None:
    assert sent(bench.after(TTL_S / 3 - 0.1), Heartbeat) == []
    assert len(sent(bench.after(0.2), Heartbeat)) == 1


def test_a_deadline_counts_from_before_the_last_answered_heartbeat_was_sent(bench: Bench) -> None:
    asked_at = bench.time
    bench.after(2.0)
    bench.hear(assign())
    held = bench.machine.held["lease-a-1"]
    assert held.deadline == asked_at + TTL_S - LEASE_MARGIN_S
    [beat] = sent(bench.after(TTL_S / 3), Heartbeat)
    sent_at = bench.time
    bench.time += 1.5
    bench.hear(HeartbeatAnswer(beat.msg_id))
    assert held.deadline == sent_at + TTL_S - LEASE_MARGIN_S


def test_an_answer_that_comes_late_does_not_shorten_a_deadline(bench: Bench) -> None:
    bench.hear(assign())
    [first] = sent(bench.after(TTL_S / 3), Heartbeat)
    [second] = sent(bench.after(TTL_S / 3), Heartbeat)
    bench.hear(HeartbeatAnswer(second.msg_id))
    deadline = bench.machine.held["lease-a-1"].deadline
    bench.hear(HeartbeatAnswer(first.msg_id))
    assert bench.machine.held["lease-a-1"].deadline == deadline


def test_a_worker_that_cannot_renew_stops_at_the_deadline(bench: Bench) -> None:
    bench.hear(assign())
    bench.lose()
    assert only(bench.after(TTL_S - LEASE_MARGIN_S - 0.1), Stop) == []
    assert only(bench.after(0.2), Stop) == [Stop("lease-a-1", "LEASE_LOST")]
    commands = bench.do(AttemptEnded("lease-a-1", Outcome(error_code="LEASE_LOST")))
    assert only(commands, Forget) == [Forget("lease-a-1", "the lease was lost")]
    assert bench.machine.held == {}


def test_what_the_keeper_ended_while_the_worker_hung_is_dropped_and_not_reported(bench: Bench) -> None:
    bench.hear(assign())
    bench.time += TTL_S

    commands = bench.do(AttemptEnded("lease-a-1", Outcome(error_code="LEASE_LOST")))

    assert only(commands, Forget) == [Forget("lease-a-1", "the lease was lost")]
    assert sent(commands, JobsFinished) == []


def test_a_lease_deadline_is_for_those_who_stop() -> None:
    stops, keeps = Bench(), Bench(on_disconnect=OnDisconnect.KEEP, reconnect_grace_s=60.0)
    for bench in (stops, keeps):
        bench.connect()
        bench.hear(assign())

    assert stops.machine.lease_deadline("lease-a-1") == stops.machine.held["lease-a-1"].deadline
    assert keeps.machine.lease_deadline("lease-a-1") is None
    assert stops.machine.lease_deadline("unknown") is None


def test_a_worker_that_keeps_goes_on_past_its_deadline() -> None:
    bench = Bench(on_disconnect=OnDisconnect.KEEP)
    bench.connect()
    bench.hear(assign())
    bench.lose()
    assert only(bench.after(10 * TTL_S), Stop) == []


def test_a_grant_that_was_stuck_on_the_way_is_given_back_unstarted(bench: Bench) -> None:
    bench.time += TTL_S
    commands = bench.hear(assign())
    assert only(commands, Run) == []
    [released] = sent(commands, JobsReleased)
    assert [claim.lease_id for claim in released.claims] == ["lease-a-1"]
    assert sent(commands, GiveCredit) == [GiveCredit(1)]


def test_a_half_open_connection_is_left_while_the_lease_still_lives(bench: Bench) -> None:
    bench.hear(assign())
    deadline = bench.machine.held["lease-a-1"].deadline
    while not only(bench.after(0.1), Hangup):
        assert bench.time < deadline
    assert deadline - bench.time > 1.0


def test_the_server_says_lost_or_cancel_once_and_the_attempt_is_stopped_once(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b")))
    [beat] = sent(bench.after(TTL_S / 3), Heartbeat)
    commands = bench.hear(HeartbeatAnswer(beat.msg_id, ["lease-a-1"], ["lease-b-1"]))
    assert set(only(commands, Stop)) == {Stop("lease-a-1", "CANCELED"), Stop("lease-b-1", "LEASE_LOST")}
    assert only(bench.hear(CancelLeases(["lease-a-1", "lease-b-1"])), Stop) == []


def test_a_canceled_attempt_reports_how_it_ended(bench: Bench) -> None:
    bench.hear(assign())
    assert only(bench.hear(CancelLeases(["lease-a-1"])), Stop) == [Stop("lease-a-1", "CANCELED")]
    [report] = sent(bench.do(AttemptEnded("lease-a-1", Outcome(error_code="CANCELED"))), JobsFinished)
    assert report.endings[0].outcome.error_code == "CANCELED"


def test_a_lost_lease_outweighs_a_cancel(bench: Bench) -> None:
    bench.hear(assign())
    bench.hear(CancelLeases(["lease-a-1"]))
    bench.hear(HeartbeatAnswer(-1, [], ["lease-a-1"]))
    commands = bench.do(AttemptEnded("lease-a-1", Outcome(error_code="CANCELED")))
    assert sent(commands, JobsFinished) == []
    assert only(commands, Forget) == [Forget("lease-a-1", "the lease was lost")]


# ---------------------------------------------------------------------------------------------------- doubles, endings


def test_an_assignment_that_comes_twice_runs_once_and_is_acknowledged_again(bench: Bench) -> None:
    assert len(only(bench.hear(assign()), Run)) == 1
    commands = bench.hear(assign())
    assert only(commands, Run) == []
    assert [claim.lease_id for message in sent(commands, Heartbeat) for claim in message.claims] == ["lease-a-1"]
    assert sent(commands, JobsStarted) == []


def test_an_attempt_that_is_still_held_is_not_run_again_however_long_it_takes(bench: Bench) -> None:
    bench.hear(assign())
    bench.run_answered(SEEN_S + 10.0)
    assert only(bench.hear(assign()), Run) == []


def test_an_ended_attempt_that_is_assigned_again_is_reported_again(bench: Bench) -> None:
    bench.hear(assign())
    bench.do(AttemptEnded("lease-a-1", Outcome(result=b"x")))
    [again] = sent(bench.hear(assign()), JobsFinished)
    assert again.endings[0].outcome.result == b"x"


def test_an_id_that_retention_has_freed_runs_again(bench: Bench) -> None:
    """A new job of the old id begins with attempt 1 as well; only its lease is another one."""
    bench.hear(assign(grant("a", lease_id="old")))
    bench.do(AttemptEnded("old", Outcome(exit_code=0)))
    bench.hear(JobsRecorded(["old"]))

    assert only(bench.hear(assign(grant("a", lease_id="new"))), Run) == [Run(grant("a", lease_id="new"))]


def test_what_was_let_go_on_an_older_connection_is_given_back_when_it_is_offered_again(bench: Bench) -> None:
    bench.hear(assign())
    bench.lose()
    bench.after(TTL_S)
    bench.do(AttemptEnded("lease-a-1", Outcome(error_code="LEASE_LOST")))
    bench.connect()
    commands = bench.hear(assign())
    assert only(commands, Run) == []
    assert len(sent(commands, JobsReleased)) == 1
    assert sent(commands, GiveCredit) == [GiveCredit(1)]
    assert sent(bench.hear(assign()), JobsReleased) == []


def test_an_ending_is_kept_and_offered_again_until_the_server_has_spoken(bench: Bench) -> None:
    bench.hear(assign())
    bench.lose()
    assert sent(bench.do(AttemptEnded("lease-a-1", Outcome(result=b"x"))), JobsFinished) == []
    for _ in range(2):
        [offered] = sent(bench.connect(), JobsFinished)
        assert [ending.lease_id for ending in offered.endings] == ["lease-a-1"]
        bench.lose()
    bench.connect()
    assert only(bench.hear(JobsRecorded(["lease-a-1"])), Forget) == [Forget("lease-a-1")]
    bench.lose()
    assert sent(bench.connect(), JobsFinished) == []


def test_a_fenced_ending_is_forgotten_with_its_reason(bench: Bench) -> None:
    bench.hear(assign())
    bench.do(AttemptEnded("lease-a-1", Outcome()))
    assert only(bench.hear(JobsRecorded([], [("lease-a-1", "attempt 2 runs")])), Forget) == [
        Forget("lease-a-1", "attempt 2 runs")
    ]


def test_a_run_that_was_kept_past_its_deadline_is_shown_before_credit_could_run_its_job_again() -> None:
    bench = Bench(on_disconnect=OnDisconnect.KEEP, reconnect_grace_s=60.0)
    bench.answer_beats(bench.connect())
    bench.hear(assign())
    bench.do(Started("lease-a-1"))
    bench.lose()
    bench.after(2 * TTL_S)
    messages = [command.message for command in bench.connect() if isinstance(command, Send)]
    [started], [beat] = ([message for message in messages if isinstance(message, kind)] for kind in (JobsStarted, Heartbeat))
    assert [claim.lease_id for claim in started.claims] == [claim.lease_id for claim in beat.claims] == ["lease-a-1"]
    assert messages.index(beat) < messages.index(GiveCredit(1))


def test_an_ending_that_nobody_takes_is_saved_once_and_forgotten_when_it_is_recorded(bench: Bench) -> None:
    bench.hear(assign())
    bench.lose()
    bench.do(AttemptEnded("lease-a-1", Outcome(result=b"x")))
    assert only(bench.after(SAVE_AFTER_S - 0.1), Save) == []
    [save] = only(bench.after(0.2), Save)
    assert (save.ending.lease_id, save.ending.outcome.result) == ("lease-a-1", b"x")
    assert only(bench.after(SAVE_AFTER_S), Save) == []
    bench.connect()
    assert only(bench.hear(JobsRecorded(["lease-a-1"])), Forget) == [Forget("lease-a-1")]


def test_an_ending_that_is_recorded_soon_is_never_saved(bench: Bench) -> None:
    bench.hear(assign())
    bench.do(AttemptEnded("lease-a-1", Outcome()))
    bench.after(SAVE_AFTER_S / 2)
    bench.hear(JobsRecorded(["lease-a-1"]))
    assert only([*bench.after(SAVE_AFTER_S), *bench.after(SAVE_AFTER_S)], Save) == []


@pytest.mark.parametrize("online", [True, False])
def test_an_ending_of_an_earlier_process_is_offered_but_its_lease_not_renewed(online: bool) -> None:
    bench = Bench()
    ending = Ending("a", "lease-a-1", 1, Outcome(result=b"x"))
    commands = bench.connect() if online else []
    commands += bench.do(Restored(ending))
    commands += [] if online else bench.connect()
    commands += bench.run_answered(TTL_S)
    assert sent(commands, JobsFinished) == [JobsFinished([ending])]
    assert sent(commands, GiveCredit) == [GiveCredit(2)]
    assert {claim.lease_id for beat in sent(commands, Heartbeat) for claim in beat.claims} == set()
    assert only(bench.hear(JobsRecorded([], [("lease-a-1", "too late")])), Forget) == [Forget("lease-a-1", "too late")]


def test_a_refused_ending_is_set_aside_before_it_is_forgotten(bench: Bench) -> None:
    bench.hear(assign())
    bench.do(AttemptEnded("lease-a-1", Outcome(result=b"dear")))
    commands = bench.hear(JobsRecorded([], [("lease-a-1", "attempt 2 runs")]))
    [aside] = only(commands, KeepRejected)
    assert (aside.ending.outcome.result, aside.reason) == (b"dear", "attempt 2 runs")
    assert commands.index(aside) < commands.index(Forget("lease-a-1", "attempt 2 runs"))


def test_a_result_that_came_when_the_lease_was_lost_already_is_set_aside(bench: Bench) -> None:
    bench.hear(assign())
    bench.answer_beats(bench.after(TTL_S / 3), lost=["lease-a-1"])
    [aside] = only(bench.do(AttemptEnded("lease-a-1", Outcome(result=b"dear"))), KeepRejected)
    assert (aside.ending.outcome.result, aside.reason) == (b"dear", "the lease was lost")


def test_while_a_result_of_an_earlier_process_is_brought_nothing_new_is_asked_for() -> None:
    bench = Bench()
    bench.machine.uploading.add("lease-a-1")
    assert sent([*bench.connect(), *bench.run_answered(TTL_S)], GiveCredit) == []
    bench.machine.uploading.discard("lease-a-1")
    assert sent(bench.do(Restored(Ending("a", "lease-a-1", 1, Outcome()))), GiveCredit) == [GiveCredit(2)]


def test_an_ended_attempt_is_not_stopped_at_its_deadline(bench: Bench) -> None:
    bench.hear(assign())
    bench.lose()
    bench.do(AttemptEnded("lease-a-1", Outcome()))
    assert only(bench.after(2 * TTL_S), Stop) == []


def test_each_ending_gives_credit_once(bench: Bench) -> None:
    bench.hear(assign())
    assert sent(bench.do(AttemptEnded("lease-a-1", Outcome())), GiveCredit) == [GiveCredit(1)]
    assert sent(bench.do(AttemptEnded("lease-a-1", Outcome())), GiveCredit) == []


def test_endings_that_are_not_recorded_do_not_take_places_after_a_reconnect(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b")))
    bench.do(AttemptEnded("lease-a-1", Outcome()))
    bench.lose()
    assert sent(bench.connect(), GiveCredit) == [GiveCredit(1)]


def test_the_start_of_a_command_is_told_at_once_and_again_after_a_reconnect(bench: Bench) -> None:
    bench.hear(assign())
    assert len(sent(bench.do(Started("lease-a-1")), JobsStarted)) == 1
    bench.lose()
    assert len(sent(bench.connect(), JobsStarted)) == 1


def test_the_start_of_what_has_ended_in_the_same_turn_of_the_loop_is_told_by_its_ending(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b")))
    bench.machine.apply(Started("lease-a-1"), bench.now)
    bench.machine.apply(Started("lease-b-1"), bench.now)
    commands = bench.do(AttemptEnded("lease-a-1", Outcome()))
    assert [claim.lease_id for told in sent(commands, JobsStarted) for claim in told.claims] == ["lease-b-1"]
    [report] = sent(commands, JobsFinished)
    assert report.endings[0].started_at == bench.now.wall


def test_the_start_of_a_handler_is_told_only_if_it_takes_longer(bench: Bench) -> None:
    bench.hear(assign())
    bench.machine.handler_started("lease-a-1", bench.now.wall)
    assert sent(bench.after(STARTED_AFTER_S / 2), JobsStarted) == []
    assert len(sent(bench.after(STARTED_AFTER_S), JobsStarted)) == 1
    [report] = sent(bench.do(AttemptEnded("lease-a-1", Outcome())), JobsFinished)
    assert report.endings[0].started_at is not None


def test_everything_of_one_turn_of_the_loop_goes_in_one_message(bench: Bench) -> None:
    bench.hear(assign(grant("a"), grant("b")))
    for lease_id in ("lease-a-1", "lease-b-1"):
        bench.machine.apply(AttemptEnded(lease_id, Outcome()), bench.now)
    commands = bench.machine.flush(bench.now)
    assert [len(message.endings) for message in sent(commands, JobsFinished)] == [2]
    assert sent(commands, GiveCredit) == [GiveCredit(2)]


# ---------------------------------------------------------------------------------------------------- leaving


def test_an_idle_worker_that_drains_leaves_when_the_server_knows(bench: Bench) -> None:
    commands = bench.do(Drain())
    [subscribe] = sent(commands, Subscribe)
    assert subscribe.patterns == ()
    assert only(commands, Exit) == []
    assert only(bench.hear(Reply(subscribe.msg_id, {})), Exit) == [Exit()]


def test_a_draining_worker_waits_for_its_last_ending_to_be_recorded(bench: Bench) -> None:
    bench.hear(assign())
    [subscribe] = sent(bench.do(Drain()), Subscribe)
    bench.hear(Reply(subscribe.msg_id, {}))
    commands = bench.do(AttemptEnded("lease-a-1", Outcome()))
    assert only(commands, Exit) == []
    assert sent(commands, GiveCredit) == []
    assert only(bench.hear(JobsRecorded(["lease-a-1"])), Exit) == [Exit()]


def test_what_crosses_a_drain_is_given_back_before_the_worker_leaves(bench: Bench) -> None:
    [subscribe] = sent(bench.do(Drain()), Subscribe)
    commands = bench.hear(assign())
    assert len(sent(commands, JobsReleased)) == 1
    assert only(commands, Run) == []
    assert only(bench.hear(Reply(subscribe.msg_id, {})), Exit) == [Exit()]


def test_what_a_draining_worker_could_not_start_is_told_before_it_leaves(bench: Bench) -> None:
    bench.hear(assign())
    [subscribe] = sent(bench.do(Drain()), Subscribe)
    bench.hear(Reply(subscribe.msg_id, {}))
    commands = bench.do(AttemptReturned("lease-a-1"))
    kinds = [type(command.message) if isinstance(command, Send) else type(command) for command in commands]
    assert kinds.index(JobsReleased) < kinds.index(Exit)


def test_a_draining_worker_without_a_server_and_without_jobs_leaves_at_once(bench: Bench) -> None:
    bench.lose()
    assert only(bench.do(Drain()), Exit) == [Exit()]


def test_a_draining_worker_that_reconnects_still_takes_nothing(bench: Bench) -> None:
    bench.hear(assign())
    bench.do(Drain())
    bench.lose()
    commands = bench.connect()
    assert [message.patterns for message in sent(commands, Subscribe)] == [()]
    assert sent(commands, GiveCredit) == []


def test_new_patterns_are_told_now_and_after_a_reconnect(bench: Bench) -> None:
    [subscribe] = sent(bench.do(ChangePatterns(("b.*",))), Subscribe)
    assert subscribe.patterns == ("b.*",)
    bench.lose()
    assert bench.open().patterns == ("b.*",)


def alone(bench: Bench, seconds: float) -> list[Exit]:
    """Tell the machine to end, and let so much time pass without a server."""
    bench.do(Drain())
    commands = []
    for _ in range(int(seconds * 2)):
        commands += bench.after(0.5)
        if only(commands, Connect):
            commands += bench.do(Closed(0, "refused"))
    return only(commands, Exit)


def test_who_is_told_to_end_leaves_what_is_on_disk_to_the_next_process_if_no_server_is_there(bench: Bench) -> None:
    bench.hear(assign())
    bench.lose()
    bench.do(AttemptEnded("lease-a-1", Outcome(result=b"x")))
    bench.do(EndingSaved("lease-a-1"))
    assert alone(bench, ALONE_S - 1.0) == []
    assert alone(bench, 1.5) == [Exit()]


def test_it_does_the_same_for_a_run_that_is_over_and_whose_result_could_not_be_brought(bench: Bench) -> None:
    bench.hear(assign())
    bench.lose()
    bench.do(EndingSaved("lease-a-1"))
    assert alone(bench, ALONE_S + 1.0) == [Exit()]


@pytest.mark.parametrize("ended", [True, False])
def test_who_is_told_to_end_stays_while_something_runs_or_is_not_on_disk(bench: Bench, ended: bool) -> None:
    bench.hear(assign(grant("a"), grant("b")))
    bench.lose()
    bench.do(AttemptEnded("lease-a-1", Outcome()))
    bench.do(EndingSaved("lease-a-1"))
    if ended:
        bench.do(AttemptEnded("lease-b-1", Outcome()))
    assert alone(bench, ALONE_S / 2) == []
    bench.machine.held["lease-b-1"].deadline += 60.0
    assert alone(bench, ALONE_S) == []


def test_who_is_told_to_end_waits_for_the_word_of_a_server_that_is_there(bench: Bench) -> None:
    bench.hear(assign())
    bench.do(AttemptEnded("lease-a-1", Outcome()))
    bench.do(EndingSaved("lease-a-1"))
    [told] = sent(bench.do(Drain()), Subscribe)
    bench.hear(Reply(told.msg_id, {}))
    assert only(bench.run_answered(2 * ALONE_S), Exit) == []
    assert only(bench.hear(JobsRecorded(["lease-a-1"])), Exit) == [Exit()]
