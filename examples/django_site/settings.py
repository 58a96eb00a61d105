"""Settings of the example: SQLite in this folder, or the PostgreSQL that DATABASE_URL names."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

BASE_DIR = Path(__file__).parent
SECRET_KEY = "for the example only"
DEBUG = True
USE_TZ = True
TIME_ZONE = "UTC"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "urls"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions", "shop", "tasuki.django"]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TASKS = {"default": {"BACKEND": "tasuki.django.TasukiBackend", "QUEUES": ["default", "mail"]}}

if url := os.environ.get("DATABASE_URL"):
    place = urlsplit(url)
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": place.path.lstrip("/"),
            "USER": unquote(place.username or ""),
            "PASSWORD": unquote(place.password or ""),
            "HOST": place.hostname or "",
            "PORT": place.port or "",
        }
    }
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ.get("SITE_SQLITE", BASE_DIR / "db.sqlite3"),
            "OPTIONS": {"transaction_mode": "IMMEDIATE"},
        }
    }
