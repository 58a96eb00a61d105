"""The pages in docs/django are true to the code: their Python runs in the example's project, their command lines are taken."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasuki.django import standalone

standalone.configure()

from django.core.management import CommandError, load_command_class  # noqa: E402

from tests.shape.source import ROOT  # noqa: E402
from tests.support import nursery  # noqa: E402
from tests.support.django_site import EXAMPLE, DjangoSite  # noqa: E402
from tests.support.processes import SOURCE, ChildProcess  # noqa: E402
from tests.support.waiting import until  # noqa: E402

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


def blocks_of(page: str) -> list[str]:
    """Return the blocks of a README, in their order."""
    return [text for _, text in re.findall(r"^```(\w*)\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)]


def test_the_japanese_quick_start_is_the_english_one() -> None:
    install, settings, commands, *programs = blocks_of("README.ja.md")
    own = [install, commands, *(ast.dump(ast.parse(text)) for text in (settings, *programs))]
    install, settings, commands, *programs = blocks_of("README.md")[:5]

    assert own == [install, commands, *(ast.dump(ast.parse(text)) for text in (settings, *programs))]


COMMAND = """
from django.core.management.base import BaseCommand

class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("--days")
        parser.add_argument("--event")

    def handle(self, *, days, event, **options):
        print(days, event)
"""


@pytest.mark.e2e
def test_the_readme_word_for_word_in_a_new_project(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.env |= {"DJANGO_SETTINGS_MODULE": "mysite.settings", "PYTHONPATH": os.pathsep.join(map(os.fspath, (SOURCE, tmp_path)))}
    del site.env["SITE_SQLITE"]

    def run(*command: str) -> str:
        done = nursery.run([sys.executable, *command], env=site.env, cwd=tmp_path, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def typed(line: str) -> str:
        """Run a line of a block, without its comment."""
        words = shlex.split(line, comments=True)
        assert words[0] == "python"
        return run(*words[1:])

    _, settings, commands, tasks, use, _, definitions, schedule, _, _, looking = blocks_of("README.md")
    django_admin = "import sys; from django.core.management import execute_from_command_line; execute_from_command_line(sys.argv)"
    del site.env["DJANGO_SETTINGS_MODULE"]
    run("-c", django_admin, "startproject", "mysite", ".")
    run("manage.py", "startapp", "shop")
    site.env["DJANGO_SETTINGS_MODULE"] = "mysite.settings"
    with (tmp_path / "mysite" / "settings.py").open("a") as file:
        file.write(settings.replace("[...,", '[*INSTALLED_APPS, "shop",'))
    with (tmp_path / "shop" / "models.py").open("a") as file:
        file.write("class Order(models.Model):\n    customer = models.CharField(max_length=50)\n")
    if not find_spec("django.tasks"):  # as the comment there says
        tasks = tasks.replace("\nfrom django.tasks import", "\nfrom django_tasks import")
    (tmp_path / "shop" / "tasks.py").write_text(tasks, "utf-8")
    (tmp_path / "shop" / "management" / "commands").mkdir(parents=True)
    for name in ("rebuild_index", "print_label"):
        (tmp_path / "shop" / "management" / "commands" / f"{name}.py").write_text(COMMAND)
    (tmp_path / "definitions.toml").write_text(definitions, "utf-8")
    run("manage.py", "makemigrations", "-v0", "shop")
    migrate, worker = commands.splitlines()

    typed(migrate)
    assert "no issues" in run("manage.py", "check", "--database", "default")
    began, (*_, last) = use.split("result.refresh()")[0], use.splitlines()
    with ChildProcess([sys.executable, *worker.split()[1:]], tmp_path / "worker.log", site.env, cwd=tmp_path) as node:
        node.wait_for_output("connected to")
        said = run("-c", f"""
import json, time
import django
django.setup()
from django.db import transaction
from shop.models import Order
from shop.tasks import send_invoice
order = Order(customer="Sato")
{began}
until = time.monotonic() + 20
while not result.is_finished:
    assert time.monotonic() < until
    result.refresh()
status, value = {last}
print(f"{{status}}, {{json.dumps(value)}}")
""")  # fmt: skip
        assert said.strip() == last.partition("# ")[2]
        for line in schedule.splitlines():
            typed(line)
        runs: dict[str, str] = {}
        until(lambda: runs.update(ended_runs(run)) or len(runs) == 2, 20.0, "both runs have succeeded")
        assert {run("manage.py", "tasuki_runs", "logs", one).strip() for one in runs} == {"7 None", 'None {"order":17}'}
        for line in looking.splitlines():
            typed(line.replace(" ID", f" {next(iter(runs))}"))


def ended_runs(run: Callable[..., str]) -> dict[str, str]:
    """Return the runs of definitions and events that succeeded, with their subjects."""
    rows = json.loads(run("manage.py", "tasuki_runs", "list", "--state", "SUCCEEDED", "--json"))
    return {row["job_id"]: row["subject"] for row in rows if row["job_id"].startswith("e")}


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
