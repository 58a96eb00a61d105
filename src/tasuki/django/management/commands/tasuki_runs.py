"""`manage.py tasuki_runs`: the jobs of the project."""

from __future__ import annotations

import json
import time

from tasuki.django import operations
from tasuki.django.logs import ARCHIVED, ERRORS, read_log
from tasuki.django.management.command_base import ActionCommand, actor, shown_time
from tasuki.server.queries import describe

FOLLOW_S = 0.5
_IDS = {"job_id": {"nargs": "+", "metavar": "ID"}}
_ID = {"job_id": {"metavar": "ID"}}
_REASON = {"--reason": {"default": "", "help": "Kept with the job."}}


class Command(ActionCommand):
    help = "Look at the jobs of this project, cancel them, run them again."
    actions = {
        "list": (
            "List jobs, the newest first.",
            {
                "--state": {"action": "append", "default": [], "help": "Only in this state; several times."},
                "--queue": {"default": "", "help": "Only of this queue."},
                "--text": {"default": None, "help": "Only with this in their id or error."},
                "--limit": {"type": int, "default": 50, "help": "At most so many. Default: 50."},
            },
        ),
        "show": ("Show one job.", _ID),
        "explain": ("Explain why a job waits, runs or ended as it did.", _ID),
        "logs": (
            "Print the output of a job, or the traceback of a task.",
            {
                **_ID,
                "--stream": {
                    "choices": ["stdout", "stderr", ERRORS],
                    "default": None,
                    "help": "Default: all.",
                },
                "-f, --follow": {"action": "store_true", "help": "Follow until the job has ended."},
            },
        ),
        "cancel": ("Cancel jobs; running ones are stopped.", {**_IDS, **_REASON}),
        "rerun": ("Run ended jobs again.", {**_IDS, **_REASON}),
    }

    def do_list(self, state: list[str], queue: str, text: str | None, limit: int) -> None:
        rows = operations.find_runs(states=state, subject=f"{queue}.>" if queue else None, text=text, limit=limit)
        self.show_table(("job_id", "state", "subject", "args", "created_at", "finished_at"), rows)

    def do_show(self, job_id: str) -> None:
        found = describe(operations.get_run(job_id))
        if self.json:
            self.show_json(found)
            return
        for name, value in found.items():
            if value not in (None, "", [], {}):
                self.stdout.write(f"{name}: {shown_time(value) if name.endswith('_at') else value}")

    def do_explain(self, job_id: str) -> None:
        found = operations.explain_run(job_id)
        self.say(found, "\n".join(found["because"]))

    def do_logs(self, job_id: str, stream: str | None, follow: bool) -> None:
        operations.get_run(job_id)
        streams = [stream] if stream else ["stdout", "stderr", ERRORS]
        after = dict.fromkeys(streams, ARCHIVED - 1)
        while True:
            ended = operations.get_run(job_id).state.terminal  # asked before the last look: nothing comes after it
            for name in streams:
                for part in read_log(job_id, name, after=after[name]):
                    after[name] = max(after[name], part.row_id)
                    self._print(name, part.attempt, part.offset, part.data)
            if ended or not follow:
                return
            time.sleep(FOLLOW_S)

    def _print(self, stream: str, attempt: int, offset: int, data: bytes) -> None:
        text = json.loads(data)[1] if stream == ERRORS else data.decode("utf-8", "replace")
        if self.json:
            self.show_json({"stream": stream, "attempt": attempt, "offset": offset, "text": text})
        else:
            self.stdout.write(text, ending="")

    def do_cancel(self, job_id: list[str], reason: str) -> None:
        states = operations.cancel_runs(job_id, actor=actor(), reason=reason)
        for one, state in zip(job_id, states, strict=True):
            self.say({"job_id": one, "state": str(state)}, f"{one}: {state}" + ("" if state.terminal else ", being stopped"))

    def do_rerun(self, job_id: list[str], reason: str) -> None:
        operations.rerun(job_id, actor=actor(), reason=reason)
        for one in job_id:
            self.say({"job_id": one, "state": "PENDING"}, f"{one}: PENDING")
