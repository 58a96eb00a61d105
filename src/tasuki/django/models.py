"""The tables of the SQL store: the one source of its schema. Imports nothing of tasuki but the core.

The hot verbs never build these objects: `stores/sql` runs the hand-written statements of `stores/sql/statements/` on Django's
connection. The models define the schema and its migrations, and serve the queries of a user's project.

Sized for history. Millions of finished jobs are beside a few live ones, so every index on `JobRun` but the unique key is partial
and holds only rows that are alive or rare: an ordinary job is in none of them once it has ended. Not only entries cost: SQLite
evaluates an index's condition again with every write to a column that the index names, whether or not the row is in it. Three
indexes with conditions on `state`, which every transition writes, cost 4 µs of a job's 16 though it was in none of them. So
conditions are on columns that the ordinary life of a job does not touch.

Columns of `JobRun` are in the order in which the hot statements need them, since SQLite reads a row from its start. They write
only columns whose value usually differs from the database's own default (`db_default`).
"""

# mypy: disable-error-code="var-annotated"
# The stubs know the type of a field's attribute only through a plugin that would need a project's settings.

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec
from django.core.exceptions import ValidationError
from django.db import connections, models, router
from django.db.models import Q
from django.utils import timezone

from tasuki.core.job import PROGRESS_TEXT_MAX_CHARS, OnDisconnect, State
from tasuki.core.lifecycle import LEASE_TTL_S
from tasuki.core.scheduler.firing import (
    ConcurrencyPolicy,
    Definition,
    DefinitionType,
    default_policy,
    problem_of,
)
from tasuki.core.scheduler.schedule import ScheduleType, parse_schedule, preview, zone_of
from tasuki.core.scheduler.thresholds import Thresholds, problems_of
from tasuki.django.fields import NameField, RowIdField, UnixTimeField, database_time, project_time_zone


class Row(models.Model):
    """A row of one of the tables below, shown to people by the format `shown`."""

    shown = "{0.pk}"

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return self.shown.format(self)


class JobRun(Row):
    """One job (`core.job.Job`) with its current or latest attempt. The column names are part of the contract with users."""

    shown = "{0.idempotency_key} ({0.state})"
    id = RowIdField(primary_key=True)
    """Row id, growing with the time of submission: the age by which leasing orders."""
    idempotency_key = NameField(max_length=128, unique=True)
    """The job_id. Its unique key decides that a submit is a repeat."""
    state = models.CharField(
        max_length=12, choices=[(state.value, state.value) for state in State], db_default=State.PENDING.value
    )
    ready = models.SmallIntegerField(db_default=1)
    """1: may be leased now (PENDING and due, or ORPHANED). 2: PENDING, waits for its not_before. 0: all others, also a run that
    waits until the run that it replaces has ended."""
    kind = models.SmallIntegerField(db_default=1)
    """JobKind: 0 a command, 1 a Python handler's, 2 a command of the server's own user. Part of the index of ready rows, like the
    exec: a worker does not read what it cannot run."""
    priority = models.SmallIntegerField(db_default=5)
    group = NameField(max_length=255)
    subject = NameField(max_length=255)

    # The attempt. Kept after its end until the next grant, so that an exact repeat of its report is recognized.
    attempt = models.IntegerField(db_default=0)
    version = models.IntegerField(db_default=0)
    """Grows by one with every transition."""
    lease_id = NameField(max_length=64, db_default="")
    """Random prefix of the lease request, a dot, this row's id. Empty once the lease was taken away."""
    assigned_worker_id = NameField(max_length=128, null=True)
    incarnation = NameField(max_length=64, db_default="")
    lease_owner = NameField(max_length=255, db_default="")
    """The peer that was let in as the worker: `worker:<id>` of a bound token, else `token:<id>` or `uid:<number>`."""
    lease_expires_at = models.FloatField(null=True)
    """Lease-clock time at which reaping may end the lease, with margin and (`keep`) grace: on SQLite seconds since boot. NULL
    unless ASSIGNED or RUNNING."""
    lease_expired_at = models.FloatField(null=True)
    """Former `lease_expires_at` of an ORPHANED job."""
    lease_ttl_s = models.FloatField(db_default=LEASE_TTL_S)
    on_disconnect = NameField(max_length=4, db_default=OnDisconnect.STOP.value)
    reconnect_grace_s = models.FloatField(db_default=0.0)
    cancel_requested = models.SmallIntegerField(db_default=0)
    assigned_at = UnixTimeField(null=True)
    started_at = UnixTimeField(null=True)
    finished_at = UnixTimeField(null=True)
    """Time at which the job became terminal."""

    # The outcome that made it terminal, or that of the latest failed attempt.
    exit_code = models.BigIntegerField(null=True)
    error_code = NameField(max_length=64, null=True)
    """NULL: no attempt has failed since the last grant or requeue. Empty: one has, and its worker gave no code."""
    error_summary = models.TextField(db_default="")
    """The outcome's message."""
    permanent = models.SmallIntegerField(db_default=0)
    result = models.BinaryField(null=True)
    """Result up to 64 KiB. A larger one is a blob: then this is NULL, and hash and size identify the blob."""
    result_sha256 = NameField(max_length=64, null=True)
    result_size_bytes = models.BigIntegerField(null=True)
    meta = models.BinaryField(null=True)
    """msgpack; NULL if empty."""
    replaced_report = models.BinaryField(null=True)
    """msgpack of the identity of a failure report whose outcome a cancel replaced, so that its repeat is still recognized."""
    log_ref = NameField(max_length=1024, db_default="")
    """Place of the log, if not LogChunk: `blob:<sha256>` once it is archived, or what an application writes, as the address of a
    page, which archiving leaves alone."""

    # Budgets and delays.
    not_before = UnixTimeField(null=True)
    not_after = UnixTimeField(null=True)
    """Time after which the job is not granted any more, but SKIPPED. NULL: no such time, or requeued after it."""
    generation = models.IntegerField(db_default=0)
    failures = models.IntegerField(db_default=0)
    losses = models.IntegerField(db_default=0)
    max_retries = models.IntegerField(db_default=3)
    max_losses = models.IntegerField(db_default=3)
    backoff_s = models.FloatField(db_default=10.0)

    # Origin of the job.
    created_at = UnixTimeField()
    submitter = NameField(max_length=255)
    exec = NameField(max_length=1024, db_default="")
    array_id = NameField(max_length=128, null=True)
    # Without constraint and index: jobs outlive their definition, and most have none.
    job_definition = models.ForeignKey(
        "JobDefinition", on_delete=models.DO_NOTHING, null=True, db_constraint=False, db_index=False, related_name="runs"
    )
    scheduled_for = UnixTimeField(null=True)
    leader_epoch = models.BigIntegerField(db_default=0)
    """Epoch of the last write that a leader made here."""
    continuation_state = models.CharField(
        max_length=10, choices=[("NONE", "NONE"), ("CONFIRMING", "CONFIRMING")], db_default="NONE"
    )
    continuation_check_started_at = UnixTimeField(null=True)
    continuation_check_deadline_at = UnixTimeField(null=True)
    progress = models.FloatField(null=True)
    """0 to 1, as last reported by the latest attempt; NULL: not reported. Written with renewals, cleared by a grant."""
    progress_text = models.CharField(max_length=PROGRESS_TEXT_MAX_CHARS, db_default="")
    body_hash = models.BinaryField()
    spec = models.BinaryField()
    """msgpack of the JobSpec, handed to the worker as it is. Last, since it may be long."""

    class Meta:
        indexes = [
            # Leasing: seeks by band, group, subject, kind and exec, then age.
            models.Index(
                fields=["-priority", "group", "subject", "kind", "exec", "id"], condition=Q(ready=1), name="tasuki_job_ready"
            ),
            # Reaping, and queries for running jobs. One entry per live lease, not per job.
            models.Index(fields=["lease_expires_at"], condition=Q(lease_expires_at__isnull=False), name="tasuki_job_leased"),
            # Promotion of delayed jobs and retries.
            models.Index(fields=["not_before"], condition=Q(ready=2), name="tasuki_job_delayed"),
            # Skipping jobs that are too late. Most jobs have no such time, and are not in it.
            models.Index(fields=["not_after"], condition=Q(not_after__isnull=False, ready__gt=0), name="tasuki_job_late"),
            # `list --state FAILED` among millions that succeeded: all that ended otherwise have an error_code.
            models.Index(fields=["id"], condition=Q(error_code__isnull=False), name="tasuki_job_failed"),
            # The elements of one array.
            models.Index(fields=["array_id", "id"], condition=Q(array_id__isnull=False), name="tasuki_job_array"),
        ]

    @property
    def job_id(self) -> str:
        return self.idempotency_key


class Incident(Row):
    """Something unusual that happened to a job. The ordinary life of a job has none."""

    shown = "{0.kind}: {0.reason}"
    id = RowIdField(primary_key=True)
    # Without a constraint: only pruning deletes jobs, and deletes these too, so no job pays for the check.
    job = models.ForeignKey(JobRun, on_delete=models.CASCADE, related_name="incidents", db_constraint=False)
    at = UnixTimeField()
    kind = NameField(max_length=20)
    attempt = models.BigIntegerField(db_default=0)
    """Attempt as reported: a fenced report may name any number."""
    worker_id = NameField(max_length=128, db_default="")
    actor = NameField(max_length=255, db_default="")
    reason = models.TextField(db_default="")


class LogChunk(Row):
    """A part of the log of an attempt in a Django project: output of a management command, or the traceback of a task."""

    shown = "{0.stream} of attempt {0.attempt} from {0.offset} on"
    id = RowIdField(primary_key=True)
    job = models.ForeignKey(JobRun, on_delete=models.CASCADE, related_name="log_chunks", db_constraint=False)
    attempt = models.IntegerField()
    stream = NameField(max_length=8)
    """stdout, stderr, or errors: the exceptions of a task."""
    offset = models.BigIntegerField(db_default=0)
    """Position of the first byte in the stream as the job wrote it; bytes between two chunks were cut."""
    at = UnixTimeField()
    data = models.BinaryField()
    """The bytes, compressed by zlib."""


class Alert(Row):
    """A message to a receiver of alerts, kept until it was taken, and for a while after, so that it is made once."""

    shown = "{0.key}"
    id = RowIdField(primary_key=True)
    key = NameField(max_length=255, unique=True)
    """Text that names the event, its object and the receiver."""
    target = NameField(max_length=200)
    """Name of the definition whose receiver gets it; empty: the one of everything."""
    body = models.JSONField()
    created_at = UnixTimeField()
    tries = models.IntegerField(db_default=0)
    next_at = UnixTimeField(null=True)
    """Time of the next try; NULL: it was taken, or has no receiver any more."""
    problem = models.TextField(db_default="")

    class Meta:
        indexes = [models.Index(fields=["next_at"], condition=Q(next_at__isnull=False), name="tasuki_alert_next")]


class JobBlob(Row):
    """Reference of a job to a blob: an input, its result, or its archived log; written in the job's transaction, so that
    collection cannot come before."""

    shown = "{0.role} {0.sha256}"
    id = RowIdField(primary_key=True)
    job = models.ForeignKey(JobRun, on_delete=models.CASCADE, related_name="blobs", db_constraint=False)
    sha256 = NameField(max_length=64)
    role = models.CharField(max_length=6, choices=[("in", "in"), ("result", "result"), ("log", "log")])

    class Meta:
        indexes = [models.Index(fields=["sha256"], name="tasuki_blob_sha256")]


class CacheFile(Row):
    """A file of a cache, which is a reference to the blob that has its bytes."""

    shown = "{0.cache_id}:{0.name}"
    id = RowIdField(primary_key=True)
    cache_id = NameField(max_length=64)
    name = NameField(max_length=1024)
    sha256 = NameField(max_length=64)
    size_bytes = models.BigIntegerField()
    target = NameField(max_length=255)
    """Pattern of the workers that it is for."""
    owner = NameField(max_length=255)
    """Submitter who put it there."""
    added_at = UnixTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["cache_id", "name"], name="tasuki_cache_key")]
        indexes = [models.Index(fields=["sha256"], name="tasuki_cache_sha256")]


class MinuteRollup(Row):
    """Counts of one server in one minute, kept for a week; `core.statistics.decode_rollup` reads `data`."""

    shown = "{0.minute} {0.server_id}"
    id = RowIdField(primary_key=True)
    minute = models.BigIntegerField()
    """Unix time at which it began."""
    server_id = NameField(max_length=255)
    data = models.BinaryField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["minute", "server_id"], name="tasuki_rollup_key")]


class SubjectPause(Row):
    """A pattern of subjects whose waiting jobs are granted to nobody until it is resumed; see `core.pauses`."""

    shown = "{0.pattern}"
    id = RowIdField(primary_key=True)
    pattern = NameField(max_length=255, unique=True)
    since = UnixTimeField()
    actor = NameField(max_length=255)
    reason = models.TextField(db_default="")


class Blob(Row):
    """Bytes that are kept, or about to be. The row exists before the bytes are written and until they are deleted: there are
    never bytes without a row. References to them are in JobBlob and CacheFile.

    A condemned blob (nothing refers to it, its bytes are being deleted) is never used again: a client that brings the same bytes
    gets the next generation, kept under another name. So a deleter that was frozen for an hour cannot delete bytes in use.
    """

    shown = "{0.sha256} ({0.generation})"
    id = RowIdField(primary_key=True)
    sha256 = NameField(max_length=64)
    generation = models.IntegerField(db_default=0)
    size_bytes = models.BigIntegerField()
    stored = models.SmallIntegerField(db_default=0)
    """1: the bytes are complete and durable."""
    condemned = models.SmallIntegerField(db_default=0)
    touched_at = UnixTimeField()
    """Time of the last upload or request to keep it; collection leaves it alone for a grace time."""

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["sha256", "generation"], name="tasuki_blob_key"),
            # One live generation: two servers that place the same bytes at once agree on it.
            models.UniqueConstraint(fields=["sha256"], condition=Q(condemned=0), name="tasuki_blob_live"),
        ]
        indexes = [
            models.Index(fields=["touched_at"], condition=Q(condemned=0), name="tasuki_blob_touched"),
            models.Index(fields=["touched_at"], condition=Q(condemned=1), name="tasuki_blob_condemned"),
        ]


class Counter(Row):
    """Number of jobs of a group by state; maintained with every transition, so that jobs need not be counted.

    The number is the sum over the rows. Each server adds to a shard of its own: on one row the transactions of all servers
    would queue up. A transaction of a user's project, which may last, adds rows without a shard, which nobody else writes to;
    pruning adds them to its own shard.
    """

    shown = "{0.group} {0.state}: {0.n}"
    id = RowIdField(primary_key=True)
    group = NameField(max_length=255)
    state = NameField(max_length=12)
    """Field of core.statistics.GroupCounts."""
    shard = models.SmallIntegerField(null=True, db_default=0)
    n = models.BigIntegerField()

    class Meta:
        indexes = [models.Index(fields=["id"], condition=Q(shard=None), name="tasuki_counter_delta")]
        constraints = [models.UniqueConstraint(fields=["group", "state", "shard"], name="tasuki_counter_key")]


class ScopeEpoch(Row):
    """The highest epoch ever registered in a scope, and who holds it. Leader writes are checked against it."""

    shown = "{0.scope}: {0.epoch} ({0.holder})"
    scope = NameField(max_length=64, primary_key=True)
    epoch = models.BigIntegerField()
    holder = NameField(max_length=255)
    taken_over_at = models.FloatField(null=True)
    """Lease-clock time of the takeover: a lease is renewed by one takeover, not by one after the other."""


class ScopeLease(Row):
    """The leader's lock on a scope, and its end. A row apart from ScopeEpoch: a leader's writes share-lock that one, and renewals
    would queue up behind them."""

    shown = "{0.scope}: {0.holder} until {0.expires_at}"
    scope = NameField(max_length=64, primary_key=True)
    epoch = models.BigIntegerField()
    holder = NameField(max_length=255)
    expires_at = UnixTimeField()
    """Time on the database's clock."""


class Member(Row):
    """A process that announces itself: a server, with its addresses and the workers connected to it."""

    shown = "{0.kind} {0.member_id}"
    member_id = NameField(max_length=128, primary_key=True)
    kind = NameField(max_length=10)
    incarnation = NameField(max_length=64)
    beat_at = UnixTimeField()
    """Time on the database's clock."""
    schema_version = models.IntegerField(db_default=0)
    """Version of these tables that its code expects."""
    version = models.BigIntegerField(db_default=0)
    """Grows when `info` changes, so that others read it only then."""
    info = models.BinaryField()
    """msgpack of facts for the other members."""


class Detached(Row):
    """A worker that gets no more work."""

    shown = "{0.worker_id}"
    worker_id = NameField(max_length=128, primary_key=True)
    at = UnixTimeField()
    actor = NameField(max_length=255, db_default="")
    reason = models.TextField(db_default="")


class TurnMark(Row):
    """The last turn that each writer committed: it tells, after a connection broke in a commit, whether the turn is stored."""

    shown = "{0.writer}: {0.turn}"
    writer = NameField(max_length=64, primary_key=True)
    turn = models.BigIntegerField()
    at = UnixTimeField()


class Audit(Row):
    """One entry of the audit: of tokens, and of operations in a Django project (`AdminActionLog`)."""

    shown = "{0.actor} {0.action} {0.target}"
    id = RowIdField(primary_key=True)
    at = UnixTimeField()
    actor = NameField(max_length=255)
    action = NameField(max_length=32)
    """token.create, .revoke; worker.detach, .attach, .drain; leader.degrade; settings.change; run.cancel, .rerun, .enqueue;
    definition.change, .enable, .disable, .delete, .run; event.emit, .retry"""
    target = NameField(max_length=255)
    detail = models.TextField(db_default="")


class AdminActionLog(Audit):
    """An act of a person on a worker, run or setting, with time and reason (`detail`); see `operations`."""

    class Meta:
        proxy = True


class Schema(Row):
    """The one row with the version of these tables and the oldest code that can work with them."""

    shown = "version {0.version}, for code from {0.oldest_code} on"
    id = models.SmallIntegerField(primary_key=True, db_default=1)
    version = models.IntegerField()
    oldest_code = models.IntegerField()


class Token(Row):
    """A token that grants access. Never the secret, only its sha256."""

    shown = "{0.token_id} ({0.kind})"
    id = RowIdField(primary_key=True)
    token_id = NameField(max_length=64, unique=True)
    kind = NameField(max_length=10)
    sha256 = NameField(max_length=64, unique=True)
    label = NameField(max_length=255, db_default="")
    scope = models.JSONField(default=list)
    """Patterns of subjects."""
    created_at = UnixTimeField(db_default=0.0)
    created_by = NameField(max_length=255, db_default="")
    expires_at = UnixTimeField(null=True)
    revoked_at = UnixTimeField(null=True)
    revoked_by = NameField(max_length=255, db_default="")
    worker_id = NameField(max_length=64, db_default="")
    """The only worker that may use the token; empty: any."""
    incarnation = NameField(max_length=64, db_default="")
    """Incarnation of that worker at /calc, if its token was exchanged for this one."""


# ---------------------------------------------------------------------------------------------------- definitions and events
# Their ids are never used a second time, unlike a RowIdField's: ids of runs are made of them.


def _choices(words: Iterable[str]) -> list[tuple[str, str]]:
    return [(str(word), str(word)) for word in words]


class JobDefinition(Row):
    """A job by time or by event, as its owner writes it. The leader's notes on it are in `DefinitionState`.

    `full_clean()` checks it completely. `save()` notes when its schedule changed, or it was enabled: from then on its nominal
    times count. Changes by `QuerySet.update()` are noticed too, by the leader's next look.
    """

    shown = "{0.name}"
    id = models.BigAutoField(primary_key=True)
    name = NameField(max_length=200, unique=True)
    enabled = models.BooleanField(default=True, db_default=True)
    type = NameField(max_length=5, choices=_choices(DefinitionType), default=DefinitionType.TIME.value)
    event_type = NameField(max_length=255, blank=True, default="", db_default="")
    """Pattern of the types of events that it runs upon: a subject, `*` and `>` allowed."""
    command_name = NameField(max_length=64)
    default_args_json = models.JSONField(null=True, blank=True)
    """A list is the command line, an object options, `{"args": […], "options": {…}}` both: `firing.arguments_of`."""
    schedule_type = NameField(max_length=20, choices=_choices(ScheduleType), blank=True, default="", db_default="")
    schedule_value = NameField(max_length=255, blank=True, default="", db_default="")
    time_zone = NameField(max_length=64, default=project_time_zone, db_default="UTC")
    queue = NameField(max_length=64, default="default", db_default="default")
    timeout_seconds = models.PositiveIntegerField(null=True, blank=True)
    max_retries = models.PositiveIntegerField(default=3, db_default=3)
    retry_backoff_seconds = models.PositiveIntegerField(default=10, db_default=10)
    concurrency_policy = NameField(
        max_length=7,
        choices=_choices(ConcurrencyPolicy),
        blank=True,
        default="",
        db_default=ConcurrencyPolicy.FORBID.value,
    )
    """Policy of the definition. An empty one becomes that of the type in `save()`: forbid by time, allow by event."""
    changed_at = UnixTimeField(default=0.0, db_default=0.0, editable=False)
    """Time at which its schedule was changed, or it was enabled, by `save()`."""
    managed_by = NameField(max_length=255, blank=True, default="", db_default="")
    """The settings or the file that it was applied from (`definitions.apply`); empty: it was made by hand."""

    def definition(self) -> Definition:
        """Return it as the core takes it."""
        columns = {name: getattr(self, name) for name in Definition.__struct_fields__ if name not in ("id", "changed_at")}
        return Definition(**columns, id=self.pk or 0, changed_at=self.changed_at.timestamp())

    def clean(self) -> None:
        """ValidationError, under the name of the field, if it could not be fired."""
        if (found := problem_of(self.definition())) is not None:
            field, problem = found
            raise ValidationError({field or "__all__": problem})

    def preview(self, count: int = 10, after: datetime | None = None) -> list[datetime]:
        """Return the next nominal times, in its time zone: those at which it will be fired."""
        schedule, zone = parse_schedule(self.schedule_type, self.schedule_value), zone_of(self.time_zone)
        times = preview(schedule, (after or timezone.now()).timestamp(), zone, count)
        return [datetime.fromtimestamp(at, zone) for at in times]

    _PLANNED = ("enabled", "type", "schedule_type", "schedule_value", "time_zone")

    def save(self, *arguments: Any, **named: Any) -> None:
        self.concurrency_policy = self.concurrency_policy or default_policy(self.type)
        fields = named.get("update_fields")
        if fields is None or not set(self._PLANNED).isdisjoint(fields):
            alias = named.get("using") or router.db_for_write(type(self), instance=self)
            rows = type(self)._base_manager.using(alias).filter(pk=self.pk)
            before = rows.values_list(*self._PLANNED).first() if self.pk is not None else None
            if before != tuple(getattr(self, name) for name in self._PLANNED):
                self.changed_at = database_time(connections[alias])  # the leader compares it with this clock
                named |= {"update_fields": {*fields, "changed_at"}} if fields is not None else {}
        super().save(*arguments, **named)


class DefinitionState(Row):
    """The leader's notes on one definition (`core.scheduler.firing.FiringState`). No application writes them: saving a definition
    that was read a while ago changes nothing here. They outlive the definition, for a run of it that still waits; see `prune`."""

    shown = "{0.definition_id}: next at {0.next_at}"
    definition = models.OneToOneField(
        JobDefinition, on_delete=models.DO_NOTHING, primary_key=True, db_constraint=False, related_name="state"
    )
    fired_until = UnixTimeField(db_default=0.0)
    """All nominal times up to this one are settled."""
    next_at = UnixTimeField(null=True)
    """The next nominal time; with a problem, the time of the next look. NULL: disabled, or by event."""
    plan = models.TextField(db_default="")
    """The schedule that `next_at` was computed from, and the definition's `changed_at` then."""
    changed_at = UnixTimeField(db_default=0.0)
    last_run_id = NameField(max_length=128, db_default="")
    """The job_id of the last run that was not skipped."""
    waits_for = NameField(max_length=128, db_default="")
    """The job_id of the earlier run that the last one replaces, until that has ended."""
    problem = models.TextField(db_default="")
    """The reason why it cannot be fired; empty: none."""


class Event(Row):
    """Something that happened, for definitions of type event. Written by `emit` in the transaction of the application."""

    shown = "{0.event_type} {0.pk}"
    id = models.BigAutoField(primary_key=True)
    event_type = NameField(max_length=255)
    payload_json = models.JSONField(null=True)
    dedupe_key = NameField(max_length=255, null=True, unique=True)
    """A second event with the same key is not stored. NULL: never the same."""
    created_at = UnixTimeField(default=time.time)
    processed_at = UnixTimeField(null=True)
    """Time at which the leader made its runs, one for each definition that matched."""
    problem = models.TextField(blank=True, default="", db_default="")
    """The reason why a definition that matched got no run; `definitions.process_again` has the leader try again."""
    # The only definition that it is for: a run that somebody asked for by hand.
    job_definition = models.ForeignKey(
        JobDefinition, on_delete=models.CASCADE, null=True, db_constraint=False, db_index=False, related_name="+"
    )

    class Meta:
        indexes = [
            models.Index(fields=["id"], condition=Q(processed_at__isnull=True), name="tasuki_event_new"),
            models.Index(fields=["id"], condition=~Q(problem=""), name="tasuki_event_problem"),
        ]


def _threshold(name: str) -> Any:
    """Return the column of a threshold."""
    default = _DEFAULTS[name]
    column = models.IntegerField if isinstance(default, int) else models.FloatField
    return column(default=default, db_default=default)


_DEFAULTS: dict[str, float] = msgspec.structs.asdict(Thresholds())


class SchedulerSettings(Row):
    """The one row of settings that are in force without a restart (`core.scheduler.thresholds`). `full_clean()` checks it."""

    shown = "settings"
    id = models.SmallIntegerField(primary_key=True, default=1, db_default=1)
    skip_late_runs_after_seconds = _threshold("skip_late_runs_after_seconds")
    log_retention_days_db = _threshold("log_retention_days_db")
    leader_tick_seconds = _threshold("leader_tick_seconds")
    assign_ahead_seconds = _threshold("assign_ahead_seconds")
    heartbeat_interval_seconds = _threshold("heartbeat_interval_seconds")
    heartbeat_ttl_seconds = _threshold("heartbeat_ttl_seconds")
    worker_detach_grace_seconds = _threshold("worker_detach_grace_seconds")
    leader_stale_seconds = _threshold("leader_stale_seconds")
    leader_lock_ttl_seconds = _threshold("leader_lock_ttl_seconds")
    subleader_check_seconds = _threshold("subleader_check_seconds")
    reassign_after_seconds = _threshold("reassign_after_seconds")
    max_jobs_per_worker = _threshold("max_jobs_per_worker")
    continuation_retry_count = _threshold("continuation_retry_count")
    continuation_retry_interval_seconds = _threshold("continuation_retry_interval_seconds")
    grpc_ping_timeout_seconds = _threshold("grpc_ping_timeout_seconds")
    grpc_ping_failures = _threshold("grpc_ping_failures")

    def thresholds(self) -> Thresholds:
        """Return them as the core takes them."""
        return Thresholds(**{name: getattr(self, name) for name in Thresholds.__struct_fields__})

    def clean(self) -> None:
        """ValidationError, under the name of the field, for values and combinations that cannot work."""
        if problems := problems_of(self.thresholds()):
            raise ValidationError(problems)
