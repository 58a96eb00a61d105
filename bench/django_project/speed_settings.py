"""The settings of examples/django_site, and the app that bench/in_django.py measures."""

from settings import *  # noqa: F403
from settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "speed"]
DEBUG = False
