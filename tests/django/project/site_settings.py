"""The example's settings, and the app whose tasks and commands the tests look at."""

import os

from settings import *  # noqa: F403
from settings import DATABASES, INSTALLED_APPS, TASKS

INSTALLED_APPS = [*INSTALLED_APPS, "probes"]
TASKS = {**TASKS, "retrying": {"BACKEND": "tasuki.django.TasukiBackend", "OPTIONS": {"max_retries": 2, "backoff_s": 0.01}}}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # of users that live for one test
SCHEDULER_SKIP_LATE_RUNS_AFTER_SECONDS = 240
if "SITE_TASUKI" in os.environ:
    import json

    TASUKI = json.loads(os.environ["SITE_TASUKI"])
if "SITE_DEFERRED" in os.environ:  # Django's default on SQLite
    DATABASES = {"default": {**DATABASES["default"], "OPTIONS": {}}}
if "SITE_JOBS" in os.environ:  # tasuki's tables have a database of their own
    DATABASES = {**DATABASES, "jobs": {**DATABASES["default"], "NAME": os.environ["SITE_JOBS"]}}
    DATABASE_ROUTERS = ["tasuki.django.TasukiRouter"]
    TASUKI = {"database": "jobs"}
if "SITE_DIRECT_PORT" in os.environ:  # DATABASE_URL is a pooler's
    DATABASES = {
        "default": {**DATABASES["default"], "DISABLE_SERVER_SIDE_CURSORS": True},
        "direct": {**DATABASES["default"], "PORT": os.environ["SITE_DIRECT_PORT"]},
    }
    TASUKI = {"worker_database": "direct"}
if "SITE_THREADS" in os.environ:  # as monitoring libraries do
    import threading

    threading.Thread(target=threading.Event().wait, daemon=True).start()
