"""The setting `TASUKI` of a project, and the router that keeps tasuki's tables in one of its databases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from django.conf import settings
from django.db import connections

from tasuki.config import node_name
from tasuki.core.decoding import decodable
from tasuki.core.lifecycle import RETENTION_DAYS
from tasuki.errors import ConfigError

APP_LABEL = "tasuki"
VENDORS = ("postgresql", "sqlite")


class GrpcSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`TASUKI["grpc"]`: how nodes prove to each other who they are."""

    authentication: Literal["", "mtls", "bearer"] = ""
    """mtls: by certificates; bearer: by tokens of a minute, signed with SECRET_KEY; empty: by certificates if there are any."""
    tls_cert: str = "/etc/scheduler/tls/tls.crt"
    tls_key: str = "/etc/scheduler/tls/tls.key"
    tls_ca: str = "/etc/scheduler/tls/ca.crt"
    """The CA that signed the certificates of all nodes."""
    tls_revoked: str = "/etc/scheduler/tls/crl.pem"
    """List of revoked certificates; used if the file is there."""
    tls_name: str = "scheduler-grpc"
    """Name in the one certificate that all nodes share. Empty: each node has its own, for its node_id."""
    advertise: str = ""
    """HOST:PORT at which other nodes reach this one. Empty: the address that it listens on, or the host's name."""


@decodable
class AlertTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receiver of alerts."""

    url: str
    """https://… or http://… that takes a POST."""
    secret: str = ""
    """Key of the signature in the header Tasuki-Signature. Empty: not signed."""
    on: tuple[Literal["failure", "dead_letter", "late", "no_leader"], ...] = ("dead_letter", "late", "no_leader")
    """failure: an attempt failed and is tried again; dead_letter: a run failed for good; late: a schedule was not fired."""
    allow_private: bool = False
    """True: loopback, private and link-local addresses are allowed too."""

    def __post_init__(self) -> None:
        check_receiver(self.url)


def check_receiver(url: str) -> None:
    """Raise ValueError unless alerts can be sent to this address. The text names its host at most: the path may be a secret."""
    try:
        parts = urlsplit(url)
        host = f"{parts.scheme}://{parts.hostname or ''}"
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:  # a port that is none
        raise ValueError(f"the address of a receiver cannot be read: {error}; write https://host/path") from None
    if not is_good or "@" in parts.netloc:
        raise ValueError(f"a receiver must be https://host/path or http://host/path, without credentials, got {host!r}")
    if not all("!" <= letter <= "~" for letter in url):
        raise ValueError(f"the address of the receiver at {host!r} has letters beyond ASCII, or spaces; percent-encode them")


@decodable
class AlertSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`TASUKI["alerts"]`: webhooks."""

    everything: AlertTarget | None = None
    """Receiver of the alerts of all runs."""
    definitions: dict[str, AlertTarget] = {}
    """Receivers of the alerts of single definitions, by name, besides."""
    late_seconds: float = 60.0
    """A definition is late so long after its time, and a leader missing so long after its lock ended."""


@decodable
class ProjectSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `TASUKI`; all have defaults."""

    database: str = "default"
    """Alias of the database that has the tables: jobs are rows of transactions on it."""
    worker_database: str = ""
    """Alias of the same database for workers, if `database` goes through a pooler; empty: the same alias."""
    commands: tuple[str, ...] = ()
    """Management commands of other apps that jobs may run, besides those of the project's own apps."""
    definitions: dict[str, Any] = {}
    """Definitions by name, for `manage.py tasuki_definitions apply`."""
    retention_days: float = RETENTION_DAYS
    """Days for which ended jobs are kept."""
    blobs: str = ""
    """Place of results above 64 KiB: s3://bucket/prefix, or a folder that all nodes share. Empty: none. Also of old logs."""
    log_archive: str = ""
    """Place of old logs where `blobs` is empty, in the same form. Empty: the folder tasuki-logs, on SQLite beside the file, else
    in the project's BASE_DIR."""
    alerts: AlertSettings = AlertSettings()
    """Webhooks on failures, late schedules, and a missing leader."""
    coordination: str = ""
    """redis://… for heartbeats and the election of nodes on PostgreSQL. Empty: in the database."""
    node_id: str = ""
    """Name of this machine, container or Pod among the nodes. Empty: the variable TASUKI_NODE_ID, else the host's name."""
    grpc: GrpcSettings = GrpcSettings()
    """Orders between nodes, for `tasuki_worker --grpc`."""


_checked: tuple[object, object, ProjectSettings] | None = None
"""The setting TASUKI and the databases that were checked last, and what they say: asked with each enqueue."""


def project_settings() -> ProjectSettings:
    """Return the project's settings, or raise ConfigError that names the wrong key."""
    global _checked
    given, databases = getattr(settings, "TASUKI", None), connections.databases
    if _checked is None or _checked[0] is not given or _checked[1] is not databases:
        _checked = given, databases, _check({} if given is None else given)
    return _checked[2]


def _check(given: object) -> ProjectSettings:
    if not isinstance(given, Mapping):
        raise ConfigError(f"TASUKI in the settings must be a dict, got {type(given).__name__}")
    try:
        found = msgspec.convert(dict(given), ProjectSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"TASUKI in the settings: {error}; its keys are {', '.join(ProjectSettings.__struct_fields__)}"
        ) from error
    for alias in (found.database, found.worker_database or found.database):
        if alias not in connections.databases:
            raise ConfigError(
                f"TASUKI names the database {alias!r}, which is not in DATABASES ({', '.join(connections.databases)})"
            )
        if (vendor := connections[alias].vendor) not in VENDORS:
            raise ConfigError(f"TASUKI names the database {alias!r} on {vendor}; tasuki needs PostgreSQL or SQLite")
        if found.coordination and (vendor != "postgresql" or "redis" not in found.coordination.partition("://")[0]):
            raise ConfigError('TASUKI["coordination"] must be redis://host:6379/0, and is for nodes on PostgreSQL')
    return found


def node_id() -> str:
    """Return the name of this node."""
    return project_settings().node_id or node_name()


def file_of(alias: str) -> Path:
    """Return the file of a SQLite database of the project."""
    return Path(str(connections.databases[alias]["NAME"])).resolve()


class TasukiRouter:
    """Keeps tasuki's tables in the database that `TASUKI` names; for DATABASE_ROUTERS of a project with several databases."""

    def db_for_read(self, model: Any, **_hints: Any) -> str | None:
        return project_settings().database if model._meta.app_label == APP_LABEL else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **_hints: Any) -> bool | None:
        return db == project_settings().database if app_label == APP_LABEL else None
