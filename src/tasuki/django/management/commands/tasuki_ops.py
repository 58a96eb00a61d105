"""`manage.py tasuki_ops`: the nodes of the project, and the settings of its scheduler."""

from __future__ import annotations

import msgspec

from tasuki.core.units import shown_time
from tasuki.django import operations
from tasuki.django.definitions import scheduler_settings
from tasuki.django.management.command_base import ActionCommand, actor
from tasuki.errors import InvalidInput, quoted

_WORKER = {"worker_id": {"metavar": "WORKER"}}
_REASON = {"--reason": {"default": "", "help": "Kept in the log of operations."}}


class Command(ActionCommand):
    help = "Look at the nodes of this project, detach workers, have the leader step down, change settings."
    actions = {
        "status": ("Show the leader and all workers.", {}),
        "detach": ("Give a worker no more jobs; running ones continue.", {**_WORKER, **_REASON}),
        "attach": ("Give a worker jobs again.", {**_WORKER, **_REASON}),
        "drain": (
            "Have a worker take no new jobs until it ends, or with --off take some again. It must listen (--grpc).",
            {**_WORKER, "--off": {"action": "store_true", "help": "Take jobs again."}, **_REASON},
        ),
        "pause": (
            "Start no more jobs of some subjects until they are resumed; without PATTERN: list what is paused.",
            {"pattern": {"nargs": "?", "metavar": "PATTERN"}, **_REASON},
        ),
        "resume": ("Start jobs of paused subjects again.", {"pattern": {"metavar": "PATTERN"}, **_REASON}),
        "degrade-leader": ("Have the leader step down, so that another one leads.", _REASON),
        "settings": (
            "Show the settings, or change them: settings set heartbeat_ttl_seconds=8 …",
            {"change": {"nargs": "*", "metavar": "set NAME=VALUE", "default": []}, **_REASON},
        ),
    }

    def do_status(self) -> None:
        found = operations.cluster_status()
        if self.json:
            self.show_json(found)
            return
        epoch = "" if found["epoch"] is None else f", epoch {found['epoch']}"
        self.stdout.write(f"leader: {found['leader'] or 'none'}{epoch}")
        columns = ("worker_id", "node_id", "role", "load", "slots", "detached", "heartbeat_age_s", "grpc")
        shown = [{**worker, "heartbeat_age_s": f"{worker.get('heartbeat_age_s', 0):g} s"} for worker in found["workers"]]
        self.show_table(columns, shown)

    def do_detach(self, worker_id: str, reason: str) -> None:
        self._set_detached(worker_id, True, reason)

    def do_attach(self, worker_id: str, reason: str) -> None:
        self._set_detached(worker_id, False, reason)

    def _set_detached(self, worker_id: str, detached: bool, reason: str) -> None:
        changed = operations.set_detached(worker_id, detached, actor=actor(), reason=reason)
        word = "detached" if detached else "attached"
        self.say({"worker_id": worker_id, "changed": changed}, f"{worker_id}: {word if changed else f'was {word} before'}")

    def do_drain(self, worker_id: str, off: bool, reason: str) -> None:
        operations.drain(worker_id, not off, actor=actor(), reason=reason)
        self.say({"worker_id": worker_id, "draining": not off}, f"{worker_id}: {'takes jobs again' if off else 'drains'}")

    def do_pause(self, pattern: str | None, reason: str) -> None:
        if pattern is not None:
            self._set_paused(pattern, True, reason)
            return
        for one in operations.pauses():
            self.say(msgspec.structs.asdict(one), f"{one.pattern} since {shown_time(one.since)} by {one.actor}: {one.reason}")

    def do_resume(self, pattern: str, reason: str) -> None:
        self._set_paused(pattern, False, reason)

    def _set_paused(self, pattern: str, paused: bool, reason: str) -> None:
        changed = operations.set_paused(pattern, paused, actor=actor(), reason=reason)
        word = "paused" if paused else "resumed"
        self.say({"pattern": pattern, "changed": changed}, f"{pattern}: {word if changed else f'was {word} before'}")

    def do_degrade_leader(self, reason: str) -> None:
        operations.degrade_leader(actor=actor(), reason=reason)
        self.say({"degraded": True}, "the leader steps down with its next heartbeat")

    def do_settings(self, change: list[str], reason: str) -> None:
        if change and (change[0] != "set" or len(change) == 1):
            raise InvalidInput(f"settings {quoted(' '.join(change))}: use settings, or settings set NAME=VALUE …")
        given = dict(part.partition("=")[::2] for part in change[1:])
        row = operations.change_settings(given, actor=actor(), reason=reason) if given else scheduler_settings()
        for name, value in msgspec.structs.asdict(row.thresholds()).items():
            self.say({"name": name, "value": value}, f"{name} = {value:g}")
