from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0011_event_problem_index'),
    ]

    operations = [
        migrations.CreateModel(
            name='AdminActionLog',
            fields=[
            ],
            options={
                'proxy': True,
                'indexes': [],
                'constraints': [],
            },
            bases=('tasuki.audit',),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='assign_ahead_seconds',
            field=models.FloatField(db_default=30.0, default=30.0),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='continuation_retry_count',
            field=models.IntegerField(db_default=3, default=3),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='continuation_retry_interval_seconds',
            field=models.FloatField(db_default=0.3, default=0.3),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='grpc_ping_failures',
            field=models.IntegerField(db_default=3, default=3),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='grpc_ping_timeout_seconds',
            field=models.FloatField(db_default=0.3, default=0.3),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='heartbeat_interval_seconds',
            field=models.FloatField(db_default=1.0, default=1.0),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='heartbeat_ttl_seconds',
            field=models.FloatField(db_default=5.0, default=5.0),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='leader_lock_ttl_seconds',
            field=models.FloatField(db_default=5.0, default=5.0),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='leader_stale_seconds',
            field=models.FloatField(db_default=5.0, default=5.0),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='leader_tick_seconds',
            field=models.FloatField(db_default=1.0, default=1.0),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='max_jobs_per_worker',
            field=models.IntegerField(db_default=0, default=0),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='reassign_after_seconds',
            field=models.FloatField(db_default=60.0, default=60.0),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='subleader_check_seconds',
            field=models.FloatField(db_default=1.0, default=1.0),
        ),
        migrations.AddField(
            model_name='schedulersettings',
            name='worker_detach_grace_seconds',
            field=models.FloatField(db_default=5.0, default=5.0),
        ),
    ]
