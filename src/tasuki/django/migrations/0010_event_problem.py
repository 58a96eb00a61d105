from django.db import migrations, models

import tasuki.django.fields


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0009_ready_by_exec'),
    ]

    operations = [
        migrations.AddField(
            model_name='event',
            name='problem',
            field=models.TextField(blank=True, db_default='', default=''),
        ),
        migrations.AlterField(
            model_name='jobdefinition',
            name='concurrency_policy',
            field=tasuki.django.fields.NameField(blank=True, choices=[('forbid', 'forbid'), ('allow', 'allow'), ('replace', 'replace')], db_default='forbid', default='', max_length=7),
        ),
    ]
