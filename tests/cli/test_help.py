"""`--help`: examples everywhere, and quick because nothing is loaded that it does not need."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from tasuki.cli.command import COMMANDS
from tasuki.cli.main import main
from tasuki.cli.output import ExitCode, exit_code_table

TASUKI = (sys.executable, "-m", "tasuki")
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
CACHE_COMMANDS = ["cache put", "cache list", "cache show", "cache rm"]
WORKER_COMMANDS = ["worker install", "worker uninstall", "worker status"]
WORDS = sorted({*COMMANDS, *TOKEN_COMMANDS, *DEAD_COMMANDS, *CACHE_COMMANDS, *WORKER_COMMANDS} - {"token", "dead", "cache"})


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


def test_help_is_a_word_too(capsys, monkeypatch) -> None:
    assert shown(["help", "token", "create"], capsys, monkeypatch) == shown(["token", "create", "--help"], capsys, monkeypatch)


@pytest.mark.parametrize("words", WORDS)
def test_every_command_has_json(words, capsys, monkeypatch) -> None:
    text, _ = shown([*words.split(), "--help"], capsys, monkeypatch)

    assert "--json" in text


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
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


def test_help_takes_no_more_than_a_tenth_of_a_second() -> None:
    took_s = []
    while min(took_s, default=1.0) > 0.1 and len(took_s) < 30:  # CPU time, which is longer while the core's other thread is busy
        before = os.times()
        subprocess.run([sys.executable, "-m", "tasuki", "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60)
        after = os.times()
        took_s.append(after.children_user + after.children_system - before.children_user - before.children_system)

    assert round(min(took_s), 3) <= 0.1


def test_a_wrong_word_is_a_usage_error(capsys, monkeypatch) -> None:
    _, code = shown(["rnu"], capsys, monkeypatch)

    assert code == ExitCode.USAGE


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_words_and_options(shell: str) -> None:
    script = subprocess.run([*TASUKI, "completion", shell], capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"_TASUKI_COMPLETE={shell}_complete" in script

    for words, found in (("tasuki can", "cancel"), ("tasuki run --time", "--timeout")):
        # zsh and bash count the words, fish gives the last one
        place = words.split()[-1] if shell == "fish" else str(len(words.split()) - 1)
        environ = {**os.environ, "_TASUKI_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": place}
        done = subprocess.run(TASUKI, env=environ, capture_output=True, text=True, check=True, timeout=60)
        assert found in done.stdout


def test_the_script_for_bash_works_in_bash(tmp_path) -> None:
    (tmp_path / "tasuki").write_text(f'#!/bin/sh\nexec {shlex.join(TASUKI)} "$@"\n')
    (tmp_path / "tasuki").chmod(0o755)
    typed = "COMP_WORDS=(tasuki exp); COMP_CWORD=1; _tasuki_completion tasuki"
    script = f'eval "$(tasuki completion bash)"; {typed}; echo "${{COMPREPLY[@]}}"'
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout == "explain\n"


@pytest.mark.parametrize(
    ("words", "missing", "extra"),
    [(["up", "--no-tcp"], "django", "server"), (["server", "--store", "redis://127.0.0.1:1/0", "--no-tcp"], "redis", "redis")],
)
def test_a_bare_install_says_which_extra_is_missing(tmp_path, words: list[str], missing: str, extra: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "TASUKI_DATA": str(tmp_path / "data"), "HOME": str(tmp_path)}
    done = subprocess.run([*TASUKI, *words], env=environ, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"pip install 'tasuki[{extra}]'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version_is_told(word, capsys, monkeypatch) -> None:
    text, code = shown([word], capsys, monkeypatch)

    assert (text.split()[0], code) == ("tasuki", 0)
