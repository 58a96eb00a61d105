"""What a worker is told at its start: checked, with words that name the value and what is allowed."""

from __future__ import annotations

import pytest

from tasuki import Worker
from tasuki.errors import ConfigError
from tasuki.worker.worker import disconnect_policy


@pytest.mark.parametrize("value", ["", "maybe", "STOP"])
def test_on_disconnect_is_stop_or_keep(value: str) -> None:
    with pytest.raises(ConfigError, match=f"on_disconnect must be stop or keep, got '{value}'"):
        Worker("tcp://127.0.0.1:1", on_disconnect=value)


@pytest.mark.parametrize("seconds", [-1.0, 3601.0, float("nan"), float("inf")])
def test_the_grace_has_bounds(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"reconnect_grace_s must be 0 to 3600 seconds, got"):
        Worker("tcp://127.0.0.1:1", on_disconnect="keep", reconnect_grace_s=seconds)


def test_the_grace_means_nothing_without_keep() -> None:
    assert disconnect_policy(None, 60.0, None, over_http=False) == ("stop", 0.0, None)
    assert disconnect_policy("keep", 60.0, None, over_http=False) == ("keep", 60.0, None)


def test_endings_are_saved_only_where_the_next_process_can_be_the_same_worker(tmp_path) -> None:
    assert Worker("tcp://127.0.0.1:1", worker_id="w1", data=tmp_path)._outbox_files is not None
    assert Worker("tcp://127.0.0.1:1", worker_id="w1")._outbox_files is None
    assert Worker("tcp://127.0.0.1:1", data=tmp_path)._outbox_files is None


def test_over_http_jobs_are_kept_and_leases_longer_unless_it_is_said_otherwise() -> None:
    assert disconnect_policy(None, 60.0, None, over_http=True) == ("keep", 60.0, 60.0)
    assert disconnect_policy("stop", 60.0, 5.0, over_http=True) == ("stop", 0.0, 5.0)
