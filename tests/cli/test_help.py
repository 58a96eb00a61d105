"""`--help`: examples everywhere, and quick because nothing is loaded that it does not need."""

import json
import subprocess
import sys

import pytest

from tasuki.cli.command import COMMANDS
from tasuki.cli.main import main
from tasuki.cli.output import ExitCode, exit_code_table

HEAVY = (
    "asyncio",
    "django",
    "msgspec",
    "rich",
    "structlog",
    "uvloop",
    "zstandard",
    "tasuki.client",
    "tasuki.worker",
    "tasuki.server",
)
TOKEN_COMMANDS = ["token create", "token list", "token revoke"]
DEAD_COMMANDS = ["dead list", "dead show", "dead retry"]
WORKER_COMMANDS = ["worker install", "worker uninstall", "worker status"]
WORDS = sorted({*COMMANDS, *TOKEN_COMMANDS, *DEAD_COMMANDS, *WORKER_COMMANDS} - {"token", "dead"})


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, object]:
    monkeypatch.setattr(sys, "argv", ["tasuki", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return capsys.readouterr().out, ended.value.code


@pytest.mark.parametrize("words", WORDS)
def test_every_command_ends_its_help_with_examples(words, capsys, monkeypatch) -> None:
    text, code = shown([*words.split(), "--help"], capsys, monkeypatch)

    assert code == 0
    _, examples = text.split("Examples:\n")
    assert all(line.startswith("  ") and ("tasuki " in line) for line in examples.strip("\n").splitlines())


@pytest.mark.parametrize("words", WORDS)
def test_every_command_has_json(words, capsys, monkeypatch) -> None:
    text, _ = shown([*words.split(), "--help"], capsys, monkeypatch)

    assert "--json" in text


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_list_of_commands_has_all_words_and_exit_codes(arguments, capsys, monkeypatch) -> None:
    text, code = shown(arguments, capsys, monkeypatch)

    assert code == 0
    width = max(map(len, COMMANDS))
    for name, (_, summary) in COMMANDS.items():
        assert f"  {name.ljust(width)}  {summary}" in text
    assert exit_code_table() in text.replace("\n  ", "\n")


@pytest.mark.parametrize("word", COMMANDS)
def test_the_line_in_the_list_begins_the_help_of_the_command(word, capsys, monkeypatch) -> None:
    text, _ = shown([word, "--help"], capsys, monkeypatch)

    assert text.split("\n\n")[1].startswith(f"  {COMMANDS[word][1]}")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import json, sys\nfrom tasuki.cli.main import main\nsys.argv = ['tasuki', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = json.loads(done.stdout.splitlines()[-1])

    assert "tasuki.cli.main" in loaded
    assert not [name for name in loaded if any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY)]


def test_a_wrong_word_is_a_usage_error(capsys, monkeypatch) -> None:
    _, code = shown(["rnu"], capsys, monkeypatch)

    assert code == ExitCode.USAGE


def test_the_version_is_told(capsys, monkeypatch) -> None:
    text, code = shown(["--version"], capsys, monkeypatch)

    assert (text.split()[0], code) == ("tasuki", 0)
