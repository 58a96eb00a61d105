"""Tasks that fail, last, die, and tell what they saw."""

import os
import time
from pathlib import Path

from django.db import connection
from django.dispatch import receiver

try:
    from django.tasks import signals, task
except ImportError:  # Django 5.2
    from django_tasks import signals, task


@task
def add(a, b=0):
    return a + b


@task
def repeat(text, times):
    return text * times


@task
def fail(text):
    raise LookupError(text)


def fail_twice():
    raise LookupError("once more")


try:
    fail_twice = task(max_retries=1, backoff_s=0.01)(fail_twice)
except TypeError:  # Django 6.0 takes no options of a backend here
    fail_twice = task(fail_twice).using(max_retries=1, backoff_s=0.01)


@task(backend="retrying", takes_context=True)
def fail_until(context, attempt):
    if context.attempt < attempt:
        raise LookupError(f"attempt {context.attempt}")
    return context.attempt


@task
def hold(folder):
    """Tell that it runs, and wait for a file."""
    Path(folder, "running").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return "done"


@task(backend="retrying")
def die_once(folder):
    marker = Path(folder, "died")
    if not marker.exists():
        marker.touch()
        os._exit(3)
    return "alive"


@task
def surroundings():
    return {"pid": os.getpid(), "connected": connection.connection is not None}


@task
def stamp():
    return time.time()


@task
def unjsonable():
    return object()


@receiver(signals.task_started)
@receiver(signals.task_finished)
def _note(task_result, **_):
    if folder := os.environ.get("SITE_SIGNALS"):
        with Path(folder, task_result.id).open("a") as notes:
            notes.write(f"{task_result.status} {task_result.task.name}\n")
