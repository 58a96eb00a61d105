"""Operations of a project with two nodes on PostgreSQL, clicked in a browser: what is asked, what comes of it, who did it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.django.test_ops_project_browser import Home, logged_in, on, served
from tests.support.browser import keep_picture, open_browser
from tests.support.django_site import DjangoSite
from tests.support.postgres_service import PostgresService
from tests.support.processes import ChildProcess
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SLOW_S = 60.0
SLOW_MS = SLOW_S * 1000
NODES = ("n1", "n2")


class Stage(NamedTuple):
    """Two nodes, and somebody who may do everything."""

    home: Home
    page: Page
    nodes: dict[str, ChildProcess]
    asked: list[str]
    """Texts of the dialogs so far."""

    def status(self) -> dict[str, dict[str, object]]:
        """Return the workers by the names of their nodes."""
        found = json.loads(self.home.site.manage("tasuki_ops", "status", "--json").stdout)
        return {worker["node_id"]: worker for worker in found["workers"]}

    def epoch(self) -> int:
        return int(json.loads(self.home.site.manage("tasuki_ops", "status", "--json").stdout)["epoch"])

    def leader(self) -> str:
        """Return the node that leads; for some seconds none does: a drained one steps down, and does not stand again at once."""

        def leading() -> list[str]:
            return [node for node, worker in self.status().items() if worker["role"] == "leader"]

        return until(leading, SLOW_S, "a node leads")[0]

    def go(self, name: str) -> None:
        self.page.goto(f"{self.home.url}/ops/{name}")

    def press(self, button: str, where: Locator | None = None) -> str:
        """Press a button that asks first, and return its question."""
        before = len(self.asked)
        (where or self.page).get_by_role("button", name=button, exact=True).click()
        until(lambda: len(self.asked) > before, what=f"{button} asks first")
        return self.asked[-1]

    def row(self, node: str) -> Locator:
        """Return the row of a node's worker on the screen of workers."""
        worker_id = str(self.status()[node]["worker_id"])
        return self.page.locator(f'tr:has(button[name=id][value="{worker_id}"])')

    def run_command(self, what: str) -> str:
        """Run the command `probe` from its form, and return the job's id."""
        self.go("run/")
        self.page.get_by_label("Command").select_option("probe")
        self.page.get_by_label("Arguments").fill(what)
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.wait_for_url("**/ops/jobs/*/**")
        return self.page.url.split("/jobs/")[1].partition("/")[0]

    def has_state(self, state: str) -> None:
        expect(self.page.locator(".summary .state")).to_have_text(state, timeout=SLOW_MS)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresService) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("site")
    url = postgres.empty_database()
    site = DjangoSite(folder, postgres_url=url, SITE_TASUKI=json.dumps({"grpc": {"authentication": "bearer"}}))
    with ExitStack() as stack:
        home = stack.enter_context(served(site))
        arguments = ("--grpc", "127.0.0.1:0", "--slots", "2")
        nodes = {
            name: stack.enter_context(site.worker(*arguments, env={"TASUKI_NODE_ID": name}, log=f"{name}.log")) for name in NODES
        }
        page = logged_in(stack.enter_context(open_browser()), home, "admin").new_page()
        asked: list[str] = []
        page.on("dialog", lambda dialog: asked.append(dialog.message))
        made = Stage(home, page, nodes, asked)
        until(lambda: sorted(str(one["role"]) for one in made.status().values()) == ["leader", "subleader"], SLOW_S, "one leads")
        yield made
    postgres.drop(url)


def in_the_audit(stage: Stage, *actions: str) -> None:
    stage.go("audit/")
    for action in actions:
        expect(stage.page.locator("tr", has_text=action).first).to_contain_text("admin")


def test_drained_nodes_start_nothing_and_a_job_that_waited_starts_when_one_goes_on(stage: Stage) -> None:
    for node in NODES:
        stage.go("workers/")
        question = stage.press("Drain", stage.row(node))
        assert "It takes no new jobs until it is told otherwise, or ends." in question
        on(stage.page, "takes no new jobs.")
    stage.run_command("say")
    stage.has_state("PENDING")
    expect(stage.page.locator(".because")).to_contain_text("worker")
    keep_picture(stage.page, "project-drained")

    job = stage.page.url
    stage.go("workers/")
    assert "It takes new jobs again." in stage.press("End drain", stage.row("n1"))
    on(stage.page, "takes new jobs again.")
    stage.page.goto(job)
    stage.has_state("SUCCEEDED")
    stage.go("workers/")
    stage.press("End drain", stage.row("n2"))
    on(stage.page, "takes new jobs again.")
    in_the_audit(stage, "worker.drain", "worker.undrain")


def test_a_detached_worker_gets_no_run_until_it_is_attached(stage: Stage) -> None:
    leader = stage.leader()
    other = next(node for node in NODES if node != leader)
    known = "is not the sub-leader"  # what a worker says when it hears of it, with its next heartbeat
    before = stage.nodes[other].output().count(known)
    stage.go("workers/")
    question = stage.press("Detach", stage.row(other))
    assert "It finishes the jobs that it has, and gets no more until it is attached again." in question
    on(stage.page, "gets no more jobs.")
    assert stage.status()[other]["detached"] is True
    until(lambda: stage.nodes[other].output().count(known) > before, SLOW_S, "the worker knows that it is detached")
    ids = [stage.run_command("say") for _ in range(3)]
    stage.has_state("SUCCEEDED")
    workers = stage.home.site.ask(
        "from tasuki.django.models import JobRun\n"
        f"rows = JobRun.objects.filter(idempotency_key__in={ids!r})\n"
        "print(json.dumps(list(rows.values_list('assigned_worker_id', flat=True))))"
    )
    assert stage.status()[other]["worker_id"] not in workers

    stage.go("workers/")
    assert "It gets jobs again at once." in stage.press("Attach", stage.row(other))
    on(stage.page, "gets jobs again.")
    assert stage.status()[other]["detached"] is False
    in_the_audit(stage, "worker.detach", "worker.attach")


def test_the_leader_steps_down_and_another_one_leads_under_a_higher_epoch(stage: Stage) -> None:
    before, epoch = stage.leader(), stage.epoch()
    stage.go("workers/")
    question = stage.press("Step down", stage.row(before))
    assert "Another node is elected within seconds; running jobs go on." in question
    on(stage.page, "steps down.")

    after = next(node for node in NODES if node != before)
    until(lambda: stage.status()[after]["role"] == "leader", SLOW_S, "the other node leads")
    assert stage.epoch() > epoch
    stage.go("")
    on(stage.page, f"Leader: {stage.status()[after]['worker_id']} · epoch {stage.epoch()}", SLOW_MS)
    in_the_audit(stage, "leader.degrade")


def test_a_paused_queue_waits_and_goes_on_when_it_is_resumed(stage: Stage) -> None:
    stage.go("subjects/")
    stage.page.get_by_label("Pattern").fill("default.>")
    stage.page.get_by_label("Reason").fill("the licence server is down")
    stage.page.get_by_role("button", name="Pause", exact=True).click()
    on(stage.page, "default.> is paused: its jobs wait.")
    stage.run_command("say")
    stage.has_state("PENDING")
    on(stage.page, "because: the licence server is down")
    job = stage.page.url
    stage.go("subjects/")
    assert "Its jobs that wait start at once, where a worker has room." in stage.press("Resume")
    on(stage.page, "default.> is resumed.")
    stage.page.goto(job)
    stage.has_state("SUCCEEDED")
    in_the_audit(stage, "subject.pause", "subject.resume")


def test_a_definition_that_is_run_now_succeeds_and_changed_settings_come_into_force(stage: Stage) -> None:
    stage.go("definitions/")
    assert "Its schedule goes on as before." in stage.press("Run now", stage.page.locator("tr", has_text="nightly"))
    on(stage.page, "was asked for")
    stage.go("jobs/e1-1/")
    until(lambda: stage.page.reload() and stage.page.locator(".summary").count(), SLOW_S, "the leader has made the run")
    stage.has_state("SUCCEEDED")

    stage.go("settings/")
    stage.page.get_by_label("Max jobs per worker").fill("1")
    stage.page.get_by_role("button", name="Save").click()
    on(stage.page, "In force within two ticks.")
    for node in stage.nodes.values():
        node.wait_for_output("the settings have changed")
    in_the_audit(stage, "definition.run", "settings.change")
