from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0015_minuterollup'),
    ]

    operations = [
        migrations.AlterField(
            model_name='jobblob',
            name='role',
            field=models.CharField(choices=[('in', 'in'), ('result', 'result'), ('log', 'log')], max_length=6),
        ),
    ]
