import tasuki.django.fields
from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0003_scopeepoch_taken_over_at'),
    ]

    operations = [
        migrations.AddField(
            model_name='jobrun',
            name='lease_owner',
            field=tasuki.django.fields.NameField(db_default='', max_length=255),
        ),
    ]
