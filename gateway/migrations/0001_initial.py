"""The first tables of the gateway."""

import django.contrib.postgres.fields
import django.db.models.deletion
from django.db import migrations, models

import wire.ids

# Request records are partitioned by day, which Django cannot express: the table is made here, Django only sees its columns.
# Rows go to the DEFAULT partition until ``gateway.tasks`` has made the partition of their day.
CREATE_REQUEST_RECORDS = """
CREATE TABLE gateway_requestrecord (
    id uuid NOT NULL,
    created_at timestamp with time zone NOT NULL,
    gateway_id uuid NOT NULL,
    tenant varchar(80) NOT NULL,
    key_id uuid NOT NULL,
    key_name varchar(80) NOT NULL,
    endpoint varchar(60) NOT NULL,
    model varchar(200) NOT NULL,
    is_streaming boolean NOT NULL DEFAULT false,
    state varchar(12) NOT NULL,
    error_code varchar(40) NULL,
    status_code smallint NULL CHECK (status_code >= 0),
    node_id uuid NULL,
    node_name varchar(120) NOT NULL DEFAULT '',
    attempts smallint NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    max_tokens integer NULL CHECK (max_tokens >= 0),
    prompt_tokens_est integer NOT NULL DEFAULT 0 CHECK (prompt_tokens_est >= 0),
    prompt_tokens integer NULL CHECK (prompt_tokens >= 0),
    completion_tokens integer NULL CHECK (completion_tokens >= 0),
    tokens_estimated boolean NOT NULL DEFAULT false,
    bytes_out bigint NOT NULL DEFAULT 0,
    queue_ms integer NULL CHECK (queue_ms >= 0),
    ttfb_ms integer NULL CHECK (ttfb_ms >= 0),
    latency_ms integer NULL CHECK (latency_ms >= 0),
    finished_at timestamp with time zone NULL,
    PRIMARY KEY (id, created_at)
) PARTITION BY RANGE (created_at);
CREATE TABLE gateway_requestrecord_default PARTITION OF gateway_requestrecord DEFAULT;
CREATE INDEX gateway_requestrecord_created ON gateway_requestrecord (created_at);
CREATE INDEX gateway_requestrecord_node ON gateway_requestrecord (node_id, created_at);
CREATE INDEX gateway_requestrecord_open_state ON gateway_requestrecord (state)
    WHERE state IN ('queued', 'assigned', 'running');
CREATE INDEX gateway_requestrecord_open_gateway ON gateway_requestrecord (gateway_id)
    WHERE state IN ('queued', 'assigned', 'running');
"""


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="GatewayProcess",
            fields=[
                ("id", models.UUIDField(default=wire.ids.new_uuid7, editable=False, primary_key=True, serialize=False)),
                ("host", models.CharField(max_length=120)),
                ("pid", models.PositiveIntegerField()),
                (
                    "internal_url",
                    models.CharField(blank=True, help_text="Where other gateways reach this one", max_length=300),
                ),
                ("started_at", models.DateTimeField(auto_now_add=True)),
                ("heartbeat_at", models.DateTimeField(db_index=True)),
                ("stopped_at", models.DateTimeField(blank=True, null=True)),
            ],
            options={
                "ordering": ["-started_at"],
                "verbose_name_plural": "gateway processes",
            },
        ),
        migrations.CreateModel(
            name="Model",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=200, unique=True)),
                ("allowed", models.BooleanField(default=False)),
                ("owned_by", models.CharField(default="muster", max_length=80)),
                (
                    "max_tokens",
                    models.PositiveIntegerField(blank=True, help_text="Cap on max_tokens; empty = the setting", null=True),
                ),
                (
                    "max_prompt_chars",
                    models.PositiveIntegerField(
                        blank=True, help_text="Cap on prompt characters; empty = the setting", null=True
                    ),
                ),
                (
                    "max_queue",
                    models.PositiveIntegerField(blank=True, help_text="Queue length; empty = the setting", null=True),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True, db_index=True)),
            ],
            options={
                "ordering": ["name"],
            },
        ),
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name="RequestRecord",
                    fields=[
                        (
                            "id",
                            models.UUIDField(default=wire.ids.new_uuid7, editable=False, primary_key=True, serialize=False),
                        ),
                        ("created_at", models.DateTimeField()),
                        ("gateway_id", models.UUIDField()),
                        ("tenant", models.CharField(max_length=80)),
                        ("key_id", models.UUIDField()),
                        ("key_name", models.CharField(max_length=80)),
                        ("endpoint", models.CharField(max_length=60)),
                        ("model", models.CharField(max_length=200)),
                        ("is_streaming", models.BooleanField(default=False)),
                        (
                            "state",
                            models.CharField(
                                choices=[
                                    ("queued", "queued"),
                                    ("assigned", "assigned"),
                                    ("running", "running"),
                                    ("completed", "completed"),
                                    ("failed", "failed"),
                                    ("interrupted", "interrupted"),
                                    ("rejected", "rejected"),
                                    ("cancelled", "cancelled"),
                                ],
                                max_length=12,
                            ),
                        ),
                        ("error_code", models.CharField(blank=True, max_length=40, null=True)),
                        ("status_code", models.PositiveSmallIntegerField(blank=True, null=True)),
                        ("node_id", models.UUIDField(blank=True, null=True)),
                        ("node_name", models.CharField(blank=True, default="", max_length=120)),
                        ("attempts", models.PositiveSmallIntegerField(default=0)),
                        ("max_tokens", models.PositiveIntegerField(blank=True, null=True)),
                        ("prompt_tokens_est", models.PositiveIntegerField(default=0)),
                        ("prompt_tokens", models.PositiveIntegerField(blank=True, null=True)),
                        ("completion_tokens", models.PositiveIntegerField(blank=True, null=True)),
                        ("tokens_estimated", models.BooleanField(default=False)),
                        ("bytes_out", models.BigIntegerField(default=0)),
                        ("queue_ms", models.PositiveIntegerField(blank=True, null=True)),
                        ("ttfb_ms", models.PositiveIntegerField(blank=True, null=True)),
                        ("latency_ms", models.PositiveIntegerField(blank=True, null=True)),
                        ("finished_at", models.DateTimeField(blank=True, null=True)),
                    ],
                    options={
                        "ordering": ["-created_at"],
                        "verbose_name": "request",
                    },
                ),
            ],
            database_operations=[migrations.RunSQL(sql=CREATE_REQUEST_RECORDS, reverse_sql="DROP TABLE gateway_requestrecord")],
        ),
        migrations.CreateModel(
            name="Tenant",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=80, unique=True)),
                ("is_active", models.BooleanField(default=True)),
                (
                    "requests_per_minute",
                    models.PositiveIntegerField(
                        blank=True, help_text="Default limit of its keys; empty = the setting", null=True
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True, db_index=True)),
            ],
            options={
                "ordering": ["name"],
            },
        ),
        migrations.CreateModel(
            name="ApiKey",
            fields=[
                ("id", models.UUIDField(default=wire.ids.new_uuid7, editable=False, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=80)),
                ("keyid", models.CharField(max_length=12, unique=True)),
                ("digest", models.BinaryField(max_length=32)),
                (
                    "requests_per_minute",
                    models.PositiveIntegerField(blank=True, help_text="Empty = the tenant's, else the setting", null=True),
                ),
                (
                    "allowed_models",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.CharField(max_length=200),
                        blank=True,
                        default=list,
                        help_text="Empty = every allow-listed model",
                        size=None,
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("updated_at", models.DateTimeField(auto_now=True, db_index=True)),
                ("last_used_at", models.DateTimeField(blank=True, null=True)),
                ("expires_at", models.DateTimeField(blank=True, null=True)),
                ("revoked_at", models.DateTimeField(blank=True, null=True)),
                (
                    "tenant",
                    models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name="keys", to="gateway.tenant"),
                ),
            ],
            options={
                "ordering": ["-created_at"],
                "verbose_name": "API key",
            },
        ),
    ]
