from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("governance", "0004_approvals")]

    operations = [
        migrations.AddField(
            model_name="witnessstatement",
            name="note",
            field=models.TextField(
                blank=True, db_default="", editable=False, help_text="The checkpoint as the log signed it, which the box shows"
            ),
        ),
    ]
