import tasuki.django.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0015_minuterollup'),
    ]

    operations = [
        migrations.CreateModel(
            name='SubjectPause',
            fields=[
                ('id', tasuki.django.fields.RowIdField(primary_key=True, serialize=False)),
                ('pattern', tasuki.django.fields.NameField(max_length=255, unique=True)),
                ('since', tasuki.django.fields.UnixTimeField()),
                ('actor', tasuki.django.fields.NameField(max_length=255)),
                ('reason', models.TextField(db_default='')),
            ],
            options={
                'abstract': False,
            },
        ),
    ]
