"""`tasuki worker install`: a unit that systemd can read and that says what the command line said, without any secret in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.output import ExitCode
from tasuki.cli.worker_service import escaped, quoted, quoted_once
from tasuki.errors import ConfigError
from tasuki.worker.credentials import read_credential
from tests.cli.inside import Inside, inside
from tests.doors.http.stage import Stage

__all__ = ["inside"]

TO = ("--to", "tcp://control.example:7000", "--exec", "say=echo")
SECRET = "s3cr3t"


class Home:
    """A user with a systemd of the test's own, which notes what it is told."""

    def __init__(self, folder: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._inside, self._monkeypatch = inside, monkeypatch
        self._notes = folder / "systemctl.log"
        self.programs = folder / "bin"
        self.programs.mkdir()
        monkeypatch.setenv("HOME", str(folder))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        monkeypatch.setenv("PATH", str(self.programs))
        for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "TASUKI_ENROLL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(folder)
        self.systemd()

    def systemd(self, *, code: int = 0, version: int = 252, active: bool = False) -> None:
        script = self.programs / "systemctl"
        script.write_text(
            f"""#!/bin/sh
case "$*" in
*--version) echo "systemd {version} ({version}.1)"; exit 0;;
*is-active*) exit {0 if active else 3};;
esac
echo "$*" >> '{self._notes}'
exit {code}
"""
        )
        script.chmod(0o755)

    def without_systemd(self) -> None:
        (self.programs / "systemctl").unlink()

    def install(self, *arguments: str) -> Any:
        return self._inside("worker", "install", *arguments)

    def unit(self, name: str = "tasuki-worker") -> Path:
        return self.folder / "config" / "systemd" / "user" / f"{name}.service"

    def settings(self, name: str = "tasuki-worker") -> dict[str, str]:
        lines = [line for line in self.unit(name).read_text().splitlines() if "=" in line and not line.startswith("#")]
        return {key: value for key, _, value in (line.partition("=") for line in lines)}

    def told_systemd(self) -> list[str]:
        return self._notes.read_text().splitlines() if self._notes.exists() else []


@pytest.fixture
def home(tmp_path: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(tmp_path, inside, monkeypatch)


# ---------------------------------------------------------------------------------------------------- the unit


def test_the_unit_runs_the_same_worker_with_paths_made_absolute(home: Home) -> None:
    (home.folder / "execs.toml").write_text('[exec.render]\ncommand = "render"\n')
    (home.folder / "worker.token").touch(mode=0o600)
    (home.folder / "worker.token").write_text("tsk_w_x\n")

    done = home.install(*TO, "--config", "execs.toml", "--token-file", "worker.token", "--data", "data", "--worker-id", "w1")

    assert done.returncode == 0, done.stderr
    program, *words = home.settings()["ExecStart"].split()
    assert [program, *words[:4]] == [sys.executable, "-P", "-m", "tasuki", "worker"]
    assert dict(zip(words[4::2], words[5::2], strict=True)) == {
        "--to": "tcp://control.example:7000",
        "--exec": "say=echo",
        "--config": str(home.folder / "execs.toml"),
        "--token-file": str(home.folder / "worker.token"),
        "--data": str(home.folder / "data"),
        "--worker-id": "w1",
        "--drain-timeout": "540",
    }


def test_what_a_shell_says_by_variables_is_written_out(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASUKI_URL", "tcp://elsewhere:7000")
    monkeypatch.setenv("TASUKI_DATA", str(home.folder / "there"))
    monkeypatch.setenv("TASUKI_APP", "zpe")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")

    home.install("--exec", "zpe=zpe")

    start = home.settings()["ExecStart"]
    for words in ("--to tcp://elsewhere:7000", f"--data {home.folder / 'there'}", "--app zpe"):
        assert words in start
    text = home.unit().read_text()
    assert "Environment=HTTPS_PROXY=http://proxy:3128\n" in text
    assert f"Environment=PATH={home.programs}\n" in text


def test_a_drain_fits_into_the_time_that_a_stop_has(home: Home) -> None:
    home.install(*TO, "--drain-timeout", "30")

    assert "--drain-timeout 30" in home.settings()["ExecStart"]
    assert home.settings()["TimeoutStopSec"] == "90"


def test_over_tcp_the_service_has_a_lasting_identity(home: Home) -> None:
    home.install(*TO, "--name", "render")

    words = home.settings("tasuki-worker-render")["ExecStart"].split()
    assert words[words.index("--worker-id") + 1].endswith("-render")


@pytest.mark.parametrize(("version", "growing"), [(252, False), (254, True)])
def test_pauses_grow_where_systemd_can(home: Home, version: int, growing: bool) -> None:
    home.systemd(version=version)
    home.install(*TO)

    assert ("RestartMaxDelaySec" in home.settings()) is growing
    assert home.settings()["Restart"] == "on-failure"


@pytest.mark.parametrize(
    ("text", "argument", "assignment"),
    [
        ("plain-1.2/x", "plain-1.2/x", "plain-1.2/x"),
        ("two words", '"two words"', '"two words"'),
        ("50%", '"50%%"', '"50%%"'),
        ("$HOME", '"$$HOME"', '"$HOME"'),
        ('say "hi"', '"say \\"hi\\""', '"say \\"hi\\""'),
        ("a\\b", '"a\\\\b"', '"a\\\\b"'),
        ("two\nlines", '"two\\nlines"', '"two\\nlines"'),
        (";", '";"', '";"'),
        ("", '""', '""'),
    ],
)
def test_words_are_quoted_as_systemd_reads_them(text: str, argument: str, assignment: str) -> None:
    assert (quoted(text), quoted_once(text)) == (argument, assignment)


def test_what_no_unit_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot stand in a unit"):
        escaped("a\x07b")


def test_systemd_can_read_the_unit(home: Home, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze", path="/usr/bin:/bin")
    if analyze is None:
        pytest.skip("systemd is no part of what tasuki needs, and is not on every machine")
    awkward = "say=echo $HOME ${X} 50% \"quoted\" \\ ; 'single'"
    home.install("--to", "tcp://h:7000", "--exec", awkward, "--data", str(tmp_path / "with space"))

    told = subprocess.run(
        [analyze, "verify", "--user", "--man=no", str(home.unit())],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (told.returncode, told.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------------- secrets


def test_no_secret_is_ever_in_the_unit(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.folder / "worker.token").touch(mode=0o600)
    (home.folder / "worker.token").write_text(SECRET)
    monkeypatch.setenv("TASUKI_TOKEN", SECRET)
    monkeypatch.setenv("TASUKI_ENROLL", SECRET)

    home.install(*TO, "--token-file", "worker.token")

    assert SECRET not in home.unit().read_text()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TASUKI_TOKEN", SECRET, "save it in a file"),
        ("TASUKI_URL", f"redis://user:{SECRET}@host:6379/0", "TASUKI_URL=…"),
        ("TASUKI_COORDINATION", f"redis://:{SECRET}@host/3", "TASUKI_COORDINATION=…"),
        ("TASUKI_URL", f"redis+sentinel://a:26379/main/0?sentinel_password={SECRET}", "TASUKI_URL=…"),
        ("HTTPS_PROXY", f"http://me:{SECRET}@proxy:3128", "HTTPS_PROXY=…"),
    ],
)
def test_a_secret_that_would_have_to_be_written_is_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv("TASUKI_URL", "tcp://h:7000")
    monkeypatch.setenv(variable, value)

    done = home.install("--exec", "say=echo")

    assert done.returncode == ExitCode.USAGE
    assert words in done.stderr
    assert SECRET not in done.stderr
    assert not home.unit().exists()


def test_a_token_from_stdin_is_refused(home: Home) -> None:
    assert "a service does not have" in home.install(*TO, "--token-file", "-").stderr


def test_a_worker_that_is_new_must_enrol_first(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    done = home.install("--to", "https://control.example", "--app", "zpe", "--exec", "zpe=zpe", "--data", "data")

    assert done.returncode == ExitCode.FORBIDDEN
    assert "TASUKI_ENROLL" in done.stderr
    assert not home.unit().exists()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("stage")) as made:
        yield made


def test_a_new_worker_enrols_while_it_is_installed_and_once(home: Home, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--to", stage.url, "--app", "zpe", "--exec", "zpe=zpe", "--data", "data")
    enrol_token = stage.enroll()
    with monkeypatch.context() as patch:
        patch.setenv("TASUKI_ENROLL", enrol_token)
        first = home.install(*arguments)
    (credential,) = (home.folder / "data" / "worker").glob("*.json")
    before = credential.read_bytes()
    text = home.unit().read_text()

    second = home.install(*arguments)

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert credential.read_bytes() == before
    kept = read_credential(credential)
    assert kept is not None
    assert kept.token.secret not in text
    assert enrol_token not in text
    assert "--worker-id" not in text  # the credential says who it is


def test_a_dry_run_spends_no_enrol_token(home: Home, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASUKI_ENROLL", stage.enroll())
    arguments = ("--to", stage.url, "--app", "zpe", "--exec", "zpe=zpe", "--data", "data")

    assert home.install("--dry-run", *arguments).returncode == 0
    assert not (home.folder / "data").exists()
    assert home.install(*arguments).returncode == 0


# ---------------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--to", "tcp://h:7000"), "nothing to run"),
        ((*TO, "--slots", "0"), "at least one slot"),
        ((*TO, "--config", "missing.toml"), "missing.toml"),
        ((*TO, "--token-file", "missing.token"), "missing.token"),
        ((*TO, "--tls-ca", "missing.pem"), "missing.pem"),
        ((*TO, "--on-disconnect", "maybe"), "stop or keep"),
        ((*TO, "--name", "../evil"), "--name"),
        (("--to", "ftp://h", "--exec", "say=echo"), "ftp"),
    ],
)
def test_what_the_worker_would_refuse_is_refused_before_anything_is_written(
    home: Home, arguments: tuple[str, ...], words: str
) -> None:
    done = home.install(*arguments)

    assert done.returncode == ExitCode.USAGE
    assert words in done.stderr
    assert not home.unit().exists()
    assert home.told_systemd() == []


def test_a_dry_run_shows_the_unit_and_does_nothing(home: Home) -> None:
    done = home.install("--dry-run", *TO)

    assert "ExecStart=" in done.stdout
    assert not home.unit().exists()
    assert home.told_systemd() == []
    assert not (home.folder / "data").exists()


def test_a_worker_of_typed_tasks_is_checked_without_a_server(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from tasuki import Tasks\ntasks = Tasks(data='own')\n@tasks.task\ndef one(): ...\n"
    (home.folder / "service_app.py").write_text(program)
    monkeypatch.syspath_prepend(str(home.folder))
    refused = home.install("--tasks", "service_app:tasks", "--reload")
    assert (refused.returncode, "--reload is for development" in refused.stderr) == (ExitCode.USAGE, True)
    shown = home.install("--tasks", "service_app:tasks", "--dry-run")
    # the service works where its module is found, and in the folder of these tasks; nothing was started or made
    assert f"--tasks service_app:tasks --data {home.folder}/own " in shown.stdout
    assert f"WorkingDirectory=-{home.folder}\n" in shown.stdout
    assert (home.unit().exists(), (home.folder / "own").exists(), home.told_systemd()) == (False, False, [])


def test_another_unit_is_replaced_only_with_force(home: Home) -> None:
    home.install(*TO)
    before = home.unit().read_text()

    assert home.install(*TO).returncode == 0
    refused = home.install(*TO, "--slots", "7")
    assert (refused.returncode, home.unit().read_text()) == (ExitCode.USAGE, before)
    assert "--force" in refused.stderr
    assert home.install(*TO, "--slots", "7", "--force").returncode == 0
    assert "--slots 7" in home.unit().read_text()


# ---------------------------------------------------------------------------------------------------- systemd


def test_the_service_is_enabled_and_started(home: Home) -> None:
    told = home.install(*TO, "--json").json

    assert (told["unit"], told["written"], told["started"]) == (str(home.unit()), True, True)
    assert home.told_systemd() == [
        "--user daemon-reload",
        "--user enable tasuki-worker.service",
        "--user start tasuki-worker.service",
    ]


def test_a_service_that_runs_is_started_again_without_waiting_for_its_drain(home: Home) -> None:
    home.install(*TO)
    home.systemd(active=True)
    home.install(*TO, "--slots", "7", "--force")

    assert home.told_systemd()[-1] == "--user restart --no-block tasuki-worker.service"


@pytest.mark.parametrize("there", [True, False])
def test_without_a_systemd_of_the_user_the_commands_are_told(home: Home, there: bool) -> None:
    if there:
        home.systemd(code=1)  # as it says where there is no session
    else:
        home.without_systemd()

    done = home.install(*TO)

    assert done.returncode == 0
    assert "systemctl --user enable --now tasuki-worker.service" in done.stdout
    assert home.unit().exists()


def test_uninstall_stops_and_removes_it(home: Home, inside: Inside) -> None:
    home.install(*TO, "--name", "render")

    done = inside("worker", "uninstall", "--name", "render", "--json").json

    assert (done["removed"], done["stopped"]) == (True, True)
    assert not home.unit("tasuki-worker-render").exists()
    assert home.told_systemd()[-2:] == ["--user disable --now --no-block tasuki-worker-render.service", "--user daemon-reload"]


def test_uninstall_of_what_is_not_there(home: Home, inside: Inside) -> None:
    assert inside("worker", "uninstall").returncode == ExitCode.NOT_FOUND


# ---------------------------------------------------------------------------------------------------- the group


def test_options_before_the_word_are_refused(inside: Inside) -> None:
    done = inside("worker", "--slots", "2", "status")

    assert done.returncode == ExitCode.USAGE
    assert "behind the word" in done.stderr


def test_the_help_shows_the_options_and_the_words(inside: Inside) -> None:
    text = inside("worker", "--help").stdout

    assert "Run jobs until a signal." in text
    assert "--exec" in text
    assert "install    Install the worker" in text
