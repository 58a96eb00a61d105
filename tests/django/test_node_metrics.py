"""A node writes its metrics for Prometheus: the families of a server's HTTP door, with roles, and none when it is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.doors.http.test_metrics import value
from tests.support.django_site import DjangoSite
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


def test_a_node_writes_its_metrics_to_a_file_until_it_ends(site: DjangoSite, tmp_path: Path) -> None:
    site.migrate()
    file = tmp_path / "tasuki.prom"
    with site.worker("--metrics-file", str(file)) as worker:
        until(lambda: file.exists() and value(file.read_text(), "tasuki_up ") == 1, 60.0, "it is written")
        text = file.read_text()
        readable = file.stat().st_mode & 0o777
        worker.stop()

    assert value(text, 'tasuki_servers{role="leader"}') + value(text, 'tasuki_servers{role="worker"}') == 1
    assert {"tasuki_firing_lag_seconds", "tasuki_workers_detached"} <= {one.name for one in text_string_to_metric_families(text)}
    assert readable == 0o644
    assert not file.exists(), "what nobody writes any more would be taken for the present"


@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_a_place_that_cannot_be_written_to_is_told_and_the_node_works_on(site: DjangoSite, tmp_path: Path) -> None:
    site.migrate()
    with site.worker("--metrics-file", str(tmp_path / "missing" / "tasuki.prom")) as worker:
        worker.wait_for_output("the metrics cannot be written to")
        assert site.run("print(finished(add.enqueue(1)).return_value)").strip() == "1"
