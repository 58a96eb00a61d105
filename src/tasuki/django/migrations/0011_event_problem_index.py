from django.db import migrations, models

from tasuki.django.fields import AddIndexConcurrently


class Migration(migrations.Migration):

    atomic = False
    dependencies = [
        ('tasuki', '0010_event_problem'),
    ]

    operations = [
        AddIndexConcurrently(
            model_name='event',
            index=models.Index(condition=models.Q(('problem', ''), _negated=True), fields=['id'], name='tasuki_event_problem'),
        ),
    ]
