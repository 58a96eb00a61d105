import tasuki.django.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0012_scheduler_settings'),
    ]

    operations = [
        migrations.CreateModel(
            name='CacheFile',
            fields=[
                ('id', tasuki.django.fields.RowIdField(primary_key=True, serialize=False)),
                ('cache_id', tasuki.django.fields.NameField(max_length=64)),
                ('name', tasuki.django.fields.NameField(max_length=1024)),
                ('sha256', tasuki.django.fields.NameField(max_length=64)),
                ('size_bytes', models.BigIntegerField()),
                ('target', tasuki.django.fields.NameField(max_length=255)),
                ('owner', tasuki.django.fields.NameField(max_length=255)),
                ('added_at', tasuki.django.fields.UnixTimeField()),
            ],
            options={
                'indexes': [models.Index(fields=['sha256'], name='tasuki_cache_sha256')],
                'constraints': [models.UniqueConstraint(fields=('cache_id', 'name'), name='tasuki_cache_key')],
            },
        ),
    ]
