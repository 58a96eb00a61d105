"""The Django app: models and migrations, the one source of the SQL schema, for the standalone server and for a user's project;
and, in a project, its jobs.

The SQL store imports `models` and `standalone`, so these import nothing of tasuki but `core` and `errors`. This file imports
nothing: `django.setup()` has to come first. The public names below are loaded when they are first used.

    models        the tables
    fields        field types, storage parameters of PostgreSQL's tables
    definitions   definitions from settings or a file, events, runs by hand
    standalone    Django without a project; migrations and their version check
    apps          the app's configuration
    conf          the setting TASUKI, the router
    checks        system checks
    alerts        webhooks on failures, late schedules and a missing leader
    log_archive   logs of jobs that ended long ago, as compressed objects
    enqueueing    jobs in the caller's transaction
    commands      management commands as jobs
    warm          the start of an interpreter that forks for them
    task_backend  Django's Tasks
    logs          logs as rows
    operations    looking at jobs and nodes, canceling, running again, pruning, detaching, settings
    migrations/   the history of the tables
    management/   the commands of manage.py
    ops/          the operations screens
    testing       helpers for the tests of a project
    node          the worker of a project, `manage.py tasuki_worker`
    node_door     its gRPC door
    continuation  its questions whether runs may continue, when it was cut off or detached
"""

from importlib import import_module

_HOME = {
    "TasukiBackend": "tasuki.django.task_backend",
    "aenqueue_command": "tasuki.django.commands",
    "emit": "tasuki.django.definitions",
    "enqueue_command": "tasuki.django.commands",
    "enqueue_many": "tasuki.django.enqueueing",
    "TasukiRouter": "tasuki.django.conf",
}


def __getattr__(name: str) -> object:
    """Load a public name from its home, and keep it here so that the next use is a plain attribute."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'tasuki.django' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value
