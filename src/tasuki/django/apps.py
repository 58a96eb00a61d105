"""The Django app `tasuki`: the store's tables, for the standalone server and for a user's own project alike."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig


class TasukiConfig(AppConfig):
    name = "tasuki.django"
    label = "tasuki"
    verbose_name = "tasuki"

    def ready(self) -> None:
        from django.db.models.signals import post_migrate

        from tasuki.django import checks  # noqa: F401 - registers them

        post_migrate.connect(_migrated, sender=self)


def _migrated(using: str, **_options: Any) -> None:
    from tasuki.django import standalone
    from tasuki.django.conf import project_settings

    if using == project_settings().database:
        standalone.write_version(using)
