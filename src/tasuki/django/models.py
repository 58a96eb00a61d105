"""The tables of the SQL store: the one source of its schema. Imports nothing of tasuki but the core.

The hot verbs never build these objects: `stores/sql*.py` runs the hand-written statements of `stores/statements/` on Django's
connection. The models give the schema, its migrations, and the queries of people and screens.

Sized for history. Millions of finished jobs lie beside a few that live, so every index on `JobRun` but the unique key is
partial and holds only rows that are alive or rare: an ordinary job is in none of them once it has ended. What counts is not
only the entries: SQLite works out an index's condition again with every write to a column that the index names, whether or not
the row is in it. Three indexes with conditions on `state`, which every transition writes, cost 4 µs of a job's 16 though it
was in none of them. So conditions are on columns that the ordinary life of a job does not touch.

Columns of `JobRun` stand in the order in which the hot statements need them, since SQLite reads a row from its start. Only what
most rows have another value for is written by them: the database's own defaults (`db_default`) fill the rest.
"""

# mypy: disable-error-code="var-annotated"
# What a field's attribute is, the stubs know only through a plugin that would need a project's settings.

from __future__ import annotations

from django.db import models
from django.db.models import Q

from tasuki.core.job import PROGRESS_TEXT_MAX_CHARS, OnDisconnect, State
from tasuki.core.lifecycle import LEASE_TTL_S
from tasuki.django.fields import NameField, RowIdField, UnixTimeField


class JobRun(models.Model):
    """One job, with its current or latest attempt. DESIGN §1 calls it Job; the names of the columns are REQUIREMENTS C5's."""

    id = RowIdField(primary_key=True)
    """Grows with the time of submission: the age that leasing goes by."""
    idempotency_key = NameField(max_length=128, unique=True)
    """The job_id. Its unique key is what decides that a submit is a repeat."""
    state = models.CharField(
        max_length=12, choices=[(state.value, state.value) for state in State], db_default=State.PENDING.value
    )
    ready = models.SmallIntegerField(db_default=1)
    """1: may be leased now (PENDING and due, or ORPHANED). 2: PENDING, waits for its not_before. 0: all others."""
    kind = models.SmallIntegerField(db_default=1)
    """JobKind: 0 a command, 1 a Python handler's, 2 a command of the server's own user. In the index of ready rows: a worker that
    takes only some kinds never wades through the others."""
    priority = models.SmallIntegerField(db_default=5)
    group = NameField(max_length=255)
    subject = NameField(max_length=255)

    # The attempt. It stays after its end until the next grant, so that an exact repeat of its report is known as one.
    attempt = models.IntegerField(db_default=0)
    version = models.IntegerField(db_default=0)
    """Grows by one with every transition."""
    lease_id = NameField(max_length=64, db_default="")
    """Random prefix of the lease request, a dot, this row's id. Empty once the lease was taken away."""
    assigned_worker_id = NameField(max_length=128, null=True)
    incarnation = NameField(max_length=64, db_default="")
    lease_expires_at = UnixTimeField(null=True)
    """On the lease clock: when reaping may end it, with margin and (`keep`) grace. NULL unless ASSIGNED or RUNNING."""
    lease_expired_at = UnixTimeField(null=True)
    """The same of a lease that is over, while its job is ORPHANED."""
    lease_ttl_s = models.FloatField(db_default=LEASE_TTL_S)
    on_disconnect = NameField(max_length=4, db_default=OnDisconnect.STOP.value)
    reconnect_grace_s = models.FloatField(db_default=0.0)
    cancel_requested = models.SmallIntegerField(db_default=0)
    assigned_at = UnixTimeField(null=True)
    started_at = UnixTimeField(null=True)
    finished_at = UnixTimeField(null=True)
    """When it became terminal."""

    # The outcome of the finish that made it terminal, or of the latest failed attempt.
    exit_code = models.BigIntegerField(null=True)
    error_code = NameField(max_length=64, null=True)
    """NULL: no attempt has failed since the last grant or requeue. Empty: one has, and its worker gave no code."""
    error_summary = models.TextField(db_default="")
    """The outcome's message."""
    permanent = models.SmallIntegerField(db_default=0)
    result = models.BinaryField(null=True)
    """Up to 64 KiB. A larger one is a blob: then this is NULL, and the hash and the size say which."""
    result_sha256 = NameField(max_length=64, null=True)
    result_size_bytes = models.BigIntegerField(null=True)
    meta = models.BinaryField(null=True)
    """msgpack; NULL if empty."""
    replaced_report = models.BinaryField(null=True)
    """msgpack of what tells a failure report from another, if a cancel put its own outcome over it: its repeat is still one."""
    log_ref = NameField(max_length=1024, db_default="")

    # Budgets and delays.
    not_before = UnixTimeField(null=True)
    not_after = UnixTimeField(null=True)
    """Past this it is not granted any more, but SKIPPED. NULL: no such time, or set going again after it."""
    generation = models.IntegerField(db_default=0)
    failures = models.IntegerField(db_default=0)
    losses = models.IntegerField(db_default=0)
    max_retries = models.IntegerField(db_default=3)
    max_losses = models.IntegerField(db_default=3)
    backoff_s = models.FloatField(db_default=10.0)

    # Who asked for it, and how it came about.
    created_at = UnixTimeField()
    submitter = NameField(max_length=255)
    exec = NameField(max_length=1024, db_default="")
    array_id = NameField(max_length=128, null=True)
    job_definition_id = models.BigIntegerField(null=True)
    scheduled_for = UnixTimeField(null=True)
    leader_epoch = models.BigIntegerField(db_default=0)
    """Of the last write that a leader made here."""
    continuation_state = models.CharField(
        max_length=10, choices=[("NONE", "NONE"), ("CONFIRMING", "CONFIRMING")], db_default="NONE"
    )
    continuation_check_started_at = UnixTimeField(null=True)
    continuation_check_deadline_at = UnixTimeField(null=True)
    progress = models.FloatField(null=True)
    """0 to 1, as the latest attempt said it last; NULL: it said nothing. Written beside renewals, cleared by a grant."""
    progress_text = models.CharField(max_length=PROGRESS_TEXT_MAX_CHARS, db_default="")
    body_hash = models.BinaryField()
    spec = models.BinaryField()
    """msgpack of the JobSpec, handed to the worker as it is. Last, since it may be long."""

    class Meta:
        indexes = [
            # Leasing: seeks by band, group, subject and kind, then age.
            models.Index(fields=["-priority", "group", "subject", "kind", "id"], condition=Q(ready=1), name="tasuki_job_ready"),
            # Reaping, and all that asks for the running. One entry per live lease, not per job.
            models.Index(fields=["lease_expires_at"], condition=Q(lease_expires_at__isnull=False), name="tasuki_job_leased"),
            # Promotion of delayed jobs and retries.
            models.Index(fields=["not_before"], condition=Q(ready=2), name="tasuki_job_delayed"),
            # Skipping what is too late. Most jobs have no such time, and are not in it.
            models.Index(fields=["not_after"], condition=Q(not_after__isnull=False, ready__gt=0), name="tasuki_job_late"),
            # `list --state FAILED` among millions that succeeded: all that ended otherwise have an error_code.
            models.Index(fields=["id"], condition=Q(error_code__isnull=False), name="tasuki_job_failed"),
            # The elements of one array.
            models.Index(fields=["array_id", "id"], condition=Q(array_id__isnull=False), name="tasuki_job_array"),
        ]

    @property
    def job_id(self) -> str:
        return self.idempotency_key

    def __str__(self) -> str:
        return f"{self.idempotency_key} ({self.state})"


class Incident(models.Model):
    """Something unusual that befell a job. The ordinary life of a job has none."""

    id = RowIdField(primary_key=True)
    # Without a constraint: only pruning deletes jobs, it deletes these too, and no job's life pays for the check.
    job = models.ForeignKey(JobRun, on_delete=models.CASCADE, related_name="incidents", db_constraint=False)
    at = UnixTimeField()
    kind = NameField(max_length=20)
    attempt = models.BigIntegerField(db_default=0)
    """As reported: what is fenced may name any."""
    worker_id = NameField(max_length=128, db_default="")
    actor = NameField(max_length=255, db_default="")
    reason = models.TextField(db_default="")

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


class JobBlob(models.Model):
    """A blob that a job needs or gave; written in the job's own transaction, so that collection cannot take it away before."""

    id = RowIdField(primary_key=True)
    job = models.ForeignKey(JobRun, on_delete=models.CASCADE, related_name="blobs", db_constraint=False)
    sha256 = NameField(max_length=64)
    role = models.CharField(max_length=6, choices=[("in", "in"), ("result", "result")])

    class Meta:
        indexes = [models.Index(fields=["sha256"], name="tasuki_blob_sha256")]

    def __str__(self) -> str:
        return f"{self.role} {self.sha256}"


class Blob(models.Model):
    """Bytes that are kept, or about to be. The row stands before the bytes are written and goes after they are deleted: there are
    never bytes without a row. Who uses them stands in JobBlob.

    A blob that is condemned (nobody refers to it, its bytes are being deleted) is never brought back to life: whoever brings the
    same bytes again gets the next generation, kept under another name. So a deleter that was frozen for an hour cannot delete
    anything that is in use.
    """

    id = RowIdField(primary_key=True)
    sha256 = NameField(max_length=64)
    generation = models.IntegerField(db_default=0)
    size_bytes = models.BigIntegerField()
    stored = models.SmallIntegerField(db_default=0)
    """1: the bytes are whole and durable."""
    condemned = models.SmallIntegerField(db_default=0)
    touched_at = UnixTimeField()
    """When somebody last brought it or asked for it to be kept; collection leaves it alone for a grace time."""

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["sha256", "generation"], name="tasuki_blob_key"),
            # One place at a time: two servers that place the same bytes at once agree on it.
            models.UniqueConstraint(fields=["sha256"], condition=Q(condemned=0), name="tasuki_blob_live"),
        ]
        indexes = [
            models.Index(fields=["touched_at"], condition=Q(condemned=0), name="tasuki_blob_touched"),
            models.Index(fields=["touched_at"], condition=Q(condemned=1), name="tasuki_blob_condemned"),
        ]

    def __str__(self) -> str:
        return f"{self.sha256} ({self.generation})"


class Counter(models.Model):
    """How many jobs of a group stand where; maintained with every transition, so that nobody has to count jobs.

    The number is the sum over the shards. Each server adds to a shard of its own: on one row the transactions of all servers
    would queue up.
    """

    id = RowIdField(primary_key=True)
    group = NameField(max_length=255)
    state = NameField(max_length=12)
    """A name of stores.store.GroupCounts."""
    shard = models.SmallIntegerField(db_default=0)
    n = models.BigIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["group", "state", "shard"], name="tasuki_counter_key")]

    def __str__(self) -> str:
        return f"{self.group} {self.state}: {self.n}"


class ScopeEpoch(models.Model):
    """The highest epoch ever registered in a scope, and who holds it. Leader writes are checked against it."""

    scope = NameField(max_length=64, primary_key=True)
    epoch = models.BigIntegerField()
    holder = NameField(max_length=255)
    taken_over_at = models.FloatField(null=True)
    """When, on the lease clock: a lease is renewed by one takeover, not by one after the other."""

    def __str__(self) -> str:
        return f"{self.scope}: {self.epoch} ({self.holder})"


class ScopeLease(models.Model):
    """Who may call itself leader of a scope, and until when. A row apart from ScopeEpoch: a leader's writes share-lock that one,
    and renewals would queue up behind them."""

    scope = NameField(max_length=64, primary_key=True)
    epoch = models.BigIntegerField()
    holder = NameField(max_length=255)
    expires_at = UnixTimeField()
    """On the database's clock."""

    def __str__(self) -> str:
        return f"{self.scope}: {self.holder} until {self.expires_at}"


class Member(models.Model):
    """A process that says it is alive: a server, with its addresses and the workers connected to it."""

    member_id = NameField(max_length=128, primary_key=True)
    kind = NameField(max_length=10)
    incarnation = NameField(max_length=64)
    beat_at = UnixTimeField()
    """On the database's clock."""
    schema_version = models.IntegerField(db_default=0)
    """What its code expects of these tables."""
    version = models.BigIntegerField(db_default=0)
    """Grows when `info` changes, so that others read it only then."""
    info = models.BinaryField()
    """msgpack of what others should know of it."""

    def __str__(self) -> str:
        return f"{self.kind} {self.member_id}"


class Detached(models.Model):
    """A worker that is to be given no more work."""

    worker_id = NameField(max_length=128, primary_key=True)
    at = UnixTimeField()
    actor = NameField(max_length=255, db_default="")
    reason = models.TextField(db_default="")

    def __str__(self) -> str:
        return self.worker_id


class TurnMark(models.Model):
    """The last turn that each writer committed: how it learns, after its connection broke during a commit, what came of it."""

    writer = NameField(max_length=64, primary_key=True)
    turn = models.BigIntegerField()
    at = UnixTimeField()

    def __str__(self) -> str:
        return f"{self.writer}: {self.turn}"


class Audit(models.Model):
    """Who did what to whom may come in."""

    id = RowIdField(primary_key=True)
    at = UnixTimeField()
    actor = NameField(max_length=255)
    action = NameField(max_length=32)
    """token.create, token.revoke"""
    target = NameField(max_length=255)
    detail = models.TextField(db_default="")

    def __str__(self) -> str:
        return f"{self.actor} {self.action} {self.target}"


class Schema(models.Model):
    """One row: which version these tables have, and the oldest code that can work with them."""

    id = models.SmallIntegerField(primary_key=True, db_default=1)
    version = models.IntegerField()
    oldest_code = models.IntegerField()

    def __str__(self) -> str:
        return f"version {self.version}, for code from {self.oldest_code} on"


class Token(models.Model):
    """Who may come in. Never the secret, only its sha256."""

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
    """The only worker that may use it."""

    def __str__(self) -> str:
        return f"{self.token_id} ({self.kind})"
