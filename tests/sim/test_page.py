"""docs/simulator.md speaks of what there is: every kind of fault, every invariant, every option of the command."""

import re
from pathlib import Path

import pytest

from tasuki.cli.sim import sim
from tasuki.testing.sim.checker import INVARIANTS
from tasuki.testing.sim.faults import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_fault_is_described(kind: str) -> None:
    assert f"`{kind}`" in section("Faults")


def test_no_kind_of_fault_is_described_that_does_not_exist() -> None:
    named = re.findall(r"`([a-z_]+)`", " ".join(line.split("|")[1] for line in section("Faults").splitlines() if line[:1] == "|"))

    assert sorted(named) == sorted(KINDS)


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_every_invariant_is_described(invariant: str) -> None:
    assert re.search(rf"\| .*\b{invariant}\b.* \|", section("The checker"))


def test_every_option_that_the_page_uses_exists() -> None:
    used = set(re.findall(r"(?<=\s)--[a-z-]+", " ".join(re.findall(r"tasuki sim [^`\n#]*", PAGE))))
    names = {name for parameter in sim.params for name in parameter.opts}

    assert used
    assert used <= names
