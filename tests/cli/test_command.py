"""Values of options and arguments: what is accepted, what is refused, and what a short command does without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tasuki.cli.command import PATH, argument, flag, number, option, several
from tasuki.cli.server import server


def read(declared: Callable[[Any], Any], *arguments: str, **environ: str) -> tuple[int, str, list[Any]]:
    """Exit code, output and values of a command with this one parameter."""
    seen: list[Any] = []

    def show(value: Any) -> None:
        seen.append(value)

    done = CliRunner().invoke(click.command()(declared(show)), arguments, env=environ)
    return done.exit_code, done.output, seen


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    Path("dangling").symlink_to("nowhere")


@pytest.mark.parametrize(
    ("declared", "arguments", "value"),
    [
        (option("--value"), [], None),
        (option("--value", default="usual"), [], "usual"),
        (option("--value"), ["--value", ""], ""),
        (option("--value"), ["--value", "é"], "é"),
        (several("--value", help="Some."), [], ()),
        (several("--value", help="Some."), ["--value", "a", "--value", "b"], ("a", "b")),
        (argument("value", metavar="VALUE", help="Some.", nargs=-1), [], ()),
        (argument("value", metavar="VALUE", help="One."), ["a"], "a"),
        (flag("--value", help="Yes."), [], False),
        (flag("--value", help="Yes."), ["--value"], True),
        (option("--value/--no-value", default=True), ["--no-value"], False),
        (number("--value", metavar="N", help="One."), [], None),
        (number("--value", metavar="N", help="One."), ["--value", "1.5"], 1.5),
        (number("--value", metavar="N", help="One.", default=2.0), [], 2.0),
        (number("--value", metavar="N", type=int, help="One."), ["--value", "-7"], -7),
        (option("--value", type=PATH), ["--value", "folder/../file"], Path("folder/../file")),
        (option("--value", type=PATH), ["--value", "missing"], Path("missing")),
        (option("--value", type=PATH), ["--value", "dangling"], Path("dangling")),
        (option("--value", type=PATH), ["--value", "-"], Path("-")),
    ],
)
@pytest.mark.usefixtures("paths")
def test_a_value_has_its_type(declared: Callable[[Any], Any], arguments: list[str], value: Any) -> None:
    code, output, seen = read(declared, *arguments)

    assert (code, seen) == (0, [value]), output
    assert type(seen[0]) is type(value) or isinstance(value, Path)


@pytest.mark.parametrize(
    ("declared", "arguments", "words"),
    [
        (option("--value"), ["--value"], "requires an argument"),
        (option("--value"), ["--value", "\udcff"], r"'\udcff' is not valid UTF-8"),
        (several("--value", help="Some."), ["--value", "a", "--value", "\udcff"], "is not valid UTF-8"),
        (argument("value", metavar="VALUE", help="One."), ["\udcff"], "is not valid UTF-8"),
        (argument("value", metavar="VALUE", help="One."), [], "Missing argument"),
        (flag("--value", help="Yes."), ["--value", "extra"], "unexpected extra argument"),
        (number("--value", metavar="N", help="One."), ["--value", "x"], "is not a valid float"),
        (number("--value", metavar="N", type=int, help="One."), ["--value", "1.5"], "is not a valid integer"),
        (number("--value", metavar="N", type=click.IntRange(2, 5), help="One."), ["--value", "6"], "2<=x<=5"),
    ],
)
def test_a_wrong_value_is_a_usage_error(declared: Callable[[Any], Any], arguments: list[str], words: str) -> None:
    code, output, seen = read(declared, *arguments)

    assert (code, seen) == (2, [])
    assert words in output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--http-lease-ttl 0", "0 must be at least 1s and at most 1d"),
        ("--http-lease-ttl -1", "'-1' is not a duration; write 90s, 5m, 1h or 1d"),
        ("--http-lease-ttl 0.01", "0.01 must be at least 1s and at most 1d"),
        ("--http-lease-ttl 25h", "25h must be at least 1s and at most 1d"),
        ("--http-lease-ttl nan", "'nan' is not a duration"),
        ("--lease-ttl 0.5", "at least 1s"),
        ("--lease-ttl-max 0", "at least 1s"),
        ("--grace-max 2d", "at most 1d"),
        ("--retention 0d", "0d must be more than 0s and at most 36500d"),
        ("--retention 30", "'30' has no unit; write 30d for days, or s, m or h"),
        ("--retention inf", "'inf' is not a duration"),
        ("--blob-grace -1", "'-1' is not a duration"),
        ("--lead-ttl 0", "at least 0.1s and at most 1h"),
        ("--app-retries -1", "-1 is not in the range 0<=x<=1000000"),
        ("--app-timeout 0", "more than 0s and at most 366d"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_the_start_with_its_range(words: str, told: str) -> None:
    done = CliRunner().invoke(server, ["--no-tcp", "--no-unix", *words.split()])  # it has nothing to listen on: never starts

    assert done.exit_code == 2
    assert told in " ".join(done.output.split())


@pytest.mark.parametrize(("app", "told"), [("a.b", "letters, digits"), ("zpe=missing.json", "cannot be read")])
def test_an_app_that_cannot_be_served_is_refused_at_the_start(app: str, told: str) -> None:
    done = CliRunner().invoke(server, ["--no-tcp", "--no-unix", "--app", app])

    assert done.exit_code == 2
    assert told in done.output


def test_an_empty_address_is_refused_and_an_empty_variable_is_none() -> None:
    address = option("--value", metavar="URL", envvar="VALUE")
    code, output, _ = read(address, "--value", "")

    assert code == 2
    assert "the address is empty; leave the option out" in output
    assert read(address, VALUE="")[2] == [None]


def test_the_environment_is_read_where_an_option_has_a_variable() -> None:
    assert read(option("--value", envvar="VALUE"), VALUE="a")[2] == ["a"]
    assert read(option("--value", envvar="VALUE"), VALUE="")[2] == [None]
    assert read(option("--value", envvar="VALUE"), "--value", "b", VALUE="a")[2] == ["b"]


@pytest.mark.usefixtures("paths")
def test_a_file_that_may_not_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything

    code, output, seen = read(option("--value", type=PATH), "--value", "file")

    assert (code, seen) == (2, [])
    assert "not readable" in output


LOADED = """
import json, sys
from tasuki.cli.main import main
sys.argv = ["tasuki", *sys.argv[1:]]
try:
    main()
except SystemExit:
    print(json.dumps([name for name in sys.modules if name.startswith("pydantic")]))
"""


@pytest.mark.parametrize(
    "words",
    [["status", "--to", "tcp://127.0.0.1:1", "--token-file", "missing", "J1"], ["doctor", "--data", "folder", "--json"]],
    ids=lambda words: words[0],
)
@pytest.mark.usefixtures("paths")
def test_a_short_command_does_without_pydantic(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True, check=True, timeout=60)

    assert json.loads(done.stdout.splitlines()[-1]) == []
