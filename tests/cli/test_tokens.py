"""`tasuki token`: made, used, listed without its secret, revoked."""

import json

import pytest

from tests.cli.commands import Running, User

pytestmark = pytest.mark.e2e

Served = tuple[User, Running]


def test_a_token_opens_the_door_until_it_is_revoked(served: Served, tmp_path) -> None:
    user, server = served
    made = user.json("token", "create", "--kind", "client", "--label", "for the test", "--json")
    stranger = User(tmp_path)
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(made["token"])

    before = stranger.run("list", "--to", server.url, "--token-file", "token")
    assert user.run("token", "revoke", made["token_id"]).returncode == 0
    after = stranger.run("list", "--to", server.url, "--token-file", "token")

    assert before.returncode == 0, before.stderr
    assert after.returncode == 4
    assert "revoked" in after.stderr
    assert made["token"] not in after.stderr


def test_a_token_may_come_on_stdin_or_in_the_environment(served: Served, tmp_path) -> None:
    user, server = served
    secret = user.run("token", "create", "--kind", "client").stdout.strip()
    stranger = User(tmp_path)

    assert stranger.run("list", "--to", server.url, "--token-file", "-", input=secret + "\n").returncode == 0
    assert stranger.run("list", "--to", server.url, TASUKI_TOKEN=secret).returncode == 0


def test_without_a_token_a_stranger_stays_outside(served: Served, tmp_path) -> None:
    _, server = served
    done = User(tmp_path).run("list", "--to", server.url, "--json")

    assert done.returncode == 4
    assert json.loads(done.stderr)["error"]["code"] == "UNAUTHORIZED"


def test_the_list_shows_no_secret_and_no_hash(served: Served) -> None:
    user, _ = served
    made = user.json("token", "create", "--kind", "worker", "--scope", "render.>", "--expires", "1d", "--json")
    rows = {row["token_id"]: row for row in user.json("token", "list", "--json")}
    row = rows[made["token_id"]]

    assert (row["kind"], row["scope"]) == ("worker", ["render.>"])
    assert row["expires_at"] == made["expires_at"]
    assert "sha256" not in row
    assert made["token_id"] in user.run("token", "list").stdout


def test_a_client_token_sees_only_its_own_jobs(served: Served, tmp_path) -> None:
    user, server = served
    stranger = User(tmp_path)
    secret = user.run("token", "create", "--kind", "client").stdout.strip()
    user.run("submit", "--wait", "--job-id", "not-yours", "true")

    done = stranger.run("status", "--to", server.url, "not-yours", TASUKI_TOKEN=secret)
    tokens = stranger.run("token", "list", "--to", server.url, TASUKI_TOKEN=secret)

    assert done.returncode == 3
    assert tokens.returncode == 4


def test_an_unknown_token_cannot_be_revoked(served: Served) -> None:
    user, _ = served

    assert user.run("token", "revoke", "no-such-token").returncode == 3


@pytest.mark.parametrize("flags", [("--kind", "root"), ("--expires", "0d"), ("--expires", "90"), ("--scope", "a..b")])
def test_a_token_that_makes_no_sense_is_refused(served: Served, flags: tuple[str, ...]) -> None:
    user, _ = served
    done = user.run("token", "create", *flags)

    assert (done.returncode, done.stdout) == (2, "")


def test_an_enrol_token_is_for_an_app_or_for_patterns(served: Served) -> None:
    user, _ = served
    both = user.json("token", "enroll", "--app", "zpe", "--scope", "render.>", "--json")
    rows = {row["token_id"]: row for row in user.json("token", "list", "--json")}

    assert both["token"].startswith("tsk_e_")
    assert rows[both["token_id"]]["scope"] == ["job.assign.zpe", "render.>"]


def test_all_tokens_of_a_worker_are_revoked_by_its_id(served: Served) -> None:
    user, _ = served

    assert user.run("token", "revoke", "--worker-id", "w-nobody").returncode == 3
    assert user.run("token", "revoke").returncode == 2
