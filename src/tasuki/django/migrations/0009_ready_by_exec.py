from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0008_definitions'),
    ]

    operations = [
        migrations.RemoveIndex(
            model_name='jobrun',
            name='tasuki_job_ready',
        ),
        migrations.AddIndex(
            model_name='jobrun',
            index=models.Index(condition=models.Q(('ready', 1)), fields=['-priority', 'group', 'subject', 'kind', 'exec', 'id'], name='tasuki_job_ready'),
        ),
    ]
