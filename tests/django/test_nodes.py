"""Several nodes of a project on PostgreSQL: leaders that are killed, runs that are replaced, two versions. Real processes."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.django_site import DjangoSite
from tests.support.postgres_service import PostgresService
from tests.support.processes import SOURCE, ChildProcess
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

EMITTERS = 4
DUPLICATES = 0.2  # of all events that are emitted
TAKEOVER_S = 60.0  # a lock's ttl on a machine with other load
DEFINITIONS = """
from tasuki.django.definitions import apply
apply({"paid": {"command_name": "probe", "event_type": "order.paid", "queue": "nobody"},
       "all": {"command_name": "probe", "event_type": ">", "queue": "nobody"}}, source="test")
"""
EMIT = """
from pathlib import Path
from tasuki.django import emit
for place, key in enumerate(KEYS):
    while place == len(KEYS) // 2 and not Path(GO).exists():
        time.sleep(0.01)
    with transaction.atomic():
        emit("order.paid", {"order": key}, dedupe_key=f"order-{key}")
"""


class Project:
    """A project on PostgreSQL, its nodes, and questions to its database."""

    def __init__(self, folder: Path, postgres: PostgresService, url: str, **variables: str) -> None:
        self.folder = folder
        self.site = DjangoSite(folder, postgres_url=url, **variables)
        self._postgres, self._url = postgres, url
        self._nodes: list[ChildProcess] = []
        self._stack = ExitStack()

    def start_node(self, *arguments: str, env: dict[str, str] | None = None) -> ChildProcess:
        node = self._stack.enter_context(self.site.worker(*arguments, env=env, log=f"worker-{len(self._nodes)}.log"))
        self._nodes.append(node)
        return node

    def start_cluster(self, nodes: int, *arguments: str, node_ids: int = 3) -> list[ChildProcess]:
        """Start nodes that take orders, on so many node ids, all at once."""

        def start(number: int) -> ChildProcess:
            env = {"TASUKI_NODE_ID": f"n{number % node_ids + 1}"}
            return self.site.worker("--grpc", "127.0.0.1:0", *arguments, env=env, log=f"worker-{number}.log")

        before = len(self._nodes)
        with ThreadPoolExecutor(nodes) as threads:
            started = list(threads.map(start, range(before, before + nodes)))
        self._nodes += [self._stack.enter_context(node) for node in started]
        return started

    def node_of(self, worker_id: str) -> ChildProcess | None:
        """Return the node whose worker has this number, if it lives."""
        named = f"connected to unix socket as {worker_id}\n"
        return next((node for node in self._nodes if named in node.output() and node.running), None)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        return self._postgres.execute(statement, url=self._url)

    def connect(self) -> AbstractContextManager[Any]:
        return self._postgres.connect(self._url)

    def leader(self) -> ChildProcess | None:
        """Return the node that leads, if it lives."""
        for (holder,) in self.rows("SELECT holder FROM tasuki_scopeepoch WHERE scope = 'leader'"):
            return self.node_of(holder)
        return None

    def led(self) -> dict[str, list[int]]:
        """Return the epochs under which each node has led, in all its lives."""
        found = {node.log.stem: re.findall(r"leads, under epoch (\d+)", node.output(all_starts=True)) for node in self._nodes}
        return {name: list(map(int, epochs)) for name, epochs in found.items()}

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def project(tmp_path: Path, postgres: PostgresService) -> Iterator[Project]:
    url = postgres.empty_database()
    project = Project(tmp_path, postgres, url)
    project.site.manage("migrate", "-v0")
    yield project
    project.close()
    postgres.drop(url)


def emit_while_leaders_are_killed(project: Project, total: int, kills: int) -> None:
    """Emit so many events from four processes, some twice, and kill leaders; check that each pair has exactly one run."""
    different = int(total * (1 - DUPLICATES))
    keys = [number % different for number in range(total)]
    random.Random(7).shuffle(keys)
    project.site.run(DEFINITIONS)
    for _ in range(2):
        project.start_node("--queue", "other")
    processed = "SELECT count(*) FROM tasuki_event WHERE processed_at IS NOT NULL"
    share = total // kills
    for number in range(kills):
        part = keys[number * share : (number + 1) * share] if number < kills - 1 else keys[number * share :]
        before, go = project.rows(processed)[0][0], project.folder / f"go-{number}"
        with ThreadPoolExecutor(EMITTERS) as threads:
            codes = [f"KEYS, GO = {part[emitter::EMITTERS]!r}, {str(go)!r}\n{EMIT}" for emitter in range(EMITTERS)]
            emitting = [threads.submit(project.site.run, code) for code in codes]
            # The second half of the part comes after the kill.
            until(lambda low=before: project.rows(processed)[0][0] > low, TAKEOVER_S, "the leader processes events")  # type: ignore[misc]
            until(project.leader, TAKEOVER_S, "one of the nodes leads").kill()
            go.touch()
            project.start_node("--queue", "other")
            for one in emitting:
                one.result()
    waiting = "SELECT 1 FROM tasuki_event WHERE processed_at IS NULL LIMIT 1"
    until(lambda: not project.rows(waiting), 2 * TAKEOVER_S, "all events are processed")

    events = [number for (number,) in project.rows("SELECT id FROM tasuki_event")]
    definitions = [number for (number,) in project.rows("SELECT id FROM tasuki_jobdefinition")]
    runs = [job_id for (job_id,) in project.rows("SELECT idempotency_key FROM tasuki_jobrun")]
    assert len(events) == different
    assert sorted(runs) == sorted(f"e{event}-{definition}" for event in events for definition in definitions)
    [(epoch,)] = project.rows("SELECT epoch FROM tasuki_scopeepoch WHERE scope = 'leader'")
    assert epoch > kills


def test_each_event_of_four_processes_is_one_run_for_each_definition_although_the_leader_is_killed(project: Project) -> None:
    emit_while_leaders_are_killed(project, total=1_000, kills=1)


def test_a_run_that_replaces_one_which_ignores_sigterm_begins_when_nothing_of_it_is_left(project: Project) -> None:
    for _ in range(2):
        project.start_node("--slots", "2")
    began = project.site.ask(f"""
from pathlib import Path
from django.core.management import call_command
from tasuki.django.definitions import apply, emit
from tasuki.django.models import JobDefinition, JobRun
folder = {str(project.folder)!r}
entry = {{"command_name": "probe", "event_type": "order.*", "default_args_json": ["alone", folder]}}
apply({{"alone": {{**entry, "concurrency_policy": "replace"}}}}, source="test")
number = JobDefinition.objects.get().pk

def begun():
    run = f"e{{emit('order.paid').pk}}-{{number}}"
    until = time.monotonic() + 40
    while not Path(folder, f"began-{{run}}").exists():
        assert time.monotonic() < until, list(JobRun.objects.values_list("idempotency_key", "state", "error_summary"))
        time.sleep(0.01)
    return run

began = [begun(), begun()]
call_command("tasuki_runs", "cancel", began[-1], stdout=sys.stderr)
until = time.monotonic() + 40
while JobRun.objects.exclude(state="CANCELED").exists():
    assert time.monotonic() < until
    time.sleep(0.01)
print(json.dumps(began))
""")

    assert len(set(began)) == 2
    assert not (project.folder / "overlap").exists()


NEWER = """
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("tasuki", "{last}")]
    operations = [
        migrations.AddField("jobrun", "newer", models.TextField(null=True)),
        migrations.AddField("event", "newer", models.TextField(db_default="")),
        migrations.AddField("jobdefinition", "newer", models.FloatField(db_default=1.5)),
        migrations.AddField("definitionstate", "newer", models.TextField(null=True)),
    ]
"""


def newer_version(folder: Path) -> dict[str, str]:
    """Copy tasuki, add a step to its tables as a next version may, and return the environment that has it."""
    shutil.copytree(SOURCE / "tasuki", folder / "tasuki")  # with its bytecode, which is valid there too
    migrations = folder / "tasuki" / "django" / "migrations"
    last = max(path.stem for path in migrations.glob("0*.py"))
    number = int(last[:4]) + 1
    (migrations / f"{number:04}_newer.py").write_text(NEWER.format(last=last))
    module = folder / "tasuki" / "django" / "standalone.py"
    text = module.read_text()
    assert f"SCHEMA_VERSION = {number - 1}\n" in text
    module.write_text(text.replace(f"SCHEMA_VERSION = {number - 1}\n", f"SCHEMA_VERSION = {number}\n"))
    return {"PYTHONPATH": os.fspath(folder), "PYTHONHASHSEED": "0"}  # the second: not forked from what the tests have imported


def test_nodes_and_web_processes_of_two_versions_with_one_step_of_the_tables_between_them_work_together(project: Project) -> None:
    site = project.site
    newer = newer_version(project.folder / "newer")
    newer["PYTHONPATH"] = site.env["PYTHONPATH"].replace(os.fspath(SOURCE), newer["PYTHONPATH"])
    ask = """
import tasuki.django.standalone as tables
from tasuki.django import emit, enqueue_command
from tasuki.django.definitions import apply
from tasuki.django.models import JobDefinition, JobRun
call = {"command_name": "probe", "default_args_json": ["say"]}
apply({f"on-{queue}": {**call, "event_type": "order.*", "queue": queue} for queue in ("old", "new")}, source="test")
event = emit("order.paid", {"order": 1})
jobs = [f"e{event.pk}-{number}" for number in JobDefinition.objects.values_list("pk", flat=True)]
jobs += [enqueue_command("probe", "say", queue=queue) for queue in QUEUES]
until = time.monotonic() + 60
while JobRun.objects.filter(idempotency_key__in=jobs, group__in=QUEUES, state="SUCCEEDED").count() < 2 * len(QUEUES):
    assert time.monotonic() < until, list(JobRun.objects.values_list("idempotency_key", "state", "error_summary"))
    time.sleep(0.01)
print(json.dumps(tables.SCHEMA_VERSION))
"""

    def work(env: dict[str, str], *queues: str) -> int:
        version: int = json.loads(site.run(f"QUEUES = {queues!r}\n{ask}", env=env))
        return version

    old = project.start_node("--queue", "old")
    site.manage("migrate", "-v0", env=newer)  # while the old node leads
    new = project.start_node("--queue", "new", env=newer)
    assert project.leader() is old
    assert work(newer, "old", "new") == work({}, "old", "new") + 1
    assert old.stop(30.0) == 0
    until(lambda: project.leader() is new, TAKEOVER_S, "the new node leads")
    work({}, "new")
