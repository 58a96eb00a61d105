"""Parameters that are read without pydantic are read as typer reads them, and short commands do without pydantic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperCommand
from typer.testing import CliRunner

from tasuki.cli.parameters import PlainCommand


def _upper(value: str | None) -> str | None:
    return value.upper() if value else value


Text = Annotated[str, typer.Option("--value")]
MaybeText = Annotated[str | None, typer.Option("--value", envvar="VALUE")]
Changed = Annotated[str | None, typer.Option("--value", callback=_upper)]
Texts = Annotated[list[str] | None, typer.Option("--value")]
Words = Annotated[list[str], typer.Argument()]
Flag = Annotated[bool, typer.Option("--value/--no-value", envvar="VALUE")]
Whole = Annotated[int | None, typer.Option("--value", envvar="VALUE")]
Some = Annotated[int, typer.Option("--value", min=2, max=5)]
Number = Annotated[float, typer.Option("--value")]
Numbers = Annotated[list[int] | None, typer.Option("--value")]
AnyPath = Annotated[Path | None, typer.Option("--value")]
ExistingFile = Annotated[Path | None, typer.Option("--value", exists=True, dir_okay=False)]
ResolvedPath = Annotated[Path | None, typer.Option("--value", resolve_path=True)]

NUMBERS = [
    "0",
    "7",
    "007",
    "-1",
    "+1",
    " 7 ",
    "1_000",
    "1.0",
    "1.5",
    ".5",
    "5.",
    "1e3",
    "inf",
    "nan",
    "٣",
    "",
    "x",
    "9" * 15,
    "9" * 40,
]
CASES: list[tuple[Any, Any, list[str]]] = [
    *((Text, "default", arguments) for arguments in ([], ["--value", ""], ["--value", "é"], ["--value", "\udcff"], ["--value"])),
    *((MaybeText, None, arguments) for arguments in ([], ["--value", "a"])),
    *((Changed, None, arguments) for arguments in ([], ["--value", "a"])),
    *((Texts, None, arguments) for arguments in ([], ["--value", "a"], ["--value", "a", "--value", "\udcff"])),
    *((Words, ..., arguments) for arguments in ([], ["a"], ["a", "b"])),
    *((Flag, False, arguments) for arguments in ([], ["--value"], ["--no-value"], ["--value", "extra"])),
    *((kind, default, ["--value", text]) for kind, default in ((Whole, None), (Some, 3), (Number, 1.5)) for text in NUMBERS),
    *((kind, default, []) for kind, default in ((Whole, None), (Whole, 3), (Some, 3), (Some, 9), (Number, 1.5), (Number, 2))),
    *((Numbers, None, arguments) for arguments in ([], ["--value", "1", "--value", "2"], ["--value", "1", "--value", "x"])),
    *(
        (kind, None, ["--value", text])
        for kind in (AnyPath, ExistingFile, ResolvedPath)
        for text in ("file", "folder", "missing", "link", "dangling", "folder/../file", "", "-", "é", "\udcff")
    ),
]


def _read(cls: type[TyperCommand], kind: Any, default: Any, arguments: list[str], **environ: str) -> tuple[int, str, list[str]]:
    """Exit code, output and what a command with this one parameter was given."""
    seen: list[str] = []
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    def show(value: Any) -> None:
        seen.append(repr(value))  # nan is not itself

    show.__annotations__["value"] = kind
    show.__defaults__ = None if default is ... else (default,)
    app.command(cls=cls)(show)
    done = CliRunner().invoke(app, arguments, env=environ)
    return done.exit_code, done.output, seen


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    Path("link").symlink_to("file")
    Path("dangling").symlink_to("nowhere")


@pytest.mark.usefixtures("paths")
def test_every_value_and_every_refusal_is_typers_own() -> None:
    for case in CASES:
        assert _read(PlainCommand, *case) == _read(TyperCommand, *case), case


@pytest.mark.parametrize(("kind", "default"), [(MaybeText, None), (Flag, False), (Whole, None)])
@pytest.mark.parametrize("text", ["", "1", "true", "a"])
def test_the_environment_is_read_as_typer_reads_it(kind: Any, default: Any, text: str) -> None:
    assert _read(PlainCommand, kind, default, [], VALUE=text) == _read(TyperCommand, kind, default, [], VALUE=text)


@pytest.mark.usefixtures("paths")
def test_a_file_that_may_not_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything

    code, output, seen = _read(PlainCommand, AnyPath, None, ["--value", "file"])

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
    [
        ["--version"],
        ["status", "--to", "tcp://127.0.0.1:1", "--token-file", "missing", "J1"],
        ["doctor", "--data", "folder", "--json"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.usefixtures("paths")
def test_a_short_command_does_without_pydantic(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True, check=True, timeout=60)

    assert json.loads(done.stdout.splitlines()[-1]) == []
