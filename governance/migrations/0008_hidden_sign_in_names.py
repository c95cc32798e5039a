from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("governance", "0007_decision_brought_by")]

    operations = [
        # What was typed as a name stood there in clear. A previous release that serves on writes such rows again; the new one
        # reads none of them, and sweeps them after an hour.
        migrations.RunSQL("DELETE FROM governance_signinfailure", migrations.RunSQL.noop),
        migrations.AlterField(
            model_name="signinfailure",
            name="name",
            field=models.CharField(help_text="Keyed digest of what was typed; empty for an address as a whole", max_length=150),
        ),
        migrations.AddField(
            model_name="signinfailure",
            name="signed_in_at",
            field=models.DateTimeField(blank=True, help_text="When the name last signed in well from the address", null=True),
        ),
    ]
