"""A Django project with the peers that have a Django app, on the PostgreSQL and the Redis that the environment names."""

import os
from urllib.parse import unquote, urlsplit

_place = urlsplit(os.environ["DATABASE_URL"])
SECRET_KEY = "for the bench only"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.contenttypes", "django.contrib.auth", "procrastinate.contrib.django", "django_tasks", "django_tasks_db",
    "django_q", "peer_app",
]  # fmt: skip
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _place.path.lstrip("/"),
        "USER": unquote(_place.username or ""),
        "PASSWORD": unquote(_place.password or ""),
        "HOST": _place.hostname or "",
        "PORT": _place.port or "",
    }
}
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}
Q_CLUSTER = {"name": "bench", "orm": "default", "workers": 2, "timeout": 60, "retry": 90, "poll": 0.2, "save_limit": 0}
PROCRASTINATE_IMPORT_PATHS = ["peer_app.jobs"]
