"""Tables of the gateway. ``gateway.services`` writes keys, tenants and models, ``gateway.request.records`` writes records."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import BrinIndex
from django.db import models
from django.db.models.functions import Cast, Right

from gateway.values import Dimension, Priority
from wire.contract import RequestState
from wire.ids import format_id, new_uuid7
from wire.limits import WIRE

TAIL_CHARS = 12
"""The end of a request's id, hexadecimal digits, by which people name it; what stands before it is mostly the time."""


class Tenant(models.Model):
    """Who the work is for. Keys belong to one tenant."""

    name = models.CharField(max_length=80, unique=True)
    is_active = models.BooleanField(default=True)
    requests_per_minute = models.PositiveIntegerField(
        null=True, blank=True, help_text="Default limit of its keys; empty = the setting"
    )
    stores_responses = models.BooleanField(
        default=False, db_default=False, help_text="Whether answers of /v1/responses may be kept, prompts included"
    )
    responses_kept_days = models.PositiveIntegerField(
        default=30, db_default=30, help_text="How many days a kept answer can be asked for again"
    )
    budgets = models.JSONField(
        default=list, db_default=[], blank=True, help_text="What all its keys may use together: [{kind, amount, is_hard}]"
    )
    weight = models.PositiveIntegerField(
        default=100, db_default=100, help_text="Its part of the slots while requests wait; 100 = as much as other tenants"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True, db_index=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class ApiKey(models.Model):
    """A client key (``mst_…``). Shown once, stored as SHA-256, revoked but never deleted."""

    id = models.UUIDField(primary_key=True, default=new_uuid7, editable=False)
    name = models.CharField(max_length=80)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="keys")
    keyid = models.CharField(max_length=12, unique=True)
    digest = models.BinaryField(max_length=32, editable=False)
    requests_per_minute = models.PositiveIntegerField(null=True, blank=True, help_text="Empty = the tenant's, else the setting")
    allowed_models = ArrayField(
        models.CharField(max_length=200), default=list, blank=True, help_text="Empty = every allow-listed model"
    )
    priority = models.CharField(
        max_length=10,
        choices=[(p.value, p.value) for p in Priority],
        default=Priority.NORMAL.value,
        db_default=Priority.NORMAL.value,
        help_text="How a node orders what waits on it",
    )
    budgets = models.JSONField(default=list, db_default=[], blank=True, help_text="What it may use: [{kind, amount, is_hard}]")
    variable = models.CharField(
        max_length=60,
        blank=True,
        default="",
        db_default="",
        help_text="The variable by which requests without a key are its own",
    )
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True, db_index=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = "API key"
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return self.name

    @property
    def prefix(self) -> str:
        """The public head of the key, for recognising it in a list."""
        return f"mst_{self.keyid}"


class Model(models.Model):
    """A model name and whether clients may use it. A row that is not allowed is "known": nodes have declared it."""

    name = models.CharField(max_length=200, unique=True)
    allowed = models.BooleanField(default=False)
    refused = models.BooleanField(
        default=False, db_default=False, help_text="An operator took it back: no credential allows it by itself"
    )
    owned_by = models.CharField(max_length=80, default="muster")
    max_tokens = models.PositiveIntegerField(null=True, blank=True, help_text="Cap on max_tokens; empty = the setting")
    max_prompt_chars = models.PositiveIntegerField(
        null=True, blank=True, help_text="Cap on prompt characters; empty = the setting"
    )
    max_queue = models.PositiveIntegerField(null=True, blank=True, help_text="Queue length; empty = the setting")
    fallbacks = ArrayField(
        models.CharField(max_length=200),
        default=list,
        db_default=[],
        blank=True,
        help_text="Models that answer instead, in this order, while this one has no node or cannot answer in time",
    )
    context_tokens = models.PositiveIntegerField(
        null=True, blank=True, help_text="Context window shown to clients; empty = what its nodes say"
    )
    tokenizer = models.CharField(
        max_length=200,
        blank=True,
        default="",
        db_default="",
        help_text="Folder below MUSTER_TOKENIZERS_DIR, with a tokenizer.json",
    )
    canary_question = models.CharField(
        max_length=500,
        blank=True,
        default="",
        db_default="",
        help_text="What its nodes are asked now and then; empty = nothing",
    )
    canary_answer = models.CharField(
        max_length=200, blank=True, default="", db_default="", help_text="What the answer to the canary question contains"
    )
    requirements = models.JSONField(
        null=True,
        blank=True,
        help_text="What a GPU must have to run it, as services.compatibility reads it; empty = what is measured",
    )
    tidy = models.BooleanField(
        default=False, db_default=False, help_text="Put chunks of its chat streams right for strict clients"
    )
    resumes = models.BooleanField(
        default=False, db_default=False, help_text="Have another node go on with a stream whose node dies"
    )
    score_weights = models.JSONField(
        default=dict, db_default={}, blank=True, help_text="Weights of its nodes' scores that differ from the settings"
    )
    input_price = models.DecimalField(
        max_digits=14, decimal_places=6, default=0, db_default=0, help_text="Of a million prompt tokens, in MUSTER_CURRENCY"
    )
    cached_price = models.DecimalField(
        max_digits=14,
        decimal_places=6,
        default=0,
        db_default=0,
        help_text="Of a million prompt tokens that the node had cached",
    )
    output_price = models.DecimalField(
        max_digits=14, decimal_places=6, default=0, db_default=0, help_text="Of a million generated tokens"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True, db_index=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class ModelAlias(models.Model):
    """Another name for models, for everybody or for one tenant (whose own alias wins). ``targets``: [{model, weight}]."""

    name = models.CharField(max_length=200)
    tenant = models.ForeignKey(Tenant, null=True, blank=True, on_delete=models.PROTECT, related_name="aliases")
    targets = models.JSONField(default=list)
    is_active = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True, db_index=True)

    class Meta:
        verbose_name_plural = "model aliases"
        ordering = ["name", "tenant_id"]
        constraints = [
            models.UniqueConstraint(fields=["name", "tenant"], nulls_distinct=False, name="gateway_alias_once"),
        ]

    def __str__(self) -> str:
        return self.name if self.tenant is None else f"{self.name} of {self.tenant.name}"


class StoredResponse(models.Model):
    """An answer of ``/v1/responses`` that its tenant lets us keep, with the input it answered, until ``expires_at``.

    ``body`` is the response object as it was sent, ``input_items`` a JSON array; both as bytes, because ``jsonb`` refuses
    escaped NUL characters, which the output of a tool may hold. A conversation is the chain of ``previous_id``.
    """

    id = models.CharField(primary_key=True, max_length=80)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="responses")
    key_id = models.UUIDField()
    model = models.CharField(max_length=200)
    previous_id = models.CharField(max_length=80, blank=True, default="")
    input_items = models.BinaryField()
    body = models.BinaryField()
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField(db_index=True)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return self.id


class GatewayProcess(models.Model):
    """A gateway process and its heartbeat. Requests of a dead one are closed by the reconciler."""

    id = models.UUIDField(primary_key=True, default=new_uuid7, editable=False)
    host = models.CharField(max_length=120)
    pid = models.PositiveIntegerField()
    internal_url = models.CharField(max_length=300, blank=True, help_text="Where other gateways reach this one")
    release = models.CharField(max_length=40, blank=True, default="", db_default="", help_text="Version of Muster that it runs")
    started_at = models.DateTimeField(auto_now_add=True)
    heartbeat_at = models.DateTimeField(db_index=True)
    stopped_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name_plural = "gateway processes"
        ordering = ["-started_at"]

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class RequestRecord(models.Model):
    """One client request, from acceptance to exactly one final state. Never holds a body.

    Stored in a table partitioned by day on ``created_at``; ``id`` alone is unique because it is a UUIDv7.
    """

    id = models.UUIDField(primary_key=True, default=new_uuid7, editable=False)
    created_at = models.DateTimeField()
    gateway_id = models.UUIDField()
    tenant = models.CharField(max_length=80)
    key_id = models.UUIDField()
    key_name = models.CharField(max_length=80)
    endpoint = models.CharField(max_length=60)
    model = models.CharField(max_length=200)
    asked_model = models.CharField(
        max_length=200,
        blank=True,
        default="",
        db_default="",
        help_text="The name the client used, if another",
    )
    is_streaming = models.BooleanField(default=False)
    state = models.CharField(max_length=12, choices=[(s.value, s.value) for s in RequestState])
    error_code = models.CharField(max_length=40, null=True, blank=True)
    status_code = models.PositiveSmallIntegerField(null=True, blank=True)
    engine_error = models.CharField(
        max_length=WIRE.error_quote_chars,
        blank=True,
        default="",
        db_default="",
        help_text="What the engine said when it failed or refused, without what it repeated of the request",
    )
    node_id = models.UUIDField(null=True, blank=True)
    node_name = models.CharField(max_length=120, blank=True, default="")
    attempts = models.PositiveSmallIntegerField(default=0)
    lost_attempts = models.TextField(
        blank=True, default="", db_default="", editable=False, help_text="Nodes that failed before another one got the request"
    )
    max_tokens = models.PositiveIntegerField(null=True, blank=True)
    prompt_tokens_est = models.PositiveIntegerField(default=0)
    prompt_tokens = models.PositiveIntegerField(null=True, blank=True)
    completion_tokens = models.PositiveIntegerField(null=True, blank=True)
    cached_tokens = models.PositiveIntegerField(null=True, blank=True, help_text="Of the prompt, what the node had cached")
    tokens_estimated = models.BooleanField(default=False)
    bytes_out = models.BigIntegerField(default=0)
    queue_ms = models.PositiveIntegerField(null=True, blank=True)
    ttfb_ms = models.PositiveIntegerField(null=True, blank=True)
    latency_ms = models.PositiveIntegerField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    reserved_tokens = models.BigIntegerField(null=True, blank=True, help_text="What it might use of the budgets of its caller")
    reserved_micros = models.BigIntegerField(null=True, blank=True, help_text="The same in millionths of the currency")
    decision = models.JSONField(
        null=True, blank=True, help_text="Why it went to its node, where it had a choice (gateway.values.Decided)"
    )

    class Meta:
        verbose_name = "request"
        ordering = ["-created_at"]
        indexes = [
            # What lists show of an id. Of finished requests alone: an open one would be indexed again with each change.
            models.Index(
                Right(Cast("id", models.TextField()), TAIL_CHARS),
                condition=models.Q(finished_at__isnull=False),
                name="gateway_requestrecord_tail",
            ),
            models.Index(
                fields=["created_at"],
                condition=models.Q(state__in=["cancelled", "failed", "interrupted", "rejected"]),
                name="gateway_requestrecord_unserved",
            ),
        ]

    def __str__(self) -> str:
        return self.printed_id

    @property
    def printed_id(self) -> str:
        """The ``req_…`` form shown by every API and sent as ``x-request-id``."""
        return format_id("req", self.id)


class UsageEvent(models.Model):
    """What one finished request used; written with its final state, and never changed. A rejected one used nothing.

    ``event_id`` is the id of the request. Budgets count ``tokens`` and ``cost_micros`` in the day and month of ``created_at``,
    when the request came. ``seq`` and the column ``written_in`` (the transaction), which is the database's alone, give events
    the order in which webhooks get them. Each request writes an event, so there is an index for that and no other row by row:
    sums read the days that they are of.
    """

    seq = models.BigAutoField(primary_key=True)
    event_id = models.UUIDField(editable=False)
    created_at = models.DateTimeField()
    finished_at = models.DateTimeField()
    gateway_id = models.UUIDField()
    tenant = models.CharField(max_length=80)
    key_id = models.UUIDField()
    key_name = models.CharField(max_length=80)
    model = models.CharField(max_length=200)
    state = models.CharField(max_length=12)
    prompt_tokens = models.BigIntegerField(default=0)
    completion_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0, db_default=0, help_text="Of the prompt, what the node had cached")
    tokens = models.BigIntegerField(default=0, help_text="What budgets count: both, or what was reserved")
    cost_micros = models.BigIntegerField(default=0, help_text="Millionths of the currency")
    is_estimated = models.BooleanField(default=False, help_text="Whether the engine did not count")
    node_id = models.UUIDField(null=True)
    status_code = models.PositiveSmallIntegerField(null=True)
    queue_ms = models.PositiveIntegerField(null=True)
    ttft_ms = models.PositiveIntegerField(null=True, help_text="Until the first byte of a stream")
    latency_ms = models.PositiveIntegerField(null=True)

    class Meta:
        ordering = ["-created_at"]
        indexes = [BrinIndex(fields=["created_at"], name="gateway_usageevent_created", autosummarize=True)]

    def __str__(self) -> str:
        return format_id("req", self.event_id)


class BudgetShares(models.Model):
    """What gateways hold of a counter in a term in which PostgreSQL deals out budgets (``gateway.services.shares``).

    ``name``: of the counter, empty for the row of the term itself. Those of the last term stay until the next one begins.
    """

    name = models.CharField(primary_key=True, max_length=400)
    state = models.JSONField()

    class Meta:
        verbose_name_plural = "budget shares"

    def __str__(self) -> str:
        return self.name


class UsageDelivery(models.Model):
    """How far a webhook got the usage events, in their order. ``webhook_id``: of governance's table, 0 for the rollups."""

    webhook_id = models.BigIntegerField(primary_key=True)
    written_in = models.DecimalField(max_digits=20, decimal_places=0, default=0, help_text="Transaction of the last event")
    seq = models.BigIntegerField(default=0, help_text="Number of the last event")
    attempt = models.PositiveIntegerField(default=0, help_text="Tries since the last batch that got through")
    due_at = models.DateTimeField()
    last_error = models.CharField(max_length=200, blank=True, default="")

    class Meta:
        verbose_name_plural = "usage deliveries"

    def __str__(self) -> str:
        return str(self.webhook_id)


class RequestSums(models.Model):
    """What requests that ended in the time that begins at ``at`` came to: all of them, or those of one ``name``.

    ``gateway.services.rollups`` writes and reads them, and says what the name of a ``dimension`` is. ``latency``, ``ttft``,
    ``token_time`` and ``queue_time`` are quantile sketches of milliseconds: an element holds the number of a bucket in its
    ten lowest bits, and above them how many fell into it. ``node_ms``: how long nodes worked on them, without the queue.
    ``queued_most`` and ``running_most``: most that was seen at once.
    """

    pk = models.CompositePrimaryKey("dimension", "at", "name")
    dimension = models.PositiveSmallIntegerField(choices=[(one.value, one.name.lower()) for one in Dimension])
    at = models.DateTimeField()
    name = models.CharField(max_length=300, blank=True, db_collation="C")
    served = models.BigIntegerField(default=0)
    refused = models.BigIntegerField(default=0)
    failed = models.BigIntegerField(default=0)
    cancelled = models.BigIntegerField(default=0)
    prompt_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0, db_default=0)
    completion_tokens = models.BigIntegerField(default=0)
    cost_micros = models.BigIntegerField(default=0)
    node_ms = models.BigIntegerField(default=0, db_default=0)
    latency = ArrayField(models.BigIntegerField(), default=list)
    ttft = ArrayField(models.BigIntegerField(), default=list)
    token_time = ArrayField(models.BigIntegerField(), default=list)
    queue_time = ArrayField(models.BigIntegerField(), default=list)
    queued_most = models.PositiveIntegerField(default=0)
    running_most = models.PositiveIntegerField(default=0)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.name or 'all'} at {self.at}"


class RequestMinute(RequestSums):
    """Requests that ended within a minute."""


class RequestTenMinutes(RequestSums):
    """Requests that ended within ten minutes."""


class RequestHour(RequestSums):
    """Requests that ended within an hour."""


class RequestDay(RequestSums):
    """Requests that ended within a UTC day."""
