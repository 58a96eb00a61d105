"""Why a job stands where it stands."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tasuki.core.explain import ExplainContext, explain, takers, why_not, why_not_again
from tasuki.core.job import InputFile, Job, JobIncident, JobSpec, Lease, Outcome, State
from tasuki.core.pauses import PausedPattern
from tasuki.core.routing import Policy, Ring, SubjectRoute, hash_prefix
from tasuki.core.units import shown_time

NOW = 1_700_000_000.0


def job(state: State = State.PENDING, *, subject: str = "render.eu.1", **fields: Any) -> Job:
    spec = JobSpec(job_id="a", subject=subject, exec=fields.pop("exec", ""), not_before=fields.pop("asked_not_before", None))
    return Job(**{"spec": spec, "state": state, "submitter": "token:alice", "created_at": NOW, **fields})


def worker(name: str = "w1", *patterns: str, credit: int = 1, running: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "worker_id": name,
        "incarnation": f"{name}-1",
        "patterns": list(patterns or (">",)),
        "credit": credit,
        "running": running,
        **fields,
    }


def lease(worker_id: str = "w1", incarnation: str = "w1-1") -> Lease:
    return Lease("lease", worker_id, incarnation, 1, 100.0)


def told(job: Job, *workers: dict[str, Any], incidents: tuple[JobIncident, ...] = (), **around: Any) -> dict[str, Any]:
    return explain(job, incidents, ExplainContext(**{"workers": workers, "ahead": 0, "now_wall": NOW, **around}))


def because(job: Job, *workers: dict[str, Any], **fields: Any) -> str:
    return " ".join(told(job, *workers, **fields)["because"])


def why(job: Job, *workers: dict[str, Any], **fields: Any) -> str:
    return str(told(job, *workers, **fields)["facts"]["why"])


# ---------------------------------------------------------------------------------------------------- why it waits


def test_no_worker_at_all() -> None:
    assert "No worker is connected" in because(job())
    assert why(job()) == "NO_WORKERS"


def test_a_paused_subject_is_told_with_who_paused_it_since_when_and_why() -> None:
    pauses = [
        PausedPattern("render.eu.*", NOW - 60, "token:bob"),
        PausedPattern("render.>", NOW - 3600, "token:alice", "the licence server is down"),
        PausedPattern("other.>", NOW - 9999, "token:eve"),
    ]
    found = told(job(), worker(), pauses=pauses)

    assert found["facts"]["why"] == "PAUSED"
    assert found["facts"]["pattern"] == "render.>"
    assert found["facts"]["paused_since"] == NOW - 3600
    said = f"paused ('render.>') by token:alice since {shown_time(NOW - 3600)} because: the licence server is down."
    assert said in found["because"][0]
    assert why(job(subject="mail.x"), worker(), pauses=pauses) == "ITS_TURN"
    assert why(job(State.RUNNING, lease=lease()), worker(), pauses=pauses) == "AT_WORKER"


def test_a_run_is_assigned_ahead_not_due_or_waits_for_a_leader() -> None:
    early = {"job_definition_id": 7, "not_before": NOW + 12, "asked_not_before": NOW + 12}
    assigned = job(State.ASSIGNED, lease=lease("w9"), attempt=1, **early)

    assert why(job(**early), worker(), ahead=None) == "NOT_DUE"
    assert why(assigned, worker()) == "ASSIGNED_AHEAD"
    assert "assigned to worker w9, and due in 12s" in because(assigned, worker())
    assert why(job(job_definition_id=7), worker(), ahead=None, has_leader=False) == "NO_LEADER"
    assert why(job(), worker(), has_leader=False) != "NO_LEADER"  # it is ready, and a worker takes it


def test_a_run_that_replaces_another_waits_for_its_end() -> None:
    run = job(job_definition_id=7)

    assert why(run, worker(), ahead=None) == "PREDECESSOR"
    assert why(run, worker(), ahead=0) != "PREDECESSOR"
    assert why(job(), worker(), ahead=None) != "PREDECESSOR"


def test_no_worker_of_this_subject_names_the_nearest_patterns_and_why_they_do_not_match() -> None:
    answer = told(job(), worker("w1", "other.>"), worker("w2", "render.us.*"), worker("w3", "render.eu"))
    assert "No connected worker subscribes to 'render.eu.1'" in answer["because"][0]
    assert "'render.eu' of w3: it ends after 2 token(s), the subject has 3" in answer["because"][0]
    assert "'render.us.*' of w2: its token 2 is 'us', not 'eu'" in answer["because"][0]
    facts = answer["facts"]
    assert (facts["why"], facts["nearest_patterns"][0], facts["fitting_workers"]) == ("NO_PATTERN", "render.eu", [])
    assert facts["nearest"][1] == {"pattern": "render.us.*", "why_not": "its token 2 is 'us', not 'eu'", "worker_ids": ["w2"]}


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("other.>", "its token 1 is 'other', not 'render'"),
        ("render.EU.1", "its token 2 is 'EU', not 'eu' (only in case)"),
        ("render.*", "it ends after 2 token(s), the subject has 3"),
        ("render.*.1.x", "it needs 4 tokens, the subject has 3"),
        ("render.eu.1.>", "it needs 4 tokens or more, the subject has 3"),
    ],
)
def test_why_a_pattern_does_not_match(pattern: str, reason: str) -> None:
    assert why_not(pattern, "render.eu.1") == reason


def test_workers_that_subscribe_to_nothing() -> None:
    assert "They subscribe to nothing at all" in because(job(), worker("w1") | {"patterns": []})


def test_the_workers_that_subscribe_take_another_kind_of_job() -> None:
    answer = told(job(exec="render"), worker("w1", takes="handlers"), worker("w2", "other.>"))
    assert "do not offer the exec 'render' to you (w1: takes handlers). No connected worker offers it" in answer["because"][0]
    assert (answer["facts"]["why"], answer["facts"]["other_kind_workers"]) == ("OTHER_KIND", {"w1": "handlers"})
    assert "which need a Python handler" in because(job(), worker("w1", takes="commands"))


def test_the_workers_that_subscribe_offer_other_programs() -> None:
    offers = [worker("w1", takes="commands", execs=["a", "b"]), worker("w2", "other.>", takes="any", execs=["render"])]
    answer = told(job(exec="render"), *offers)
    assert "(w1: a, b). w2 offers it, but subscribes to other subjects" in answer["because"][0]
    assert answer["facts"]["offered_by"] == ["w2"]
    assert told(job(exec="b"), *offers)["facts"]["fitting_workers"] == ["w1"]


def test_a_job_that_is_left_to_a_worker_without_its_program_is_not_about_to_be_leased() -> None:
    command = job(subject="render.w1", exec="render")
    has_not, has = worker("w1", takes="commands", execs=["other"]), worker("w2", takes="commands", execs=["render"])

    assert "Its subject ends in w1, so only that worker gets it, and it does not offer the exec" in because(command, has_not, has)
    assert why(command, has_not, has) == "OTHER_KIND"
    # others get it while that worker is detached, or before it has asked for work
    assert why(command, {**has_not, "detached": True}, has) == "ITS_TURN"
    assert why(command, {**has_not, "addressed": False}, has) == "ITS_TURN"


def test_a_program_that_is_on_a_list_is_left_to_those_who_have_it() -> None:
    own, named = worker("own", takes="own", execs=["*"]), worker("named", takes="commands", execs=["render"])
    assert told(job(exec="render", submitter="uid:1"), own, named)["facts"]["fitting_workers"] == ["named"]
    assert told(job(exec="ls", submitter="uid:1"), own, named)["facts"]["fitting_workers"] == ["own"]
    assert "own: any program of its own user" in because(job(exec="ls"), own)


def test_a_run_whose_worker_asks_whether_it_may_go_on_says_so_until_when() -> None:
    asks = job(State.RUNNING, attempt=1, lease=lease(), confirming_until=NOW + 3.2)

    assert "Its worker was detached, and asks whether it may continue" in because(asks, worker("w1", detached=True))
    assert told(asks, worker("w1"))["facts"]["confirming_until"] == NOW + 3.2
    assert "confirming_until" not in told(msgspec.structs.replace(asks, confirming_until=None), worker("w1"))["facts"]


def test_the_workers_that_fit_are_detached() -> None:
    answer = told(job(), worker("w1", detached=True), worker("w2", "other.>"))
    assert "The workers that fit are detached: w1. Give one work: tasuki attach w1" in answer["because"][0]
    assert (answer["facts"]["why"], answer["facts"]["detached_workers"]) == ("DETACHED", ["w1"])


def test_all_workers_that_fit_are_busy_and_how_many_stand_before_it_in_which_band() -> None:
    answer = told(job(), worker("w1", "render.>", credit=0, running=4), worker("w2", "other.*"), ahead=7)
    assert "All workers that fit are busy: w1 (4 running)" in answer["because"][0]
    assert "7 ready job(s) of its subject stand before it in priority 5." in answer["because"][0]
    facts = answer["facts"]
    assert (facts["why"], facts["ahead"], facts["priority"], facts["fitting_workers"]) == ("BUSY", 7, 5, ["w1"])


def test_jobs_of_a_higher_band_go_first() -> None:
    assert "Jobs of priority 9 are ready; those that fit the same workers go first." in because(job(), worker(), top_band=9)
    assert "go first" not in because(job(), worker(), top_band=5)


def test_it_waits_for_the_one_worker_that_its_subject_names() -> None:
    answer = told(job(subject="to.w2"), worker("w1", credit=3), worker("w2", credit=0, running=1))
    assert "Its subject ends in w2, so only that worker gets it. All workers that fit are busy: w2" in answer["because"][0]
    assert answer["facts"]["addressed_to"] == "w2"


def test_it_is_about_to_be_leased() -> None:
    answer = told(job(), worker("w1", "render.>"), worker("w2", "render.>", credit=0))
    assert "about to be leased" in answer["because"][0]
    assert (answer["facts"]["why"], answer["facts"]["workers_with_credit"]) == ("ITS_TURN", ["w1"])


def test_the_server_gives_out_nothing_at_the_moment() -> None:
    answer = told(job(), worker(), trouble="3 MiB are free in the data folder")
    assert "gives out no job at the moment: 3 MiB are free" in answer["because"][0]
    assert (answer["facts"]["why"], answer["facts"]["trouble"]) == ("TROUBLE", "3 MiB are free in the data folder")


def test_it_waits_for_a_time_that_its_submitter_named() -> None:
    waiting = job(not_before=NOW + 30, asked_not_before=NOW + 30)
    assert "another 30s: its submitter asked for that" in because(waiting, worker())
    assert why(waiting, worker()) == "NOT_BEFORE"


def test_it_waits_for_its_retry_and_why() -> None:
    waiting = job(not_before=NOW + 10, failures=1, attempt=1, outcome=Outcome(error_code="EXIT_CODE", message="exit code 3"))
    assert "another 10s: retry 1 of 3 after exit code 3" in because(waiting, worker())
    answer = told(waiting, worker())
    assert (answer["facts"]["why"], answer["facts"]["retries"], answer["facts"]["wait_s"]) == (
        "RETRY_DELAY",
        {"used": 1, "of": 3},
        10.0,
    )


def test_it_waits_after_it_was_lost_again() -> None:
    waiting = job(not_before=NOW + 10, losses=2, attempt=2)
    assert "another 10s: attempt 2 was lost, loss 2 of 3." in because(waiting, worker())
    assert why(waiting, worker()) == "LOSS_DELAY"


def test_a_time_that_has_passed_holds_nothing_up() -> None:
    assert "about to be leased" in because(job(not_before=NOW - 1), worker())


def test_it_will_soon_be_too_late() -> None:
    answer = told(job(not_after=NOW + 20), worker(credit=0))
    assert answer["because"][1] == "If it still waits in 20s, it is too late to start, and skipped."
    assert (answer["facts"]["why"], answer["facts"]["not_after"]) == ("BUSY", NOW + 20)


def test_it_is_too_late_and_about_to_be_skipped() -> None:
    answer = told(job(not_after=NOW - 0.1), worker())
    assert answer["because"] == ["It is too late to start it, by its not_after: it is about to be skipped."]
    assert answer["facts"]["why"] == "TOO_LATE"


def test_an_orphan_tells_who_kept_it() -> None:
    answer = told(job(State.ORPHANED, attempt=1, lease=lease("far")), worker())
    assert "about to be leased" in answer["because"][0]
    assert "Worker far kept it and is silent. It may still finish it" in answer["because"][1]
    assert answer["facts"]["kept_by"] == "far"


# ---------------------------------------------------------------------------------------------------- where, and why there


@pytest.mark.parametrize(("state", "word"), [(State.ASSIGNED, "was given to"), (State.RUNNING, "runs at")])
def test_it_is_at_a_worker_that_is_connected(state: State, word: str) -> None:
    answer = told(job(state, attempt=1, lease=lease()), worker("w1", "other", "render.>"))
    assert answer["because"][0] == f"It {word} worker w1, which is connected."
    facts = answer["facts"]
    assert (facts["why"], facts["connected"], facts["pattern"], facts["lease_expires_at"]) == ("AT_WORKER", True, "render.>", 100)


@pytest.mark.parametrize(
    ("subject", "others", "chosen_by", "words"),
    [
        ("to.w1", (worker("w2"),), "LAST_TOKEN", "last token is its id"),
        ("a.b", (worker("w2", "x.>"),), "ONLY_ONE", "No other connected worker"),
        ("a.b", (worker("w2"), worker("w3")), "LEAST_LOAD", "others' (w2, w3); the worker with the smallest share"),
    ],
)
def test_why_it_is_there(subject: str, others: tuple[dict[str, Any], ...], chosen_by: str, words: str) -> None:
    answer = told(job(State.RUNNING, subject=subject, attempt=1, lease=lease()), worker("w1"), *others)
    assert "Its pattern '>' matches." in answer["because"][1]
    assert words in answer["because"][1]
    assert answer["facts"]["chosen_by"] == chosen_by


SCENE = InputFile("a.bin", sha256="ab" * 32, size_bytes=70, cache_id="scene")
HELD = hash_prefix("ab" * 32).hex()
FIRST, SECOND = Ring(["w1", "w2"]).order("user-7")


def routed(policy: str, state: State, *, at: str = "w1", files: tuple[InputFile, ...] = (), **around: Any) -> dict[str, Any]:
    """The explanation of a job with the key user-7 beside the workers w1 and w2, which have one place each."""
    full = around.pop("full", ())
    held = around.pop("held", {})
    running = state is not State.PENDING
    spec = JobSpec(job_id="a", subject="session.x", route_key="user-7", files=files)
    at_worker = {"lease": lease(at, f"{at}-1"), "attempt": 1} if running else {}
    if state.terminal:
        at_worker = {"assigned_worker_id": at, "attempt": 1}
    one = Job(spec=spec, state=state, submitter="token:alice", created_at=NOW, **at_worker)
    workers = [worker(name, credit=0 if name in full else 1, held=held.get(name, "")) for name in ("w1", "w2")]
    return told(one, *workers, routes=[SubjectRoute("session.>", Policy(policy))], route_wait_s=1.5, **around)


@pytest.mark.parametrize(
    ("policy", "around", "words"),
    [
        ("least-load", {}, "It had the smallest load of the workers that fit when it was chosen."),
        ("round-robin", {}, "It was its turn among the 2 workers that fit."),
        ("sticky", {"at": FIRST}, "Its key is 'user-7', which belongs to it among the 2 workers that fit."),
        ("sticky", {"at": SECOND}, f"belongs to {FIRST}: that one was full for longer than the job may wait, or away,"),
        ("cache-affinity", {"files": (SCENE,), "held": {"w1": HELD}}, "It holds 70 of 70 bytes of its cached inputs."),
        (
            "cache-affinity",
            {"files": (SCENE,), "held": {"w2": HELD}},
            "It holds 0 of 70 bytes of its cached inputs; w2 holds 70, but was full for longer than the job may wait.",
        ),
        ("cache-affinity", {"files": (SCENE,)}, "No worker holds its cached inputs; it had the smallest load."),
    ],
)
def test_a_job_is_at_the_worker_that_a_policy_chose(policy: str, around: dict[str, Any], words: str) -> None:
    answer = routed(policy, State.RUNNING, **around)

    assert f"The route 'session.>' chooses by {policy}. " in answer["because"][1]
    assert words in answer["because"][1]
    assert answer["facts"]["chosen_by"] == Policy(policy).name


def test_the_reason_of_the_choice_itself_is_told_for_the_worker_that_was_chosen() -> None:
    known = routed("sticky", State.RUNNING, at=SECOND, route_reason=(SECOND, "It was so."))
    of_another = routed("sticky", State.RUNNING, at=SECOND, route_reason=(FIRST, "It was so."))

    assert known["because"][1].endswith("The route 'session.>' chooses by sticky. It was so.")
    assert f"belongs to {FIRST}: that one was full" in of_another["because"][1]


def test_of_an_ended_job_the_policy_is_told_and_why_if_this_server_chose_its_worker() -> None:
    known = routed("sticky", State.SUCCEEDED, at=SECOND, route_reason=(SECOND, "It was so."))
    of_another = routed("sticky", State.SUCCEEDED, at=SECOND)

    assert known["because"][1] == "The route 'session.>' chooses by sticky. It was so."
    assert of_another["because"][1] == "The route 'session.>' chooses by sticky."


@pytest.mark.parametrize(
    ("policy", "around"),
    [("sticky", {"full": (FIRST,)}), ("cache-affinity", {"full": ("w2",), "files": (SCENE,), "held": {"w2": HELD}})],
)
def test_a_job_waits_for_the_worker_that_a_policy_chose_while_others_have_room(policy: str, around: dict[str, Any]) -> None:
    answer = routed(policy, State.PENDING, **around)

    assert (
        f"A worker is to have it by the route 'session.>', {policy}, and is full; others get it after 1.5s."
        in answer["because"][0]
    )
    facts = answer["facts"]
    assert (facts["why"], facts["route"], facts["policy"], facts["chosen_worker"]) == ("ROUTE_WAIT", "session.>", policy, None)


@pytest.mark.parametrize(
    ("policy", "around", "chosen"),
    [
        ("least-load", {"full": ("w1",)}, "w2"),
        ("round-robin", {"full": ("w1",)}, "w2"),
        ("sticky", {}, FIRST),
        ("cache-affinity", {"files": (SCENE,), "held": {"w2": HELD}}, "w2"),
        ("cache-affinity", {"files": (SCENE,), "full": ("w1",)}, "w2"),
    ],
)
def test_a_job_that_is_about_to_be_leased_names_the_worker_that_a_policy_chooses(
    policy: str, around: dict[str, Any], chosen: str
) -> None:
    answer = routed(policy, State.PENDING, **around)

    assert f"By the route 'session.>', {policy}, it is for {chosen}." in answer["because"][0]
    assert (answer["facts"]["why"], answer["facts"]["chosen_worker"]) == ("ITS_TURN", chosen)


def test_it_is_at_a_worker_that_is_away_or_was_started_anew() -> None:
    answer = told(job(State.RUNNING, attempt=1, lease=lease(incarnation="w1-0")), worker("w1"))
    assert "not connected" in answer["because"][0]
    assert "goes to another one" in answer["because"][1]
    assert answer["facts"]["why"] == "WORKER_AWAY"


def test_a_job_for_one_worker_alone_names_it_while_it_has_room() -> None:
    answer = told(job(subject="render.@w2"), worker("w1"), worker("w2"))
    assert answer["because"] == [
        "It is for worker w2 alone. It is ready, and 1 worker(s) that fit have room: it is about to be leased."
    ]
    assert (answer["facts"]["why"], answer["facts"]["addressed_to"]) == ("ITS_TURN", "w2")


def test_it_was_asked_to_stop() -> None:
    assert "asked to stop" in because(job(State.RUNNING, attempt=1, lease=lease(), cancel_requested=True), worker("w1"))


# ---------------------------------------------------------------------------------------------------- how it ended


def test_it_succeeded() -> None:
    ended = job(State.SUCCEEDED, attempt=1, assigned_worker_id="w9", outcome=Outcome(exit_code=0))
    assert because(ended) == "It succeeded in attempt 1 at worker w9."
    assert why(ended) == "SUCCEEDED"


def test_it_failed_why_there_is_no_further_attempt_and_how_to_set_it_going_again() -> None:
    last = JobIncident(NOW, "dead_lettered", 1, "w1", "", "exit code 3; permanent")
    ended = job(State.FAILED, attempt=1, finished_at=NOW, outcome=Outcome(error_code="EXIT_CODE", message="exit code 3"))
    text = because(ended, incidents=(last,))
    assert "It is FAILED: exit code 3" in text
    assert "tasuki retry a" in text
    assert "There is no further attempt: exit code 3; permanent." in text


def test_what_a_job_has_used_is_never_more_than_it_had() -> None:
    poisonous = job(State.FAILED, attempt=5, losses=4, failures=4, finished_at=NOW, outcome=Outcome(error_code="LOST"))
    facts = told(poisonous)["facts"]
    assert (facts["retries"], facts["losses"]) == ({"used": 3, "of": 3}, {"used": 3, "of": 3})


def test_it_was_skipped() -> None:
    outcome = Outcome(error_code="TOO_LATE", message="it was too late to start")
    ended = job(State.SKIPPED, finished_at=NOW, outcome=outcome)
    assert "It is SKIPPED: it was too late to start" in because(ended)
    assert (why(ended), told(ended)["facts"]["error_code"]) == ("TOO_LATE", "TOO_LATE")


def test_an_ending_without_a_message_tells_its_code() -> None:
    assert "It is TIMED_OUT: TIMED_OUT" in because(job(State.TIMED_OUT, attempt=1, outcome=Outcome(error_code="TIMED_OUT")))


# ---------------------------------------------------------------------------------------------------- what came before

FAILED = JobIncident(NOW - 40, "failed", 1, "w1", "", "exit code 3; retry 1 of 3 in 10 s")
LOST = JobIncident(NOW - 20, "lost", 2, "w2", "", "worker w2 was lost (loss 1 of 3)")


def test_a_later_attempt_tells_what_became_of_each_one_before() -> None:
    running = job(State.RUNNING, attempt=3, failures=1, losses=1, lease=lease())
    answer = told(running, worker("w1"), incidents=(FAILED, LOST))
    sentences = answer["because"]
    place = sentences.index("This is attempt 3.")
    assert sentences[place + 1 : place + 3] == [
        "Attempt 1 at w1 failed: exit code 3; retry 1 of 3 in 10 s.",
        "Attempt 2 at w2 was lost: worker w2 was lost (loss 1 of 3).",
    ]
    facts = answer["facts"]
    assert [(it["attempt"], it["worker_id"], it["ended"]) for it in facts["attempts"]] == [(1, "w1", "failed"), (2, "w2", "lost")]
    assert (facts["retries"], facts["losses"]) == ({"used": 1, "of": 3}, {"used": 1, "of": 3})
    assert [entry["kind"] for entry in answer["story"]] == ["failed", "lost"]


def test_an_attempt_that_was_resumed_is_not_told_as_one_that_ended() -> None:
    orphaned = JobIncident(NOW - 20, "orphaned", 1, "w1", "", "kept")
    resumed = JobIncident(NOW - 5, "resumed", 1, "w1", "", "back")
    answer = told(job(State.RUNNING, attempt=1, lease=lease()), worker("w1"), incidents=(orphaned, resumed))
    assert answer["facts"]["attempts"] == []
    assert [entry["kind"] for entry in answer["story"]] == ["orphaned", "resumed"]


def test_a_refused_report_is_told_with_its_reason() -> None:
    refused = JobIncident(NOW - 5, "fenced", 1, "w1", "", "attempt 1 of worker w1 does not hold the lease; attempt 2 is RUNNING")
    answer = told(job(State.RUNNING, attempt=2, lease=lease()), worker("w1"), incidents=(LOST, refused))
    assert f"A report of w1 on attempt 1 was refused (fenced): {refused.reason}." in answer["because"]
    assert answer["facts"]["fenced"] == [{"attempt": 1, "worker_id": "w1", "reason": refused.reason, "at": NOW - 5}]


def test_a_job_of_a_restored_store_says_so_instead_of_telling_of_attempts_that_never_were() -> None:
    ended = because(job(State.SUCCEEDED, attempt=2_000_000, assigned_worker_id="w1", outcome=Outcome()))
    assert "It succeeded at worker w1. The store was restored from a backup since; its next attempt is 2000001." in ended
    restored = JobIncident(NOW - 20, "restored", 3, "w1", "restore", "from a backup")
    again = told(job(State.RUNNING, attempt=1_000_001, lease=lease()), worker("w1"), incidents=(restored,))
    assert "This is attempt 1000001." in again["because"]
    assert any(sentence.startswith("Attempt 3 at w1 ran when the backup was made") for sentence in again["because"])


def test_a_job_that_was_set_going_again_says_so() -> None:
    requeued = JobIncident(NOW - 3, "requeued", 2, "w1", "operator", "disk replaced; was FAILED: exit code 3")
    text = because(job(generation=2, attempt=2), worker(), incidents=(requeued,))
    assert "set going again 2 time(s)" in text
    assert "Attempt 2 at w1 was the last before it was set going again: disk replaced; was FAILED: exit code 3." in text


# ---------------------------------------------------------------------------------------------------- where the time went


def spans(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer["facts"]["times"].items() if value and not name.endswith("_at")}


def test_a_job_that_did_not_wait_says_nothing_of_time() -> None:
    quick = job(State.SUCCEEDED, attempt=1, assigned_at=NOW + 0.25, started_at=NOW + 0.5, finished_at=NOW + 90.5)
    answer = told(quick, now_wall=NOW + 100)
    assert spans(answer) == {"in_line_s": 0.25, "starting_s": 0.25, "running_s": 90.0}
    assert not [sentence for sentence in answer["because"] if "waited" in sentence]


def test_where_the_time_went_of_a_job_that_ran_late() -> None:
    late = job(
        State.RUNNING,
        attempt=1,
        not_before=NOW + 30,
        asked_not_before=NOW + 30,
        assigned_at=NOW + 42,
        started_at=NOW + 44,
        lease=lease(),
    )
    answer = told(late, worker("w1"), now_wall=NOW + 50)
    assert spans(answer) == {
        "held_back_s": 30.0,
        "in_line_s": 12.0,
        "starting_s": 2.0,
        "running_s": 6.0,
        "longest": "held_back",
    }
    assert "It waited 30s for its time to come (the longest), 12s for a worker, 2s to be started." in answer["because"]


def test_a_job_that_still_waits_counts_until_now() -> None:
    answer = told(job(), worker(credit=0), now_wall=NOW + 75)
    assert spans(answer) == {"in_line_s": 75.0, "longest": "in_line"}
    assert "It waited 75s for a worker." in answer["because"]
    assert answer["facts"]["times"]["ready_at"] == NOW


def test_earlier_attempts_are_counted_apart_from_the_wait_after_them() -> None:
    failed = JobIncident(NOW + 20, "failed", 1, "w1", "", "exit code 3; retry 1 of 3 in 10 s")
    second = job(
        State.SUCCEEDED,
        attempt=2,
        failures=1,
        not_before=NOW + 30,
        assigned_at=NOW + 35,
        started_at=NOW + 35,
        finished_at=NOW + 36,
    )
    answer = told(second, incidents=(failed,), now_wall=NOW + 99)
    assert spans(answer) == {"earlier_s": 20.0, "held_back_s": 10.0, "in_line_s": 5.0, "running_s": 1.0, "longest": "earlier"}


def test_a_skipped_retry_counts_its_wait_to_the_end() -> None:
    failed = JobIncident(NOW + 20, "failed", 1, "w1", "", "exit code 3; retry 1 of 3 in 0 s")
    skipped = JobIncident(NOW + 50, "skipped", 1, "", "", "too late")
    ended = job(State.SKIPPED, attempt=1, assigned_at=NOW + 1, started_at=NOW + 1, finished_at=NOW + 50, outcome=Outcome())
    answer = told(ended, incidents=(failed, skipped), now_wall=NOW + 99)
    assert spans(answer) == {"earlier_s": 20.0, "in_line_s": 30.0, "longest": "in_line"}


# ---------------------------------------------------------------------------------------------------- for programs

EVERYWHERE = {"why", "attempts", "retries", "losses", "generation", "fenced", "times"}


@pytest.mark.parametrize(
    ("one", "more"),
    [
        (job(), {"workers", "fitting_workers", "ahead", "priority"}),
        (job(State.RUNNING, attempt=2, lease=lease()), {"worker_id", "connected", "lease_expires_at", "cancel_requested"}),
        (job(State.FAILED, attempt=1, outcome=Outcome()), {"worker_id", "error_code", "exit_code", "permanent"}),
    ],
)
def test_the_facts_of_a_state_are_always_there_and_can_be_sent_as_they_are(one: Job, more: set[str]) -> None:
    answer = told(one, incidents=(LOST,))
    assert set(answer["facts"]) >= EVERYWHERE | more
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer)) == answer


def test_a_job_that_was_canceled_while_it_ran_has_run_until_then() -> None:
    asked = JobIncident(NOW + 10, "cancel_requested", 1, "w1", "token:alice", "")
    canceled = JobIncident(NOW + 10.1, "canceled", 1, "w1", "", "canceled")
    ended = job(
        State.CANCELED, attempt=1, assigned_at=NOW, started_at=NOW, finished_at=NOW + 10.2, outcome=Outcome(error_code="CANCELED")
    )
    answer = told(ended, incidents=(asked, canceled), now_wall=NOW + 99)
    assert spans(answer) == {"running_s": 10.2}
    assert answer["facts"]["times"]["ready_at"] == NOW


def test_each_worker_says_whether_it_would_take_a_job_and_why() -> None:
    workers = [
        worker("busy", credit=0, running=2),
        worker("elsewhere", "other.>"),
        worker("away") | {"detached": True},
        worker("handlers", takes="handlers"),
        worker("idle", credit=1) | {"patterns": []},
    ]
    found = {one["worker_id"]: (one["takes"], one["because"]) for one in takers("render.eu.1", "ffmpeg", "token:a", workers)}

    assert found["busy"] == (True, "its pattern '>' matches, when one of its 2 running jobs has ended")
    assert found["elsewhere"] == (False, "'other.>': its token 1 is 'other', not 'render'")
    assert found["away"] == (False, "it is detached")
    assert found["handlers"] == (False, "its pattern '>' matches, but it takes handlers")
    assert found["idle"] == (False, "it subscribes to nothing")
    named = takers("render.eu.busy", "", "token:a", [worker("busy"), worker("other")])
    assert [one["takes"] for one in named] == [True, False]
    chosen = takers("render.eu.1", "ffmpeg", "token:a", [worker("any"), worker("own", execs=["ffmpeg"])])
    assert [one["because"] for one in chosen] == [
        "it leaves the exec 'ffmpeg' to workers that name it",
        "its pattern '>' matches",
    ]


def test_a_job_that_is_not_run_again_is_told_apart_from_a_run_that_would_overlap() -> None:
    assert why_not_again("a", State.RUNNING, None) == "job 'a' is RUNNING, not ended; cancel it first"
    assert why_not_again("d1-7", State.FAILED, "d1-8").startswith("job 'd1-7' cannot run now: run d1-8 of the same definition")
