"""Runs README.md and the pages of docs/tutorials as a reader would: a shell for each terminal, and what stays in the background.

What is done with a block of a page stands in a comment before it:

    <!-- runs: NAME -->                     typed into the terminal NAME; every command has to succeed
    <!-- stays: NAME, until "WORDS" -->     started beside the terminal NAME; the next block waits for its words
    <!-- ends: NAME -->                     Ctrl-C for what stays beside NAME (there is no block)
    <!-- shows -->                          what the block before has printed; … stands for anything
    <!-- file: NAME/PATH -->                saved as this file of the terminal NAME
    <!-- not run: WHY -->
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

from tests.support.processes import ChildProcess

BLOCK_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0
STEP = re.compile(
    r"^<!-- (?P<how>runs|stays|ends|shows|file|not run)(?:: (?P<what>.*?))? -->\n(?:```\w*\n(?P<block>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)
BLOCK = re.compile(r"^```(?:sh|json|text|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Step(NamedTuple):
    """One thing to do."""

    how: str
    what: str
    block: str


def steps_of(page: str) -> list[Step]:
    return [Step(found["how"], found["what"] or "", found["block"] or "") for found in STEP.finditer(page)]


def blocks_of(page: str) -> list[str]:
    return BLOCK.findall(page)


class Terminals:
    """`with Terminals(folder, ...) as terminals: terminals.follow(page)`. A terminal NAME begins in the folder of that name."""

    def __init__(self, folder: Path, replaced: Mapping[str, str], path: str, start: str = "") -> None:
        self._folder, self._replaced, self._start = folder, replaced, start
        self._environment = {"PATH": path, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder / "config")}
        self._variables: dict[str, str] = {}
        self._staying: dict[str, ChildProcess] = {}
        self.printed = ""
        """By the block that ran last."""
        self.all_printed: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._staying.values():
            process.kill()

    def follow(self, page: str) -> None:
        for step in steps_of(page):
            match step.how:
                case "runs":
                    self._run(step.what, self._as_here(step.block))
                case "stays":
                    name, _, words = step.what.partition(', until "')
                    self._stay(name, self._as_here(step.block), words.rstrip('"'))
                case "ends":
                    self._end(step.what)
                case "shows":
                    check_shown(step.block, self.printed)
                case "file":
                    path = self._folder / step.what
                    self._place(path.parent.name)
                    path.write_text(step.block)

    def _as_here(self, block: str) -> str:
        for text, here in self._replaced.items():
            block = block.replace(text, here)
        return block

    def _place(self, name: str) -> Path:
        place = self._folder / name
        place.mkdir(exist_ok=True)
        return place

    def _run(self, name: str, block: str) -> None:
        """Run a block; the next one of the same terminal knows what it exports."""
        variables = self._place(name) / ".exported"
        known, note = self._variables.get(name, ""), f"export -p > {shlex.quote(str(variables))}"
        script = "\n".join(["set -eu", self._start, known, block, note])
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self._place(name),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BLOCK_TIMEOUT_S,
        )
        staying = {name: process.output() for name, process in self._staying.items()}
        assert done.returncode == 0, f"{block}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}\n{staying}"
        self.printed = done.stdout
        self.all_printed.append(done.stdout)
        self._variables[name] = variables.read_text()

    def _stay(self, name: str, block: str, words: str) -> None:
        place = self._place(name)
        process = ChildProcess(["bash", "-c", f"exec {block}"], place / ".output", self._environment, cwd=place)
        self._staying[name] = process
        process.wait_for_output(words)

    def _end(self, name: str) -> None:
        process = self._staying.pop(name)
        os.kill(process.pid, signal.SIGINT)
        process.process.wait(END_TIMEOUT_S)


def check_shown(block: str, printed: str) -> None:
    """Check that the block is what was printed, as far as it says."""
    wanted = ".*?".join(re.escape(part) for part in block.strip().split("…"))
    assert re.search(wanted, printed, re.DOTALL), f"the page shows\n{block}\nand this was printed:\n{printed}"
