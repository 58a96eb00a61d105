"""`tasuki dead list|show|retry`: jobs that failed for good, from the command line."""

import json
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.errors import JobFailed
from tests.cli.commands import DEADLINE_S, Running, User
from tests.cli.inside import Done, Inside, inside
from tests.support.waiting import until

__all__ = ["inside"]
pytestmark = pytest.mark.e2e


class Operator:
    """Somebody at the shared server's data folder."""

    def __init__(self, user: User, inside: Inside) -> None:
        self.url = f"unix://{user.data / 'socket'}"
        self._inside = inside

    def kill(self, *job_ids: str, subject: str, script: str = "exit 3") -> None:
        """Jobs that fail for good, one after the other."""
        with Client(self.url) as client:
            for job_id in job_ids:
                job = client.submit(exec="sh", args=("-c", script), subject=subject, job_id=job_id, retries=0)
                with pytest.raises(JobFailed):
                    job.result(timeout=20)

    def succeed(self, job_id: str) -> None:
        with Client(self.url) as client:
            client.submit(exec="true", job_id=job_id).result(timeout=20)

    def __call__(self, *words: str) -> Done:
        return self._inside(*words, "--to", self.url)


@pytest.fixture
def operator(served: tuple[User, Running], inside: Inside) -> Operator:
    return Operator(served[0], inside)


def test_dead_letters_are_listed_newest_first_with_their_reason(operator: Operator) -> None:
    operator.kill("dead-a", "dead-b", subject="dead.listed")

    lines = operator("dead", "list", "--subject", "dead.listed").stdout.splitlines()

    assert lines[0].split() == ["JOB", "SUBJECT", "REASON", "ATTEMPTS", "WHEN"]
    assert [line.split()[:2] for line in lines[1:]] == [["dead-b", "dead.listed"], ["dead-a", "dead.listed"]]
    assert all("EXIT" in line for line in lines[1:])


def test_a_list_goes_on_where_the_last_one_ended(operator: Operator) -> None:
    operator.kill("page-a", "page-b", subject="dead.paged")

    first = operator("dead", "list", "--subject", "dead.paged", "--limit", "1", "--json").json
    rest = operator("dead", "list", "--subject", "dead.paged", "--cursor", first["cursor"], "--json").json

    assert [letter["job_id"] for letter in first["jobs"]] == ["page-b"]
    assert [letter["job_id"] for letter in rest["jobs"]] == ["page-a"]
    assert (rest["jobs"][0]["attempts"], rest["jobs"][0]["state"]) == (1, "FAILED")


def test_the_app_stands_for_its_subject(operator: Operator) -> None:
    operator.kill("app-a", subject="job.assign.calc")
    operator.kill("app-b", subject="dead.other")

    assert operator("dead", "list", "--app", "calc", "--quiet").stdout == "app-a\n"


def test_one_is_shown_with_its_reason_and_its_story(operator: Operator) -> None:
    operator.kill("shown", subject="dead.shown", script="exit 7")

    told = operator("dead", "show", "shown", "--json").json
    text = operator("dead", "show", "shown").stdout

    assert (told["job_id"], told["attempts"], told["story"][-1]["kind"]) == ("shown", 1, "dead_lettered")
    assert "7" in told["reason"]
    assert told["reason"] in text
    assert "dead lettered, attempt 1" in text


def test_a_job_that_is_no_dead_letter_is_not_shown(operator: Operator) -> None:
    operator.succeed("alive")

    done = operator("dead", "show", "alive", "--json")

    assert done.returncode == 3
    assert "tasuki explain alive" in json.loads(done.stderr)["error"]["message"]


def test_a_named_one_is_set_going_again(operator: Operator, tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    operator.kill("again", subject="dead.again", script=f"test -e {mended}")
    mended.touch()

    done = operator("dead", "retry", "again", "--reason", "mended")

    assert (done.stdout, done.returncode) == ("1 job(s) set going again\n", 0)
    until(lambda: operator("status", "again", "--json").json[0]["state"] == "SUCCEEDED", DEADLINE_S, "it succeeds now")


def test_all_of_a_subject_are_set_going_again_and_no_others(operator: Operator) -> None:
    operator.kill("one", "two", subject="dead.all")
    operator.kill("three", subject="dead.else")

    would = operator("dead", "retry", "--all", "--subject", "dead.all", "--dry-run", "--json").json
    done = operator("dead", "retry", "--all", "--subject", "dead.all", "--json").json

    assert (would["jobs"], would["dry_run"]) == (["two", "one"], True)
    assert (done["jobs"], done["count"], done["left"]) == (["two", "one"], 2, {})
    explained = operator("explain", "one", "--json").json, operator("explain", "three", "--json").json
    assert [told["facts"]["generation"] for told in explained] == [1, 0]


def test_what_is_no_dead_letter_stays_as_it_is_and_is_told(operator: Operator) -> None:
    operator.kill("really", subject="dead.mixed")
    operator.succeed("fine")

    done = operator("dead", "retry", "really", "fine")

    assert done.returncode == 1
    assert done.stdout.splitlines() == ["fine  SUCCEEDED: not changed, it is not a dead letter", "1 job(s) set going again"]


@pytest.mark.parametrize("words", [("retry",), ("retry", "x", "--all"), ("list", "--subject", "a", "--app", "b")])
def test_what_contradicts_itself_is_refused(inside: Inside, words: tuple[str, ...]) -> None:
    assert inside("dead", *words).returncode == 2
