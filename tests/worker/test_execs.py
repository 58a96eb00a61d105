"""Execs as an operator writes them, and the commands that come out of them; functions of kind python too."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tasuki.core.job import InputFile
from tasuki.errors import ConfigError
from tasuki.worker import preforked
from tasuki.worker.attempt import JobRefused
from tasuki.worker.commands import build_command, build_interpreter, missing_programs
from tasuki.worker.execs import Exec, load_execs, parse_exec_flag, parse_execs
from tasuki.worker.folder import RunFolder
from tasuki.worker.keeper.protocol import Limits
from tasuki.worker.results import OutputRules
from tests.worker.runs import attempt_of


def argv_of(exec_: Exec, tmp_path: Path, **fields: Any) -> list[str]:
    environment = {"PATH": "/usr/bin:/bin"}
    command = build_command(
        exec_, attempt_of(exec=exec_.name, **fields), RunFolder(tmp_path), environment=environment, incarnation="i"
    )
    return list(command.argv)


def files(*names: str) -> tuple[InputFile, ...]:
    return tuple(InputFile(name, data=b"") for name in names)


# ---------------------------------------------------------------------------------------------------- templates


def test_a_flag_without_placeholder_takes_the_jobs_arguments_at_its_end(tmp_path: Path) -> None:
    render = parse_exec_flag("render=echo --quiet")

    assert argv_of(render, tmp_path, args=("--mode", "fast")) == ["echo", "--quiet", "--mode", "fast"]


@pytest.mark.parametrize("flag", ["render=echo {file}", "render=echo --in={file}"])
def test_a_flag_with_a_placeholder_but_no_args_takes_none(tmp_path: Path, flag: str) -> None:
    with pytest.raises(JobRefused) as refused:
        argv_of(parse_exec_flag(flag), tmp_path, args=("--mode",), files=files("a"))

    assert refused.value.error_code == "ARGS_NOT_ALLOWED"


def test_arguments_are_never_split_or_interpreted_again(tmp_path: Path) -> None:
    args = ("two words", "quo'te\"s", "$HOME", "; rm -rf /", "{file}", "", "new\nline")

    argv = argv_of(parse_exec_flag("tool=echo 'one element' {args} end"), tmp_path, args=args)

    assert argv == ["echo", "one element", *args, "end"]


def test_file_is_replaced_inside_an_element_and_only_once(tmp_path: Path) -> None:
    argv = argv_of(parse_exec_flag("tool=echo --in={file} {files}"), tmp_path, files=files("a {args} {file} b"))

    path = str(tmp_path / "in" / "a {args} {file} b")
    assert argv == ["echo", f"--in={path}", path]


def test_files_become_one_element_each(tmp_path: Path) -> None:
    argv = argv_of(parse_exec_flag("tool=echo {files}"), tmp_path, files=files("-rf", "b c"))

    assert argv == ["echo", str(tmp_path / "in" / "-rf"), str(tmp_path / "in" / "b c")]


@pytest.mark.parametrize("given", [(), ("a", "b")])
def test_file_needs_exactly_one_input(tmp_path: Path, given: tuple[str, ...]) -> None:
    with pytest.raises(JobRefused, match=f"{len(given)} were given") as refused:
        argv_of(parse_exec_flag("tool=echo {file}"), tmp_path, files=files(*given))

    assert refused.value.error_code == "BAD_INPUT"


def test_other_braces_are_left_alone(tmp_path: Path) -> None:
    assert argv_of(parse_exec_flag("tool=awk '{print $1}' {}"), tmp_path) == ["awk", "{print $1}", "{}"]


# ---------------------------------------------------------------------------------------------------- TOML


def test_toml_is_strict_by_default() -> None:
    (tool,) = parse_execs({"tool": {"command": "echo hello"}}).values()

    assert (tool.args, tool.allow_env, tool.env, tool.timeout_s, tool.outputs.globs) == ("none", (), {}, None, ("out/**",))


def test_an_execs_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "execs.toml"
    path.write_text(
        """
        [exec.render]
        command = "/opt/render --quiet"
        args = "any"
        env = { THREADS = "4" }
        allow_env = ["SEED"]
        timeout_s = 600
        outputs = ["out/*.png"]
        cwd = "/srv"
        [exec.list]
        argv = ["ls", "one element"]
        """
    )

    assert load_execs(path) == {
        "render": Exec(
            name="render",
            argv=("/opt/render", "--quiet", "{args}"),
            args="any",
            env={"THREADS": "4"},
            allow_env=("SEED",),
            timeout_s=600,
            outputs=OutputRules(globs=("out/*.png",)),
            cwd="/srv",
        ),
        "list": Exec(name="list", argv=("ls", "one element")),
    }


@pytest.mark.parametrize(("argument", "allowed"), [("--size=12", True), ("--size=12;", False), ("x--size=1", False)])
def test_each_argument_must_match_a_pattern_whole(tmp_path: Path, argument: str, allowed: bool) -> None:
    (tool,) = parse_execs({"tool": {"command": "echo", "args": [r"--size=\d+", "-v"]}}).values()

    if allowed:
        assert argv_of(tool, tmp_path, args=("-v", argument)) == ["echo", "-v", argument]
    else:
        with pytest.raises(JobRefused, match="matches none") as refused:
            argv_of(tool, tmp_path, args=("-v", argument))
        assert refused.value.error_code == "ARGS_NOT_ALLOWED"


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "exactly one of command"),
        ({"command": "a", "argv": ["a"]}, "exactly one of command"),
        ({"command": ""}, "empty command"),
        ({"command": "echo 'open"}, "cannot split"),
        ({"command": "./relative"}, "absolute path or a plain name"),
        ({"command": "{file}"}, "absolute path or a plain name"),
        ({"command": "echo --all={files}"}, "must stand alone"),
        ({"command": "echo x{args}"}, "must stand alone"),
        ({"command": "echo {args}", "args": "none"}, "remove one of them"),
        ({"command": "echo", "args": ["("]}, "not a regular expression"),
        ({"command": "echo", "args": "some"}, "args"),
        ({"command": "echo", "timeout_s": 0}, "above 0"),
        ({"command": "echo", "outputs": ["/etc/*"]}, "below out/"),
        ({"command": "echo", "outputs": ["out/../in/*"]}, "below out/"),
        ({"command": "echo", "cwd": "relative"}, "absolute path"),
        ({"command": "echo", "allow_env": ["A=B"]}, "environment name"),
        ({"command": "echo", "allow_env": ["TASUKI_MARK"]}, "is reserved"),
        ({"command": "echo", "env": {"TASUKI_MARK": "x"}}, "is reserved"),
        ({"command": "echo", "comand": "x"}, "comand"),
        ("echo", "object"),
    ],
)
def test_a_wrong_setting_is_named_with_its_exec(table: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_execs({"tool": table})

    assert "'tool'" in error.value.message
    assert says in error.value.message


@pytest.mark.parametrize("flag", ["render", "=echo", "../evil=echo", "a b=echo", "render="])
def test_a_wrong_flag_is_a_config_error(flag: str) -> None:
    with pytest.raises(ConfigError):
        parse_exec_flag(flag)


@pytest.mark.parametrize(
    ("text", "says"),
    [("not toml", "is not TOML"), ("[execs.a]\ncommand='a'", "'execs'"), ("", "has no exec"), ("exec = 1", "has no exec")],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "execs.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"execs\.toml") as error:
        load_execs(path)

    assert says in error.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_execs(tmp_path / "nowhere")


def test_a_program_is_not_found_in_the_jobs_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = tmp_path / "evil"
    evil.write_text("#!/bin/sh\n")
    evil.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    exec_ = parse_exec_flag("tool=evil")

    with pytest.raises(JobRefused) as refused:
        build_command(exec_, attempt_of(exec="tool"), RunFolder(tmp_path), environment={"PATH": ":.:/usr/bin"}, incarnation="i")

    assert refused.value.error_code == "PROGRAM_NOT_FOUND"


# ---------------------------------------------------------------------------------------------------- limits


def test_limits_are_read_and_none_is_set_by_default() -> None:
    execs = parse_execs(
        {
            "free": {"command": "echo"},
            "tight": {
                "command": "echo",
                "stop_grace_s": 0,
                "memory_mb": 100,
                "processes": 5,
                "cpu_seconds": 60,
                "file_size_mb": 10,
                "open_files": 64,
                "nice": 10,
                "pid_namespace": True,
            },
        }
    )

    assert (execs["free"].limits, execs["free"].stop_grace_s, execs["free"].pid_namespace) == (Limits(), None, False)
    assert execs["tight"].limits == Limits(memory_mb=100, processes=5, cpu_seconds=60, file_size_mb=10, open_files=64, nice=10)
    assert (execs["tight"].stop_grace_s, execs["tight"].pid_namespace) == (0, True)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("memory_mb", 0), ("processes", -1), ("cpu_seconds", 0), ("file_size_mb", 0), ("open_files", 0), ("stop_grace_s", -1)],
)
def test_a_limit_that_nothing_could_keep_is_refused(setting: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be .*, got {value}"):
        parse_execs({"tool": {"command": "echo", setting: value}})


@pytest.mark.parametrize("nice", [-1, 20])
def test_nice_is_only_for_being_nicer(nice: int) -> None:
    with pytest.raises(ConfigError, match="nice must be 0 to 19"):
        parse_execs({"tool": {"command": "echo", "nice": nice}})


def test_a_namespace_is_made_by_unshare_around_the_command(tmp_path: Path) -> None:
    (tool,) = parse_execs({"tool": {"command": "echo hello", "pid_namespace": True}}).values()

    argv = argv_of(tool, tmp_path)

    assert argv[0] == "unshare"
    assert "--pid" in argv
    assert argv[argv.index("--") + 1 :] == [shutil.which("echo", path="/usr/bin:/bin"), "hello"]


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


def test_a_program_that_is_not_there_is_told_at_the_start() -> None:
    execs = [parse_exec_flag("render=/nowhere/render -q"), parse_exec_flag("shell=sh -c true")]
    [problem] = missing_programs({exec_.name: exec_ for exec_ in execs})
    assert problem.startswith("its jobs will fail: program '/nowhere/render' of exec 'render' was not found")
