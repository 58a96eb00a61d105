from django.db import migrations

import tasuki.django.fields


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0017_alert_log_archive'),
    ]

    # Python's default only: nothing in the database changes.
    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AlterField(
                    model_name='jobdefinition',
                    name='time_zone',
                    field=tasuki.django.fields.NameField(db_default='UTC', default=tasuki.django.fields.project_time_zone, max_length=64),
                ),
            ],
        ),
    ]
