from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0002_token_worker_id'),
    ]

    operations = [
        migrations.AddField(
            model_name='scopeepoch',
            name='taken_over_at',
            field=models.FloatField(null=True),
        ),
    ]
