"""Worker processes beside the one that started them."""

from __future__ import annotations

import subprocess
import sys

from tests.support.processes import SOURCE

SLOW_TO_HEAR = """
import signal, threading
from tasuki.worker.local_workers import end_with_stdin

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # a process that is not run for a while takes two signals as one
end_with_stdin(lambda: False, grace_s=0.0)
[watching] = [thread for thread in threading.enumerate() if thread.name == "tasuki-stdin"]
watching.join(0.5)
print([signal.sigtimedwait([signal.SIGTERM], 20.0) is not None for _ in ("drain", "stop")])
"""


def test_a_worker_that_hears_signals_late_is_stopped_all_the_same_when_its_parent_is_gone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SLOW_TO_HEAR],
        input="",
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE)},
        timeout=60,
    )

    assert done.stdout == "[True, True]\n", done.stderr
