from django.db import migrations

import tasuki.django.fields


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0004_jobrun_lease_owner'),
    ]

    operations = [
        migrations.AddField(
            model_name='token',
            name='incarnation',
            field=tasuki.django.fields.NameField(db_default='', max_length=64),
        ),
    ]
