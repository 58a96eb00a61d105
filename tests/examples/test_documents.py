"""The documents are true to the code: the drawing of the states, links, commands and options, tables of numbers."""

from __future__ import annotations

import asyncio
import html
import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import httpx
import pytest

from tasuki.cli.main import root
from tasuki.cli.output import ExitCode
from tasuki.core.job import COMMAND_BACKOFF_S, HANDLER_BACKOFF_S, JobSpec
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S, RETENTION_DAYS
from tasuki.core.scheduler.firing import Definition, check_definition
from tasuki.core.scheduler.schedule import ScheduleType
from tasuki.core.subject import matches
from tasuki.worker.execs import load_execs, parse_execs
from tests.shape.source import ROOT
from tests.support.processes import TASUKI, ChildProcess, start_server, start_worker

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"))
)
CONCEPTS = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
DECISIONS = ROOT / "docs" / "decisions"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = {"", "sh", "console"}


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- the drawing


def test_the_drawing_of_the_states_is_that_of_the_table() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "draw_states.py"))

    assert script["with_drawing"](CONCEPTS) == CONCEPTS, "run: python scripts/draw_states.py"


def test_a_drawing_that_is_out_of_date_is_seen() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "draw_states.py"))
    stale = CONCEPTS.replace("PENDING --> ASSIGNED: grant", "PENDING --> RUNNING: grant")

    assert stale != CONCEPTS
    assert script["with_drawing"](stale) == CONCEPTS


def test_the_picture_of_the_demo_is_drawn_by_its_script_from_what_the_demo_says() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "draw_demo.py"))
    picture = script["PICTURE"].read_text(encoding="utf-8")
    shown = [html.unescape(line) for line in re.findall(r'preserve">(.*)</text>', picture)]

    assert script["drawn"]("\n".join(shown[1:])) == picture
    for words in (
        "killing worker-a with SIGKILL",
        "killing the server with SIGKILL",
        "every job has exactly one recorded finish",
    ):
        assert any(words in line for line in shown)
        assert words in (ROOT / "src/tasuki/cli/demo.py").read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- links


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as the common viewers make them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(document: str, text: str) -> list[str]:
    dead = []
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        file = (ROOT / document).parent / path if path else ROOT / document
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            dead.append(target)
    return dead


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    assert not dead_links(document, text_of(document))


def test_a_dead_link_is_seen() -> None:
    text = "[a](docs/nothing.md) [b](docs/concepts.md#nothing) [c](docs/concepts.md#subjects) [d](https://example.org/x)"

    assert dead_links("README.md", text) == ["docs/nothing.md", "docs/concepts.md#nothing"]


# ---------------------------------------------------------------------------------------------------- commands


def tasuki_lines(text: str) -> Iterator[list[str]]:
    """The arguments of each `tasuki …` in the document's shell blocks; several may stand on a line."""
    for language, block in BLOCK.findall(text):
        if language in SHELL:
            for line in filter(re.compile(r"tasuki ").match, block.splitlines()):
                words = shlex.split(line, comments=True)
                starts = [place for place, word in enumerate(words) if word == "tasuki"]
                for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
                    yield words[start + 1 : end]


def unknown_words(arguments: list[str]) -> list[str]:
    """Return what the command line of this version does not have: the command, or an option before the job's own words."""
    name = arguments[0] if arguments else ""
    command: Any = root.get_command(click.Context(root), name)
    if command is None:
        return [name]
    words = iter(arguments[1:])
    alone = not arguments[1:] or arguments[1].startswith("-")
    if hasattr(command, "commands") and not (command.invoke_without_command and alone):
        command = command.commands[next(words)]
    options = {text: option for option in command.params for text in (*option.opts, *option.secondary_opts)}
    unknown = []
    for word in words:
        if not word.startswith("-") or word == "-":
            if command.context_settings.get("allow_interspersed_args", True):
                continue
            break  # from here on all belongs to the job
        option = options.get(word)
        if option is None and word not in ("-h", "--help"):
            unknown.append(word)
        elif option is not None and not option.is_flag:
            next(words, "")
    return unknown


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_options_in_the_documents_exist(document: str) -> None:
    unknown = {
        shlex.join(arguments): words for arguments in tasuki_lines(text_of(document)) if (words := unknown_words(arguments))
    }

    assert not unknown


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("tasuki rum echo", ["rum"]),
        ("tasuki run --tow x echo --tow", ["--tow"]),
        ("tasuki run --to tcp://h:1 echo --any --thing", []),
        ("tasuki status A  tasuki cancel B --becuase C", ["--becuase"]),
        ("tasuki token create --kind client", []),
    ],
)
def test_an_unknown_command_or_option_is_seen(line: str, unknown: list[str]) -> None:
    found = [word for arguments in tasuki_lines(f"```\n{line}\n```\n") for word in unknown_words(arguments)]

    assert found == unknown


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", text_of("Makefile"), re.MULTILINE))
    used = {name for document in DOCUMENTS for name in re.findall(r"^make ([a-z-]+)", text_of(document), re.MULTILINE)}

    assert {"demo", "test"} <= used
    assert used <= targets


@pytest.mark.parametrize(("target", "extras"), [("demo", "server"), ("test", "server,s3,test")])
def test_a_fresh_clone_installs_only_what_its_first_target_needs(tmp_path: Path, target: str, extras: str) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    planned = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert re.findall(r"--editable '\.\[(.*)\]'", planned) == [extras]


# ---------------------------------------------------------------------------------------------------- numbers and tables


def test_the_exit_codes_are_those_of_the_command_line() -> None:
    section = CONCEPTS.partition("\n## Exit codes\n")[2]
    listed = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", section, re.MULTILINE)}

    assert listed == {code: code.meaning for code in ExitCode}


def test_the_examples_of_patterns_are_true() -> None:
    section = CONCEPTS.partition("\n## Subjects\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| (.*?) ?\|$", section, re.MULTILINE)
    assert len(rows) == 4

    for pattern, matching, others in rows:
        assert all(matches(pattern, subject) for subject in re.findall(r"`([^`]+)`", matching)), pattern
        assert not any(matches(pattern, subject) for subject in re.findall(r"`([^`]+)`", others)), pattern


def test_the_numbers_of_leases_retries_and_retention_are_the_defaults() -> None:
    spec = JobSpec(job_id="any")
    facts = [
        f"`max_retries`: {spec.max_retries} for `submit`",
        f"`max_losses`: {spec.max_losses} ",
        f"`backoff_s` is {COMMAND_BACKOFF_S:g} for commands and apps (10, 20, 40 s), {HANDLER_BACKOFF_S:g} for handlers",
        f"A lease lasts {LEASE_TTL_S:g} s",
        f"reaped {LEASE_MARGIN_S:g} s after",
        f"{RETENTION_DAYS:g} days after its end",
    ]

    assert not [fact for fact in facts if fact not in CONCEPTS]


def toml_tables(name: str) -> list[dict[str, Any]]:
    blocks = [block for document in DOCUMENTS for language, block in BLOCK.findall(text_of(document)) if language == "toml"]
    documents = [tomllib.loads(block) for block in blocks]
    assert all(len(document) == 1 and not document.keys() - {"exec", "definitions"} for document in documents)
    return [document[name] for document in documents if name in document]


def test_the_toml_of_definitions_in_the_documents_is_accepted() -> None:
    tables = [table for tables in toml_tables("definitions") for table in tables.items()]
    assert tables

    for name, table in tables:
        form = next((str(form) for form in ScheduleType if form in table), "")
        schedule = {"schedule_type": form, "schedule_value": table.pop(form)} if form else {"type": "event"}
        check_definition(Definition(name=name, **schedule, **table))


def test_the_toml_of_execs_in_the_documents_is_accepted() -> None:
    tables = toml_tables("exec")
    assert tables

    for table in tables:
        assert parse_execs(table)
    assert set(load_execs(ROOT / "examples" / "execs.toml")) == {"count", "sort"}


# ---------------------------------------------------------------------------------------------------- decisions


def records() -> list[Path]:
    return sorted(DECISIONS.glob("[0-9]*.md"))


def test_decision_records_are_numbered_without_gaps_and_listed() -> None:
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")

    assert [path.name[:5] for path in records()] == [f"{number:04}-" for number in range(1, len(records()) + 1)]
    assert not [path.name for path in records() if f"]({path.name})" not in index]


@pytest.mark.parametrize("record", records(), ids=lambda path: path.stem)
def test_a_decision_record_has_its_four_parts(record: Path) -> None:
    text = record.read_text(encoding="utf-8")

    assert text.startswith(f"# {record.name[:4]}: ")
    assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Question", "Choice", "Why", "Cost"]


PYTHON_PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
FILE_BLOCK = re.compile(r"^<!-- file: (\S+) -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def section_of(page: str, name: str, folder: Path) -> str:
    """Write the files of a section into the folder; return its other blocks as one program."""
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for file, text in FILE_BLOCK.findall(section):
        (folder / file).write_text(text, encoding="utf-8")
    return "".join(text for language, text in BLOCK.findall(FILE_BLOCK.sub("", section)) if language == "python")


def run_program(program: str, folder: Path, **env: str) -> str:
    """Run a program as a reader would, and return its output, which has everything that the comments behind print() say."""
    (folder / "page.py").write_text(program, encoding="utf-8")
    known = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **env}
    command = [sys.executable, folder / "page.py"]
    done = subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    for shown in re.findall(r"print\(.*\)\s+# (?:… )?(.*)", program):
        assert shown.partition(": ")[0] in done.stdout or shown in done.stdout, (shown, done.stdout)
    return done.stdout


@pytest.mark.e2e
def test_the_client_of_the_page_for_python_does_what_the_page_says(tmp_path: Path) -> None:
    program = section_of(PYTHON_PAGE, "The client", tmp_path)
    (tmp_path / "names.txt").write_text("c\nb\na\n")
    execs = [word for name in ("echo", "sh", "sort") for word in ("--exec", f"{name}=/usr/bin/env {name} {{args}}")]
    with (
        start_server(tmp_path) as server,
        start_worker(server),
        start_worker(server, *execs, "--data", str(tmp_path / "worker"), command=True, log=tmp_path / "worker.log"),
    ):
        run_program(program, tmp_path, TASUKI_URL=server.unix_url)
    assert (tmp_path / "results" / "out" / "copy.txt").read_text() == "c\nb\na\n"


@pytest.mark.e2e
def test_the_tasks_of_the_page_for_python_do_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = section_of(PYTHON_PAGE, "Tasks", tmp_path)
    with start_server(tmp_path) as server, ExitStack() as workers:
        env = {"TASUKI_URL": server.unix_url}
        for place in ("app:tasks", "fragile:tasks"):
            command = [*TASUKI, "worker", "--tasks", place]
            worker = workers.enter_context(ChildProcess(command, tmp_path / f"{place[:-6]}.log", env, cwd=tmp_path))
            worker.wait_for_output("connected to")
        run_program(program, tmp_path, **env)
        # and the web application of the page
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("TASUKI_URL", server.unix_url)
        web = importlib.import_module("web")

        async def browse() -> object:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(web.web), base_url="http://web") as browser:
                job_id = (await browser.post("/resize?path=a.png")).json()
                return (await browser.get(f"/resize/{job_id}")).json()

        with sys.modules["app"].tasks:
            assert asyncio.run(browse()) == {"width": 200, "letters": 5}


@pytest.mark.e2e
def test_the_program_for_users_of_other_queues_does_what_the_page_says(tmp_path: Path) -> None:
    program = section_of(text_of("docs/from-celery.md"), "The program", tmp_path)
    env = {"TASUKI_DATA": str(tmp_path / "data")}
    command = [*TASUKI, "worker", "--tasks", "tasks_here:tasks"]
    with ChildProcess(command, tmp_path / "worker.log", env, cwd=tmp_path) as worker:
        worker.wait_for_output("connected to")
        run_program(program, tmp_path, **env)


@pytest.mark.e2e
def test_the_handler_of_the_page_for_python_does_what_the_page_says(tmp_path: Path) -> None:
    program = section_of(PYTHON_PAGE, "Handlers", tmp_path)
    (tmp_path / "large.bin").write_bytes(b"\1" * 1_000_000)
    with start_server(tmp_path) as server:
        (tmp_path / "worker.token").write_text(server.create_token("worker"))
        (tmp_path / "worker.token").chmod(0o600)
        (tmp_path / "worker.py").write_text(program.replace("tls://host:7000", server.url))
        with ChildProcess([sys.executable, "worker.py"], tmp_path / "worker.log", {}, cwd=tmp_path) as worker:
            worker.wait_for_output("connected to")
            with server.client() as client:
                assert client.submit(subject="files.checksum", files=[tmp_path / "large.bin"]).result(timeout=30) == b"1000000"
            assert "(files.checksum) succeeded in" in worker.output()
