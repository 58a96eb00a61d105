from django.db import migrations, models

from tasuki.django.fields import AddIndexConcurrently, RemoveIndexConcurrently


class Migration(migrations.Migration):

    # Leasing needs this index, and each submit writes to it: the new one is there before the old one goes.
    atomic = False
    dependencies = [
        ('tasuki', '0008_definitions'),
    ]

    operations = [
        AddIndexConcurrently(
            model_name='jobrun',
            index=models.Index(condition=models.Q(('ready', 1)), fields=['-priority', 'group', 'subject', 'kind', 'exec', 'id'], name='tasuki_job_ready_by_exec'),
        ),
        RemoveIndexConcurrently(
            model_name='jobrun',
            name='tasuki_job_ready',
        ),
        migrations.RenameIndex(
            model_name='jobrun',
            old_name='tasuki_job_ready_by_exec',
            new_name='tasuki_job_ready',
        ),
    ]
