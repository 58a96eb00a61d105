import django.db.models.deletion
import tasuki.django.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='ScopeEpoch',
            fields=[
                ('scope', models.CharField(max_length=64, primary_key=True, serialize=False)),
                ('epoch', models.BigIntegerField()),
                ('holder', models.CharField(max_length=255)),
            ],
        ),
        migrations.CreateModel(
            name='Token',
            fields=[
                ('id', tasuki.django.fields.RowIdField(primary_key=True, serialize=False)),
                ('token_id', models.CharField(max_length=64, unique=True)),
                ('kind', models.CharField(max_length=10)),
                ('sha256', models.CharField(max_length=64, unique=True)),
                ('label', models.CharField(db_default='', max_length=255)),
                ('scope', models.JSONField(default=list)),
                ('created_at', tasuki.django.fields.UnixTimeField(db_default=0.0)),
                ('created_by', models.CharField(db_default='', max_length=255)),
                ('expires_at', tasuki.django.fields.UnixTimeField(null=True)),
                ('revoked_at', tasuki.django.fields.UnixTimeField(null=True)),
                ('revoked_by', models.CharField(db_default='', max_length=255)),
            ],
        ),
        migrations.CreateModel(
            name='Counter',
            fields=[
                ('id', tasuki.django.fields.RowIdField(primary_key=True, serialize=False)),
                ('group', models.CharField(max_length=255)),
                ('state', models.CharField(max_length=12)),
                ('n', models.BigIntegerField()),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('group', 'state'), name='tasuki_counter_key')],
            },
        ),
        migrations.CreateModel(
            name='JobRun',
            fields=[
                ('id', tasuki.django.fields.RowIdField(primary_key=True, serialize=False)),
                ('idempotency_key', models.CharField(max_length=128, unique=True)),
                ('state', models.CharField(choices=[('PENDING', 'PENDING'), ('ASSIGNED', 'ASSIGNED'), ('RUNNING', 'RUNNING'), ('SUCCEEDED', 'SUCCEEDED'), ('FAILED', 'FAILED'), ('CANCELED', 'CANCELED'), ('TIMED_OUT', 'TIMED_OUT'), ('ORPHANED', 'ORPHANED'), ('SKIPPED', 'SKIPPED')], db_default='PENDING', max_length=12)),
                ('ready', models.SmallIntegerField(db_default=1)),
                ('priority', models.SmallIntegerField(db_default=5)),
                ('group', models.CharField(max_length=255)),
                ('subject', models.CharField(max_length=255)),
                ('attempt', models.IntegerField(db_default=0)),
                ('version', models.IntegerField(db_default=0)),
                ('lease_id', models.CharField(db_default='', max_length=64)),
                ('assigned_worker_id', models.CharField(max_length=128, null=True)),
                ('incarnation', models.CharField(db_default='', max_length=64)),
                ('lease_expires_at', tasuki.django.fields.UnixTimeField(null=True)),
                ('lease_expired_at', tasuki.django.fields.UnixTimeField(null=True)),
                ('lease_ttl_s', models.FloatField(db_default=15.0)),
                ('on_disconnect', models.CharField(db_default='stop', max_length=4)),
                ('reconnect_grace_s', models.FloatField(db_default=0.0)),
                ('cancel_requested', models.SmallIntegerField(db_default=0)),
                ('assigned_at', tasuki.django.fields.UnixTimeField(null=True)),
                ('started_at', tasuki.django.fields.UnixTimeField(null=True)),
                ('finished_at', tasuki.django.fields.UnixTimeField(null=True)),
                ('exit_code', models.IntegerField(null=True)),
                ('error_code', models.CharField(max_length=64, null=True)),
                ('error_summary', models.TextField(db_default='')),
                ('permanent', models.SmallIntegerField(db_default=0)),
                ('result', models.BinaryField(null=True)),
                ('result_sha256', models.CharField(max_length=64, null=True)),
                ('result_size_bytes', models.BigIntegerField(null=True)),
                ('meta', models.BinaryField(null=True)),
                ('replaced_report', models.BinaryField(null=True)),
                ('log_ref', models.CharField(db_default='', max_length=1024)),
                ('not_before', tasuki.django.fields.UnixTimeField(null=True)),
                ('generation', models.IntegerField(db_default=0)),
                ('failures', models.IntegerField(db_default=0)),
                ('losses', models.IntegerField(db_default=0)),
                ('max_retries', models.IntegerField(db_default=3)),
                ('max_losses', models.IntegerField(db_default=3)),
                ('backoff_s', models.FloatField(db_default=10.0)),
                ('created_at', tasuki.django.fields.UnixTimeField()),
                ('submitter', models.CharField(max_length=255)),
                ('exec', models.CharField(db_default='', max_length=64)),
                ('array_id', models.CharField(max_length=128, null=True)),
                ('job_definition_id', models.BigIntegerField(null=True)),
                ('scheduled_for', tasuki.django.fields.UnixTimeField(null=True)),
                ('leader_epoch', models.BigIntegerField(db_default=0)),
                ('continuation_state', models.CharField(choices=[('NONE', 'NONE'), ('CONFIRMING', 'CONFIRMING')], db_default='NONE', max_length=10)),
                ('continuation_check_started_at', tasuki.django.fields.UnixTimeField(null=True)),
                ('continuation_check_deadline_at', tasuki.django.fields.UnixTimeField(null=True)),
                ('body_hash', models.BinaryField()),
                ('spec', models.BinaryField()),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('ready', 1)), fields=['-priority', 'group', 'subject', 'id'], name='tasuki_job_ready'), models.Index(condition=models.Q(('lease_expires_at__isnull', False)), fields=['lease_expires_at'], name='tasuki_job_leased'), models.Index(condition=models.Q(('ready', 2)), fields=['not_before'], name='tasuki_job_delayed'), models.Index(condition=models.Q(('error_code__isnull', False)), fields=['id'], name='tasuki_job_failed'), models.Index(condition=models.Q(('array_id__isnull', False)), fields=['array_id', 'id'], name='tasuki_job_array')],
            },
        ),
        migrations.CreateModel(
            name='Incident',
            fields=[
                ('id', tasuki.django.fields.RowIdField(primary_key=True, serialize=False)),
                ('at', tasuki.django.fields.UnixTimeField()),
                ('kind', models.CharField(max_length=20)),
                ('attempt', models.IntegerField(db_default=0)),
                ('worker_id', models.CharField(db_default='', max_length=128)),
                ('actor', models.CharField(db_default='', max_length=255)),
                ('reason', models.TextField(db_default='')),
                ('job', models.ForeignKey(db_constraint=False, on_delete=django.db.models.deletion.CASCADE, related_name='incidents', to='tasuki.jobrun')),
            ],
        ),
        migrations.CreateModel(
            name='JobBlob',
            fields=[
                ('id', tasuki.django.fields.RowIdField(primary_key=True, serialize=False)),
                ('sha256', models.CharField(max_length=64)),
                ('role', models.CharField(choices=[('in', 'in'), ('result', 'result')], max_length=6)),
                ('job', models.ForeignKey(db_constraint=False, on_delete=django.db.models.deletion.CASCADE, related_name='blobs', to='tasuki.jobrun')),
            ],
            options={
                'indexes': [models.Index(fields=['sha256'], name='tasuki_blob_sha256')],
            },
        ),
    ]
