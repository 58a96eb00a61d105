"""What an operator may write as an exec of kind python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tasuki.errors import ConfigError
from tasuki.worker import preforked
from tasuki.worker.commands import build_command, build_interpreter
from tasuki.worker.execs import Exec, parse_execs
from tasuki.worker.folder import RunFolder
from tests.worker.runs import attempt_of

COLD = [sys.executable, "-P", preforked.__file__, "shop.pricing:main"]


def exec_with(**settings: Any) -> Exec:
    return parse_execs({"price": {"kind": "python", "call": "shop.pricing:main", **settings}})["price"]


@pytest.mark.parametrize(
    ("settings", "given", "arguments"),
    [
        ({}, (), []),
        ({"args": "any"}, ("a", "{file}"), ["a", "{file}"]),
        ({"argv": ["--fast", "{args}", "end"]}, ("a",), ["--fast", "a", "end"]),
    ],
)
def test_the_command_is_the_same_call_in_a_cold_interpreter(
    tmp_path: Path, settings: dict[str, Any], given: tuple[str, ...], arguments: list[str]
) -> None:
    command = build_command(
        exec_with(**settings), attempt_of(exec="price", args=given), RunFolder(tmp_path), environment={}, incarnation="i"
    )

    assert list(command.argv) == [*COLD, *arguments]
    assert command.warm == "price"


def test_the_interpreter_knows_what_the_exec_fixes_and_nothing_of_a_job() -> None:
    exec_ = exec_with(env={"PYTHONPATH": "/srv/shop"}, allow_env=["SEED"], preload=["decimal"], interpreter="/opt/python")

    order = build_interpreter(exec_, environment={"PATH": "/bin"}, incarnation="incarnation")

    assert order is not None
    assert (order.program, order.call, order.modules) == (b"/opt/python", "shop.pricing:main", ("decimal",))
    assert order.env == {b"PATH": b"/bin", b"PYTHONPATH": b"/srv/shop", b"TASUKI_MARK": b"incarnation/price"}


def test_a_program_needs_no_interpreter() -> None:
    assert build_interpreter(parse_execs({"true": {"command": "true"}})["true"], environment={}, incarnation="i") is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"call": None}, "needs call"),
        ({"call": "shop.pricing"}, "needs call"),
        ({"call": "shop.pricing:"}, "needs call"),
        ({"call": "shop.pricing:main()"}, "needs call"),
        ({"call": "os:system; x"}, "needs call"),
        ({"command": "python"}, "has no command"),
        ({"preload": ["not a module"]}, "not the name of a module"),
        ({"preload": ["-c"]}, "not the name of a module"),
        ({"interpreter": "python3"}, "absolute path"),
        ({"pid_namespace": True}, "is for programs"),
        ({"kind": "ruby"}, "kind"),
        ({"kind": "program", "command": "true"}, 'for kind = "python"'),
    ],
)
def test_what_cannot_work_is_refused_when_the_worker_starts(settings: dict[str, Any], says: str) -> None:
    table = {"kind": "python", "call": "shop.pricing:main", **settings}

    with pytest.raises(ConfigError, match=says):
        parse_execs({"price": {name: value for name, value in table.items() if value is not None}})
