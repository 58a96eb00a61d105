from django.db import migrations

import tasuki.django.fields


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0001_initial'),
    ]

    operations = [
        migrations.AddField(
            model_name='token',
            name='worker_id',
            field=tasuki.django.fields.NameField(db_default='', max_length=64),
        ),
    ]
