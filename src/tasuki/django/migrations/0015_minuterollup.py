import tasuki.django.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0014_enqueue_function'),
    ]

    operations = [
        migrations.CreateModel(
            name='MinuteRollup',
            fields=[
                ('id', tasuki.django.fields.RowIdField(primary_key=True, serialize=False)),
                ('minute', models.BigIntegerField()),
                ('server_id', tasuki.django.fields.NameField(max_length=255)),
                ('data', models.BinaryField()),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('minute', 'server_id'), name='tasuki_rollup_key')],
            },
        ),
    ]
