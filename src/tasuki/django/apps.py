"""The Django app `tasuki`: the store's tables, for the standalone server and for a user's own project alike."""

from __future__ import annotations

from django.apps import AppConfig


class TasukiConfig(AppConfig):
    name = "tasuki.django"
    label = "tasuki"
    verbose_name = "tasuki"
