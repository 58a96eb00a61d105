"""examples/zpe as a program: the zero-point energy of H2 by the real pw.x under a worker, and what is left when it fails.

The H2 run takes 5 s of one core. Failures are played by small scripts in the place of pw.x.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tasuki.core.job import Progress
from tasuki.worker.attempt import RunResult
from tests.conftest import Require
from tests.shape.source import ROOT
from tests.support.processes import alive
from tests.support.waiting import until
from tests.worker.runs import archive_of, attempt_of, close_runners, exec_of, runner_in

ZPE = ROOT / "examples" / "zpe"
PROGRAM = [sys.executable, os.fspath(ZPE / "zpe.py")]
DEBIAN_PSEUDOPOTENTIALS = Path("/usr/share/espresso/pseudo")
RUN_TIMEOUT_S = 100.0

pytestmark = pytest.mark.e2e


@pytest.fixture
def pw(require: Require) -> None:
    found = shutil.which("pw.x") is not None and DEBIAN_PSEUDOPOTENTIALS.is_dir()
    require("Quantum ESPRESSO", found, "apt-get install quantum-espresso quantum-espresso-data")


# ---------------------------------------------------------------------------------------------------- the real thing


@pytest.mark.usefixtures("pw")
def test_the_zero_point_energy_of_h2(tmp_path: Path) -> None:
    heard: list[Progress] = []

    result = run_as_job(tmp_path, (ZPE / "h2.json").read_bytes(), heard)

    assert result.outcome.error_code is None, archive_of(result).read("stderr.log").decode()
    archive = archive_of(result)
    outputs = {name: archive.read(f"out/{name}").decode() for name in ("result.json", "summary.txt", "freqs.csv", "meta.json")}
    found, meta = json.loads(outputs["result.json"]), json.loads(outputs["meta.json"])
    assert 0.26 < found["zpe_ev"] < 0.28
    assert found["frequencies_cm1"] == [pytest.approx(4304, abs=15)]
    assert found["imaginary_frequencies_cm1"] == []
    [mode] = csv.DictReader(io.StringIO(outputs["freqs.csv"]))
    assert mode == {"mode": "1", "frequency_cm1": f"{found['frequencies_cm1'][0]:.2f}", "zpe_ev": f"{found['zpe_ev']:.6f}"}
    assert outputs["summary.txt"].startswith(f"H2: zero-point energy {found['zpe_ev']:.4f} eV")
    assert archive.read("stdout.log").decode() == outputs["summary.txt"]
    assert meta.keys() == {"worker_hostname", "computation_time_seconds", "qe_version", "timestamp"}
    assert datetime.fromisoformat(meta["timestamp"]).tzinfo is not None
    assert heard[-1].fraction >= 0.5  # the worker looks now and then, not at the very end
    assert [progress.fraction for progress in heard] == sorted(progress.fraction for progress in heard)
    assert any(progress.text.startswith("relaxing the geometry") for progress in heard)


def run_as_job(data: Path, payload: bytes, heard: list[Progress]) -> RunResult:
    """Run the program as a worker does: payload on stdin, a folder of its own, next to nothing in the environment."""

    async def run() -> RunResult:
        execs = exec_of(*PROGRAM, name="zpe")
        runner = runner_in(data, execs, any_program_for=None, on_progress=lambda lease_id, progress: heard.append(progress))
        try:
            stop = asyncio.get_running_loop().create_future()
            return await asyncio.wait_for(runner.run(attempt_of(exec="zpe", payload=payload), stop), RUN_TIMEOUT_S)
        finally:
            close_runners()

    return asyncio.run(run())


# ---------------------------------------------------------------------------------------------------- failures


class Shell:
    """A shell in which examples/zpe is called, with a script in the place of pw.x."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.scratch = folder, folder / "out", folder / "tmp"
        self.scratch.mkdir()
        self.pseudo = folder / "pseudo"
        self.pseudo.mkdir()
        (self.pseudo / "H.pbe-kjpaw.UPF").touch()
        self.pw = folder / "pw.x"

    def command(self, *arguments: str) -> list[str]:
        return [
            *PROGRAM,
            "--pw",
            os.fspath(self.pw),
            "--pseudo",
            os.fspath(self.pseudo),
            "--out",
            os.fspath(self.out),
            *arguments,
        ]

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TASUKI_")}
        return {**kept, "TMPDIR": os.fspath(self.scratch)}

    def run(self, payload: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        payload = (ZPE / "h2.json").read_bytes() if payload is None else payload
        return subprocess.run(self.command(), input=payload, env=self.environment, capture_output=True, timeout=60, check=False)

    def error(self) -> dict[str, Any]:
        assert os.listdir(self.out) == ["error.json"]  # noqa: PTH208
        return json.loads((self.out / "error.json").read_text())


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_payload_that_is_no_molecule(shell: Shell) -> None:
    done = shell.run(b'{"molecule": "H2"}')

    assert done.returncode == 2
    assert shell.error() == {
        "error_code": "INVALID_PAYLOAD",
        "error_message": "the payload: missing required field: atoms",
        "traceback": None,
        "permanent": True,
    }
    assert done.stderr.decode() == "INVALID_PAYLOAD: the payload: missing required field: atoms\n"


def test_pw_is_not_installed(shell: Shell) -> None:
    done = shell.run()

    assert done.returncode == 69
    assert shell.error()["error_code"] == "QE_NOT_FOUND"
    assert shell.error()["error_message"].startswith(f"{shell.pw} was not found or may not be executed")
    assert not shell.error()["permanent"]


def test_a_pseudopotential_is_not_installed(shell: Shell) -> None:
    script(shell.pw, "exit 0")
    (shell.pseudo / "H.pbe-kjpaw.UPF").unlink()

    done = shell.run()

    assert (done.returncode, shell.error()["error_code"]) == (69, "QE_PSEUDO_NOT_FOUND")


def test_a_pw_that_fails_is_shown_with_the_end_of_what_it_wrote(shell: Shell) -> None:
    script(shell.pw, "echo halfway; touch CRASH; echo last words >&2; exit 1")
    for name in ("result.json", "freqs.csv"):  # of a run before
        shell.out.mkdir(exist_ok=True)
        (shell.out / name).touch()

    done = shell.run()

    assert done.returncode == 70
    assert shell.error()["error_message"] == "pw.x exited with code 1"
    assert shell.error()["traceback"] == "halfway\nlast words"
    assert done.stderr.decode().endswith("QE_RUNTIME_ERROR: pw.x exited with code 1\nhalfway\nlast words\n")
    assert not list(shell.scratch.iterdir())


def test_electrons_that_do_not_converge(shell: Shell) -> None:
    script(shell.pw, 'echo "     convergence NOT achieved after 100 iterations: stopping"; exit 2')

    done = shell.run()

    assert (done.returncode, shell.error()["error_code"], shell.error()["permanent"]) == (3, "QE_SCF_NOT_CONVERGED", True)


def test_pw_runs_alone_on_one_core_and_reads_its_input_from_its_own_folder(shell: Shell) -> None:
    script(shell.pw, 'echo "$OMP_NUM_THREADS $OMPI_MCA_btl $*" $(ls); test "$PWD" = "$TMPDIR" && exit 1')

    shell.run()

    assert shell.error()["traceback"] == "1 self -in pw.in H.pbe-kjpaw.UPF pw.in"


def test_when_it_is_told_to_stop_pw_ends_and_nothing_is_left(shell: Shell) -> None:
    script(shell.pw, f'echo $$ > "{shell.folder}/pid.new" && mv "{shell.folder}/pid.new" "{shell.folder}/pid"; exec sleep 600')
    pid_file = shell.folder / "pid"

    with subprocess.Popen(shell.command(os.fspath(ZPE / "h2.json")), env=shell.environment, stderr=subprocess.DEVNULL) as process:
        try:
            until(pid_file.exists, what="pw.x runs")
            process.send_signal(signal.SIGTERM)
            code = process.wait(30)
        finally:
            process.kill()

    assert code == 128 + signal.SIGTERM
    assert not alive(int(pid_file.read_text()))
    assert not list(shell.scratch.iterdir())
    assert not list(shell.out.iterdir())
