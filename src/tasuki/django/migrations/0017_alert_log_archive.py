import tasuki.django.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0016_subjectpause'),
    ]

    operations = [
        migrations.AlterField(
            model_name='jobblob',
            name='role',
            field=models.CharField(choices=[('in', 'in'), ('result', 'result'), ('log', 'log')], max_length=6),
        ),
        migrations.CreateModel(
            name='Alert',
            fields=[
                ('id', tasuki.django.fields.RowIdField(primary_key=True, serialize=False)),
                ('key', tasuki.django.fields.NameField(max_length=255, unique=True)),
                ('target', tasuki.django.fields.NameField(max_length=200)),
                ('body', models.JSONField()),
                ('created_at', tasuki.django.fields.UnixTimeField()),
                ('tries', models.IntegerField(db_default=0)),
                ('next_at', tasuki.django.fields.UnixTimeField(null=True)),
                ('problem', models.TextField(db_default='')),
            ],
            options={
                'indexes': [
                    models.Index(fields=['next_at'], condition=models.Q(next_at__isnull=False), name='tasuki_alert_next')
                ],
            },
        ),
    ]
