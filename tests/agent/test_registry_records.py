"""Records of a registry, without one: how a job stands, who is who, when a lease is over, and which options make sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tasuki.agent.store_registry import ClaimJournal
from tasuki.cli.agent import REGISTRY_APP as APP
from tasuki.cli.agent import RegistryOptions
from tasuki.core.failover.agent_protocol import AgentState
from tasuki.core.failover.registry_records import (
    RegistryState,
    attempt_of,
    dispatcher_id_of,
    held_of,
    input_of,
    is_queued,
    node_of,
    registry_state_of,
    state_of,
    submission_of,
    worker_id_of,
)
from tasuki.core.job import Job, Lease, State
from tasuki.core.worker.machine import lease_deadline
from tasuki.errors import ConfigError


def test_a_job_stands_where_its_lease_and_its_input_say() -> None:
    submission = submission_of("job", "sh", "ab" * 32)
    job = Job(spec=submission.spec, state=State.FAILED, submitter=submission.submitter, created_at=0.0)

    assert input_of(job) == "ab" * 32
    assert (
        registry_state_of(None, None) is registry_state_of(job, None) is registry_state_of(job, "ab" * 32) is RegistryState.FREE
    )
    assert registry_state_of(job, "cd" * 32) is RegistryState.OTHER_INPUT


def test_a_lease_of_a_dispatcher_that_was_not_started_is_queued() -> None:
    submission = submission_of("job", "sh", "ab" * 32)
    lease = Lease("lease", dispatcher_id_of("rack.d1", "01234567"), "i", 3, 0.0)
    job = Job(spec=submission.spec, state=State.ASSIGNED, submitter=submission.submitter, created_at=0.0, lease=lease, attempt=3)

    assert (registry_state_of(job, None), state_of(job), attempt_of(job)) == (RegistryState.QUEUED, AgentState.QUEUED, 1)
    assert registry_state_of(job, "cd" * 32) is RegistryState.OTHER_INPUT
    assert node_of(lease.worker_id) == "dispatcher.rack-d1"
    assert (held_of(job).lease_id, held_of(job).attempt) == ("lease", 3)
    assert not is_queued(replace(job, lease=replace(lease, worker_id=worker_id_of("dispatcher.n1", "01234567"))))


def test_a_node_is_named_by_its_name_and_told_apart_by_its_folder(tmp_path: Path) -> None:
    node_id = ClaimJournal(tmp_path).prepare()

    assert ClaimJournal(tmp_path).prepare() == node_id
    assert node_of(worker_id_of("rack.n1", node_id)) == "rack-n1"
    assert worker_id_of("n1", node_id) != worker_id_of("n1", ClaimJournal(_made(tmp_path / "other")).prepare())


def test_a_holder_gives_up_before_the_store_does() -> None:
    assert lease_deadline(100.0, 15.0) == 113.0
    assert lease_deadline(100.0, 2.0) == 101.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"registry": None, "results": "s3://bucket/results"}, "give --registry"),
        ({"registry": "http://n1:7090"}, "redis://host:6379/0 or postgresql://"),
        ({"advertise": "tcp://n1:7000"}, "https://n1:7090"),
        ({"advertise": "http://n1:7090,http://n2:7090"}, "one address"),
        ({"advertise": "https://balancer/n1"}, "one address"),
        ({"registry": None, "peers": "http://n1:7090"}, "give --registry"),
        ({"app": "no app"}, "--registry-app 'no app'"),
    ],
)
def test_what_cannot_be_a_registry_is_refused_with_the_way_out(options: dict[str, Any], words: str) -> None:
    given = {"registry": "redis://db/1", "results": None, "app": APP, "advertise": None, "lease_ttl": 15.0, **options}

    with pytest.raises(ConfigError, match=words):
        RegistryOptions.of(**given)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
