"""A secret of an exec reaches its job and nobody else: not the wire, not the store, not whoever asks."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from tasuki import Client
from tests.e2e.stage import SOON_S, sqlite_only
from tests.support.processes import ServerProcess, start_worker
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, sqlite_only]

VALUE = "s3cr3t-of-the-worker"
MASKED = "*" * len(VALUE)


def test_a_value_that_the_job_tells_everybody_is_told_to_nobody(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    # given: a job that writes its secret to both logs and into its progress
    (tmp_path / "secret").write_text(f"{VALUE}\n")
    (tmp_path / "secret").chmod(0o600)
    go_on = tmp_path / "go-on"
    script = f"""echo out $KEY; echo err $KEY >&2; echo "progress 0.5 has $KEY" >&3; until [ -e {go_on} ]; do sleep 0.02; done
        [ $KEY = {VALUE} ] && exit 7"""
    (tmp_path / "tell.sh").write_text(script)
    execs = tmp_path / "execs.toml"
    execs.write_text(f"""
    [exec.tell]
    command = "/bin/sh {tmp_path}/tell.sh"
    env_from_file = {{ KEY = "{tmp_path}/secret" }}
    """)
    with start_worker(server, "--config", str(execs), "--lease-ttl", "1", command=True) as worker:
        job = client.submit(exec="tell", job_id="tells", retries=0)

        # when: it is looked at while it runs, and has ended
        until(lambda: client.status("tells").progress_text, SOON_S, "its progress is stored")
        seen = [b"".join(client.logs("tells", stream, follow=False)).decode() for stream in ("stdout", "stderr")]
        seen += [repr(client.status("tells")), repr(client.explain("tells"))]
        go_on.touch()
        ended = job.outcome(SOON_S)
        seen += [repr(client.status("tells")), repr(client.explain("tells")), worker.output()]
        assert ended.outcome.result is not None
        with zipfile.ZipFile(io.BytesIO(ended.outcome.result)) as archive:
            seen += [archive.read(name).decode() for name in ("stdout.log", "stderr.log", "result.json")]

    # then: the job had it, and everybody else stars
    assert ended.outcome.exit_code == 7
    assert [text for text in seen if VALUE in text] == []
    assert seen[:2] == [f"out {MASKED}\n", f"err {MASKED}\n"]
    assert f"has {MASKED}" in seen[2]
    assert [path.name for path in server.data.rglob("*") if path.is_file() and VALUE.encode() in path.read_bytes()] == []
