"""The pages in docs/django are true to the code: their Python runs in the example's project, their command lines are taken."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from tasuki.django import standalone

standalone.configure()

from django.core.management import CommandError, load_command_class  # noqa: E402

from tests.shape.source import ROOT  # noqa: E402
from tests.support.django_site import EXAMPLE, DjangoSite  # noqa: E402

PAGES = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "docs" / "django").glob("*.md"))}
FILE = re.compile(r"^<!-- file: (\S+) -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MANAGE = re.compile(r"manage\.py (tasuki_\w+)((?: (?:'[^'\n]*'|[^\s`'#;,]+))*)")
RUN = ("commands.md", "migrating.md", "schedules.md", "tasks.md", "transactions.md")
"""Pages whose other blocks, one after the other, are a program. Those of the README are fragments of a project's files."""


@pytest.mark.parametrize("page", PAGES)
def test_the_names_that_a_page_imports_exist(page: str) -> None:
    blocks = [ast.parse(block) for block in PYTHON.findall(PAGES[page])]
    imports = [node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]

    for node in imports:
        if (module := node.module or "").startswith("tasuki"):
            assert not [name.name for name in node.names if not hasattr(import_module(module), name.name)]


@pytest.mark.parametrize("page", PAGES)
def test_the_command_lines_of_a_page_are_taken(page: str) -> None:
    for name, words in MANAGE.findall(PAGES[page]):
        if arguments := shlex.split(words):
            load_command_class("tasuki.django", name).create_parser("manage.py", name).parse_args(arguments)


def test_a_command_line_that_is_not_taken_is_seen() -> None:
    [(name, words)] = MANAGE.findall("`manage.py tasuki_runs list --state FAILED --colour`")

    with pytest.raises(CommandError, match="unrecognized arguments: --colour"):
        load_command_class("tasuki.django", name).create_parser("manage.py", name).parse_args(shlex.split(words))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> DjangoSite:
    """The example's project with the files that the pages add to it."""
    folder = tmp_path_factory.mktemp("pages")
    copy = folder / "project"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("*.sqlite3*", "__pycache__"))
    for text in PAGES.values():
        for name, content in FILE.findall(text):
            (copy / name).write_text(content, "utf-8")
    site = DjangoSite(folder)
    site.env["PYTHONPATH"] = site.env["PYTHONPATH"].replace(os.fspath(EXAMPLE), os.fspath(copy))
    return site


@pytest.mark.e2e
def test_the_tests_in_the_pages_pass(site: DjangoSite) -> None:
    tests = {Path(name).stem: text for page in PAGES.values() for name, text in FILE.findall(page) if "(TestCase)" in text}
    assert tests
    said = site.run(f"""
from django.core.management import call_command
sys.stderr = sys.stdout
call_command("test", *{[f"shop.{name}" for name in tests]})
""")

    assert f"Ran {sum(text.count('def test_') for text in tests.values())} tests" in said


@pytest.mark.e2e
def test_the_fixtures_of_the_testing_page_work_with_pytest_django(site: DjangoSite) -> None:
    folder = site.folder / "project"
    options = shlex.split(f"-q -c {os.devnull} --rootdir . --ds site_settings shop/test_with_pytest.py")
    command = [site.python, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=folder, env=site.env, capture_output=True, text=True, timeout=60, check=False)

    assert "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.e2e
def test_the_programs_in_the_pages_run(site: DjangoSite) -> None:
    programs = {page: "".join(PYTHON.findall(FILE.sub("", PAGES[page]))) for page in RUN}
    ran = site.ask(f"""
from datetime import timedelta
from django.core.management import call_command
from django.utils import timezone
from tasuki.django.models import JobDefinition, JobRun
call_command("migrate", verbosity=0)
ran = {{}}
for page, program in json.loads({json.dumps(json.dumps(programs))}).items():
    before = JobRun.objects.count()
    names = {{"transaction": transaction, "Order": Order, "send_invoice": send_invoice, "greet": greet}}
    names |= {{"JobDefinition": JobDefinition, "order": Order.objects.create(customer="Sato", total=1)}}
    names |= {{"tonight": timezone.now() + timedelta(hours=9)}}
    exec(compile(program, page, "exec"), names)
    ran[page] = JobRun.objects.count() - before
print(json.dumps(ran))
""")

    # Jobs that wait afterwards: a rolled back one is not among them, definitions and events get their runs from a leader.
    assert ran == {"commands.md": 2, "migrating.md": 1, "schedules.md": 0, "tasks.md": 5, "transactions.md": 1}
