"""README.md and the tutorials are true: every command of the page is run, and gives what the page says."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import Require
from tests.examples.tutorial import Terminals, blocks_of, check_shown, steps_of
from tests.shape.source import ROOT
from tests.support.ports import free_port
from tests.support.redis_service import RedisService

TUTORIALS = ROOT / "docs" / "tutorials"
LAB_PC = (TUTORIALS / "lab-pc.md").read_text(encoding="utf-8")
README = ROOT / "README.md"
INSTALL = "python3 -m venv .venv && . .venv/bin/activate && pip install --quiet -e '.[server]'"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
COPY = 'scp() { cp "${@:1:$#-1}" ../lab/; }'  # the other machine is the folder beside


@pytest.mark.e2e
def test_a_lab_pc_computes_for_a_control_plane(tmp_path: Path, redis_service: RedisService, require: Require) -> None:
    for program, package in (("pw.x", "quantum-espresso"), ("curl", "curl")):
        require(program, shutil.which(program) is not None, f"make system-deps, or apt-get install {package}")
    (tmp_path / "lab").mkdir()
    (tmp_path / "control").mkdir()
    shutil.copy(ROOT / "examples" / "zpe" / "h2.json", tmp_path / "control")
    shutil.copytree(ROOT / "examples" / "zpe", tmp_path / "lab" / "zpe")
    port = free_port()
    here = {
        "--http 0.0.0.0:7443": f"--tcp 127.0.0.1:{free_port()} --http 127.0.0.1:{port}",
        "control.example": "localhost",
        "7443": str(port),
        "redis://127.0.0.1:6379/0": redis_service.url(),
    }

    with Terminals(tmp_path, here, PATH, start=COPY) as terminals:
        terminals.follow(LAB_PC)

    answers = [
        json.loads(line)
        for text in terminals.all_printed
        for line in text.replace("}{", "}\n{").splitlines()
        if '"zpe_ev"' in line
    ]
    assert [answer["job_id"] for answer in answers] == ["h2", "again"]
    assert all(0.26 <= answer["result"]["zpe_ev"] <= 0.28 for answer in answers)


@pytest.mark.e2e
def test_the_readme(tmp_path: Path) -> None:
    page = README.read_text(encoding="utf-8")
    assert page.count(INSTALL) == 1

    with Terminals(tmp_path, {INSTALL: "true"}, PATH) as terminals:
        terminals.follow(page)

    first, _ = terminals.all_printed
    assert first.startswith("hello\nsquares  5 jobs, 5 SUCCEEDED\n1\n4\n9\n16\n25\nsquares  array of 5 jobs: 5 SUCCEEDED\n")
    assert first.endswith("the same\n")
    assert (tmp_path / "readme/squares/squares.3/out/square").read_text() == "9\n"


@pytest.mark.e2e
def test_a_folder_of_files_goes_to_three_machines(tmp_path: Path) -> None:
    for machine in ("two", "three"):
        (tmp_path / machine).mkdir()
    page = (TUTORIALS / "folder-of-files.md").read_text(encoding="utf-8")

    with Terminals(tmp_path, {"7000": str(free_port())}, PATH, start='scp() { cp "${@:1:$#-1}" "../${!#%:}/"; }') as terminals:
        terminals.follow(page)

    assert len(list((tmp_path / "here/results").glob("texts.*/out/*.txt"))) == 20
    assert "0 job(s) set going again" in terminals.printed


@pytest.mark.parametrize("page", [ROOT / "README.ja.md", *sorted(TUTORIALS.glob("*.ja.md"))], ids=lambda page: page.name)
def test_the_japanese_page_has_the_same_commands(page: Path) -> None:
    english = page.with_name(page.name.replace(".ja.md", ".md")).read_text(encoding="utf-8")

    assert blocks_of(page.read_text(encoding="utf-8")) == blocks_of(english)


@pytest.mark.parametrize("page", [README, *sorted(TUTORIALS.glob("*.md"))], ids=lambda page: page.name)
def test_every_block_says_what_is_done_with_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert [step.block for step in steps_of(text) if step.block] == blocks_of(text)


def test_what_is_shown_must_have_been_printed() -> None:
    check_shown("one … three\n", "zero\none two three\n")
    with pytest.raises(AssertionError, match="the page shows"):
        check_shown("one … four\n", "one two three\n")


@pytest.mark.e2e
def test_first_tasks_in_ten_minutes(tmp_path: Path) -> None:
    with Terminals(tmp_path, {}, PATH) as terminals:
        terminals.follow((TUTORIALS / "first-tasks.md").read_text(encoding="utf-8"))
