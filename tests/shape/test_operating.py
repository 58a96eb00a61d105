"""The operator's pages and the files in deploy/ stay true: every `tasuki` line in them is one that the command takes, units and
manifests can be read by those they are for, and links lead somewhere."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest

from tasuki.cli.command import COMMANDS
from tasuki.cli.main import root
from tests.conftest import Require

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/operate").glob("*.md"))
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))

# In a code block or in `code`, with or without a path, sudo or kubectl before it.
# Not the namespace of `kubectl -n tasuki wait`.
_CALL = re.compile(r"(?<!-n)(?:^|[\s`/])tasuki ((?:" + "|".join(COMMANDS) + r")\b[^`\n]*)", re.MULTILINE)
_END_OF_CALL = {
    ">",
    "|",
    "&&",
    "$TASUKI_SERVER_OPTIONS",
    "$TASUKI_WORKER_OPTIONS",
    "$TASUKI_AGENT_OPTIONS",
    "$TASUKI_DISPATCHER_OPTIONS",
}


NEEDED = {"dispatcher": ("--agents", "https://n1:7090")}  # what the unit's own command line gives


def words_of(call: str) -> list[str]:
    """The words that the shell hands over."""
    words = shlex.split(call, comments=True)
    end = next((place for place, word in enumerate(words) if word in _END_OF_CALL), len(words))
    return words[:end]


def calls_in(text: str) -> Iterator[list[str]]:
    for call in _CALL.findall(text):
        words = words_of(call)
        if len(words) > 1:  # a word alone is a mention of the command
            yield words


def option_lines() -> Iterator[list[str]]:
    """The words that the examples of environment files add to the units' command lines."""
    for word in ("server", "worker", "agent", "dispatcher"):
        text = (ROOT / f"deploy/systemd/{word}.env.example").read_text()
        for options in re.findall(rf"^#?TASUKI_{word.upper()}_OPTIONS=(.*)$", text, re.MULTILINE):
            yield [word, *NEEDED.get(word, ()), *options.split()]


def documents(path: Path) -> list[dict[str, Any]]:
    import yaml

    return list(yaml.safe_load_all(path.read_text()))


def accept(words: list[str]) -> None:
    """Parse them as the command does, without running anything; what is wrong is raised."""
    name, *words = words
    command: Any = root.get_command(click.Context(root), name)
    while hasattr(command, "commands") and not (command.invoke_without_command and words[0].startswith("-")):
        name, *words = words
        command = command.commands[name]
    command.make_context(name, list(words))


CALLS = [
    pytest.param(words, id=f"{path.name}: {' '.join(words)[:60]}")
    for path in [*PAGES, *UNITS, ROOT / "deploy/Dockerfile"]
    for words in calls_in(path.read_text())
]


def test_there_is_something_to_look_at() -> None:
    assert len(PAGES) >= 10
    assert len(UNITS) == 4
    assert len(CALLS) > 30


@pytest.mark.parametrize("words", CALLS)
def test_a_line_of_the_operators_pages_is_one_that_the_command_takes(words: list[str]) -> None:
    accept(words)


@pytest.mark.parametrize("words", list(option_lines()))
def test_the_options_in_environment_files_exist(words: list[str]) -> None:
    accept(words)


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(Exception, match="No such option '--no-such-option'"):
        accept(["server", "--no-such-option"])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())

    assert [link for link in links if not (path.parent / link).exists()] == []


def test_what_is_said_about_security_names_tests_and_pages_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    tests = re.findall(r"`((?:[a-z0-9]+/)+test_\w+\.py)`", text)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)

    assert len(tests) > 20
    assert [path for path in tests if not (ROOT / "tests" / path).exists()] == []
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_can_read_the_units(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is no part of what tasuki needs, and is not on every machine")
    # Where tasuki will be installed there is nothing here; the interpreter stands for it.
    here = tmp_path / path.name
    here.write_text(path.read_text().replace("/opt/tasuki/bin/tasuki", sys.executable))

    told = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(here)], capture_output=True, text=True, timeout=60, check=False
    )

    assert (told.returncode, told.stderr) == (0, "")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_yaml_of_kubernetes(path: Path, require: Require) -> None:
    require("PyYAML", find_spec("yaml") is not None, "pip install pyyaml")

    for document in documents(path):
        assert {"apiVersion", "kind"} <= set(document), document
        assert document["kind"] == "Kustomization" or document["metadata"]["name"]


def test_the_containers_arguments_are_those_that_the_command_takes(require: Require) -> None:
    require("PyYAML", find_spec("yaml") is not None, "pip install pyyaml")

    pods = [
        document["spec"]["template"]["spec"]
        for path in MANIFESTS
        for document in documents(path)
        if document["kind"] in ("Deployment", "Job")
    ]
    assert len(pods) == 3
    for pod in pods:
        for container in pod["containers"]:
            accept(container["args"])


def test_containers_have_bounds_and_only_named_namespaces_reach_the_servers(require: Require) -> None:
    require("PyYAML", find_spec("yaml") is not None, "pip install pyyaml")
    found = [document for path in MANIFESTS for document in documents(path)]

    for document in found:
        if document["kind"] in ("Deployment", "Job"):
            for container in document["spec"]["template"]["spec"]["containers"]:
                for bounds in (container["resources"]["requests"], container["resources"]["limits"]):
                    assert set(bounds) == {"cpu", "memory"}
    selectors = re.findall(r"'namespaceSelector': (\{.*?\}\]?\})", str(found))
    assert selectors
    assert all("'key': 'kubernetes.io/metadata.name', 'operator': 'In'" in selector for selector in selectors)


def test_the_image_installs_only_packages_with_known_hashes() -> None:
    installs = re.findall(r"pip install ([^\\&\n]+)", (ROOT / "deploy/Dockerfile").read_text())
    assert installs
    assert all("--require-hashes" in install or "--no-deps /wheels/" in install for install in installs)
    for name, needed in [
        ("requirements.txt", PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["server"]),
        ("requirements-build.txt", PROJECT["build-system"]["requires"]),
    ]:
        text = (ROOT / "deploy" / name).read_text()
        pinned = re.findall(r"^([a-z0-9-]+)==[^ ]+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
        assert len(pinned) == text.count("==")
        assert {re.split(r"[^A-Za-z0-9-]", one)[0].lower() for one in needed} <= set(pinned)
        assert "://" not in text


def test_all_resources_are_part_of_the_whole(require: Require) -> None:
    require("PyYAML", find_spec("yaml") is not None, "pip install pyyaml")
    (kustomization,) = documents(ROOT / "deploy/kubernetes/kustomization.yaml")

    # Applied by hand: secrets are made from their example, a migration comes before the servers.
    by_hand = {"kustomization.yaml", "secrets.example.yaml", "migrate.yaml"}
    assert set(kustomization["resources"]) | by_hand == {path.name for path in MANIFESTS}


def test_a_drain_fits_into_the_time_that_a_worker_is_given(require: Require) -> None:
    require("PyYAML", find_spec("yaml") is not None, "pip install pyyaml")
    unit = (ROOT / "deploy/systemd/tasuki-worker@.service").read_text()
    (pod,) = (
        document["spec"]["template"]["spec"]
        for document in documents(ROOT / "deploy/kubernetes/worker.yaml")
        if document["kind"] == "Deployment"
    )
    stop_grace_s = 30  # for what still runs then: TERM, 5 s, KILL, and the report

    for drain, given in [
        (re.findall(r"--drain-timeout (\d+)", unit), re.findall(r"TimeoutStopSec=(\d+)", unit)),
        (re.findall(r"--drain-timeout=(\d+)", str(pod)), [pod["terminationGracePeriodSeconds"]]),
    ]:
        assert int(drain[0]) + stop_grace_s <= int(given[0])
