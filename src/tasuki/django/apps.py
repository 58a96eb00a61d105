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
        # Here, because models know nothing of the project; and not in a migration.
        command_name: Any = self.get_model("JobDefinition")._meta.get_field("command_name")
        command_name.validators.append(_check_command)


def _check_command(name: str) -> None:
    """ValidationError if jobs may not run this command."""
    from django.core.exceptions import ValidationError

    from tasuki.django.commands import check_command  # imports the store, which sets Django up
    from tasuki.errors import InvalidInput

    try:
        check_command(name)
    except InvalidInput as error:
        raise ValidationError(error.message) from None


GROUPS = {
    "tasuki viewer": ("view_jobrun",),
    "tasuki operator": ("view_jobrun", "change_jobrun"),
    "tasuki admin": ("view_jobrun", "change_jobrun", "change_member", "change_jobdefinition", "change_schedulersettings"),
}
"""Groups of users that a project gets, with their permissions; a project that changes one of them keeps its change."""


def _migrated(using: str, **_options: Any) -> None:
    from django.apps import apps

    from tasuki.django import standalone
    from tasuki.django.conf import project_settings

    if using == project_settings().database:
        standalone.write_version(using)
        if apps.is_installed("django.contrib.auth"):
            _make_groups(using)


def _make_groups(using: str) -> None:
    from django.apps import apps
    from django.contrib.auth.management import create_permissions
    from django.contrib.auth.models import Group, Permission
    from django.db import connections

    if Group._meta.db_table not in connections[using].introspection.table_names():
        return  # users are in another database, or their tables come later
    create_permissions(apps.get_app_config("tasuki"), using=using, verbosity=0)
    for name, codenames in GROUPS.items():
        group, is_new = Group.objects.using(using).get_or_create(name=name)
        if is_new:
            wanted = Permission.objects.using(using).filter(content_type__app_label="tasuki", codename__in=codenames)
            group.permissions.set(wanted)
