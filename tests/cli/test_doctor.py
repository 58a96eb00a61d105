"""`tasuki doctor` and `tasuki migrate`: what a folder stands on."""

import re
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli import doctor
from tasuki.worker.keeper import cgroup
from tasuki.worker.keeper.cgroup import NoCgroup
from tests.cli.commands import Running, User, running
from tests.support.redis_app import Zpe
from tests.support.redis_service import RedisService

pytestmark = pytest.mark.e2e


def findings(user: User, *words: str) -> dict[str, dict[str, str]]:
    return {found["check"]: found for found in user.json("doctor", "--json", *words)}


def test_a_fresh_machine_is_sound_and_stays_untouched(user: User) -> None:
    found = findings(user)

    assert {each["state"] for each in found.values()} == {"ok"}
    assert not user.data.exists()
    assert re.match("level (cgroup|subreaper): .*(/|no cgroup: )", found["keeper"]["message"])
    assert re.match("memory_mb and processes are (kept by a cgroup|looked at 20 times a second: )", found["limits"]["message"])


@pytest.mark.parametrize(
    ("controllers", "says"),
    [
        ("cpu memory pids", "are kept by a cgroup of each job"),
        ("cpu memory", "20 times a second: {} is handed no controller pids"),
        (None, "20 times a second: there is no cgroup v2"),
    ],
)
def test_how_limits_are_kept_is_said_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: str | None, says: str
) -> None:
    def own() -> Path:
        if controllers is None:
            raise NoCgroup("there is no cgroup v2 file system")
        (tmp_path / "cgroup.controllers").write_text(controllers)
        return tmp_path

    monkeypatch.setattr(cgroup, "delegated", own)

    found = doctor._limits()

    assert says.format(tmp_path) in found.message
    assert found.state == "ok"


def test_a_redis_is_told_to_keep_what_it_is_given(user: User) -> None:
    with RedisService(appendonly="no", maxmemory_policy="allkeys-lru") as service:
        url = service.url()
        bad = findings(user, "--store", url)["store"]
        client: Any = service.client()
        client.config_set("appendonly", "yes")
        client.config_set("maxmemory-policy", "noeviction")
        good = findings(user, "--store", url)["store"]
        client.close()
    gone = user.run("doctor", "--json", "--store", url.replace("redis://", "redis://me:hunter2@"))

    assert bad["state"] == "warn"
    assert re.search("appendonly is off.*allkeys-lru", bad["message"])
    assert good["state"] == "ok"
    assert gone.returncode == 1
    assert "cannot be reached" in gone.stdout
    assert "hunter2" not in gone.stdout + gone.stderr


def test_keys_of_a_redis_that_other_programs_spoilt_are_named(user: User, redis_url: str) -> None:
    zpe = Zpe(redis_url)
    zpe.push("waits", "runs")
    zpe.stage.promote()
    good = findings(user, "--store", redis_url)["store keys"]
    zpe.stage.take("runs")
    zpe.raw.delete("zpe:queue", "zpe:lease:index")
    zpe.raw.delete("zpe:status:waits")
    zpe.raw.set("zpe:status:waits", "queued")
    zpe.raw.set("zpe:status:\x1b[2J\nodd", "queued")
    bad = findings(user, "--store", redis_url)["store keys"]
    zpe.close()

    assert good["state"] == "ok"
    assert bad["state"] == "warn"
    assert bad["message"].endswith(" keys: 4 keys or jobs are not as they should be")
    assert sorted(bad["way_out"].split("\n    ")[1:]) == [
        "job runs is leased and in no index: ZADD zpe:lease:index 0 runs",
        "job waits waits and is not in zpe:queue: LPUSH zpe:queue waits",
        r"zpe:status:\u001b[2J\u000aodd is a string and must be a hash: DEL it",
        "zpe:status:waits is a string and must be a hash: DEL it",
    ]


def test_a_running_server_is_found(served: tuple[User, Running]) -> None:
    user, server = served
    found = findings(user)

    assert f"pid {server.process.pid} " in found["owner"]["message"]
    assert "answers" in found["server"]["message"]
    assert "ok     python" in user.run("doctor").stdout


def test_a_token_file_that_others_can_read_fails(user: User) -> None:
    with running(user, "server", "--no-tcp"):
        pass
    (user.data / "token").chmod(0o644)

    done = user.run("doctor")

    assert done.returncode == 1
    assert "fail   token file" in done.stdout
    assert "chmod 600" in done.stdout


def test_a_server_that_is_not_there_fails_with_the_way_out(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CONNECT_TIMEOUT_S", 0.2)
    done = user.run("doctor", "--to", "unix:///no/such/socket")

    assert done.returncode == 1
    assert "tasuki up" in done.stdout


def test_migrate_makes_the_tables_once(user: User) -> None:
    first = user.json("migrate", "--json")
    second = user.json("migrate", "--json")

    assert "0001_initial" in first["applied"]
    assert second["applied"] == []


def test_migrate_leaves_the_folder_of_a_running_server_alone(served: tuple[User, Running]) -> None:
    user, server = served

    done = user.run("migrate")

    assert done.returncode == 5
    assert f"pid {server.process.pid} " in done.stderr


def test_a_folder_that_cannot_be_made_fails(user: User) -> None:
    done = user.run("doctor", "--data", "/proc/x")

    assert done.returncode == 1
    assert "fail   data folder  /proc/x cannot be made" in done.stdout
