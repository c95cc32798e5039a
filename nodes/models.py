"""Tables of the node registry, and the clock by which their rows are judged. Rows are written by ``nodes.services`` alone."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import BrinIndex
from django.db import connection, models
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from nodes.errors import ApiKeyUnreadable
from wire.contract import NodeMode, NodeStatus
from wire.credentials import derive_cipher
from wire.ids import format_id, new_uuid7


class ProviderState(models.TextChoices):
    """Whether nodes of a provider may connect and receive work."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    DELETED = "deleted"


class Provider(models.Model):
    """A group of nodes that can be switched off together; a worker names it when it connects (``?provider=``)."""

    name = models.SlugField(max_length=60, unique=True)
    state = models.CharField(max_length=10, choices=ProviderState.choices, default=ProviderState.ENABLED)
    max_queue = models.PositiveIntegerField(
        null=True, blank=True, help_text="Requests that may wait for its models; empty = as many as each model lets wait"
    )
    queue_s = models.PositiveIntegerField(null=True, blank=True, help_text="Longest wait for a slot; empty = the setting")
    no_node_s = models.PositiveIntegerField(
        null=True, blank=True, help_text="Longest wait while none of its nodes is there; empty = the setting"
    )
    max_models = models.PositiveIntegerField(
        null=True, blank=True, help_text="Models that one of its nodes may declare; empty = the limit of all nodes"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True, db_index=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class NodeCredential(models.Model):
    """Bearer credential of GPU nodes (``msw_…``): bound to one node, or for the enrolment of up to ``max_nodes``."""

    name = models.CharField(max_length=80)
    keyid = models.CharField(max_length=12, unique=True)
    digest = models.BinaryField(max_length=32, editable=False)
    sealed_text = models.TextField(blank=True, default="", db_default="", editable=False, help_text="Encrypted; verifies JWTs")
    provider = models.ForeignKey(Provider, on_delete=models.PROTECT, related_name="credentials")
    node = models.ForeignKey("nodes.Node", on_delete=models.PROTECT, null=True, blank=True, related_name="bound_credentials")
    variable = models.CharField(
        max_length=60,
        blank=True,
        default="",
        db_default="",
        help_text="The variable that has its text; empty = it was made here",
    )
    max_nodes = models.PositiveIntegerField(default=1, help_text="How many nodes may enrol with it when it is not bound to one")
    allows_models = models.BooleanField(
        default=False, db_default=False, help_text="Clients may use what its nodes declare, unless an operator refused it"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True, db_index=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return self.name


class SetupCode(models.Model):
    """A code that shows a credential once to somebody without an account; see ``nodes.services.enrolment``."""

    digest = models.BinaryField(max_length=32, unique=True, editable=False)
    credential = models.ForeignKey(NodeCredential, on_delete=models.CASCADE, related_name="setup_codes")
    expires_at = models.DateTimeField(db_index=True)
    used_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"for {self.credential_id}"


class Reach(models.TextChoices):
    """How the gateway reaches a node."""

    RELAY = "relay", "dials in"
    DIRECT = "direct", "called over HTTP"


class Node(models.Model):
    """A GPU node. What it is and what operators decided about it; how it does at the moment is ``NodePresence``."""

    id = models.UUIDField(primary_key=True, default=new_uuid7, editable=False)
    name = models.CharField(max_length=120)
    owner_name = models.CharField(max_length=120, blank=True)
    provider = models.ForeignKey(Provider, on_delete=models.PROTECT, related_name="nodes")
    credential = models.ForeignKey(NodeCredential, on_delete=models.PROTECT, null=True, blank=True, related_name="nodes")
    reach = models.CharField(max_length=10, choices=Reach.choices, default=Reach.RELAY)
    public_base_url = models.URLField(max_length=300, blank=True)
    sealed_api_key = models.TextField(
        blank=True, default="", db_default="", editable=False, help_text="What calls of its URL authenticate with, encrypted"
    )
    gpu_name = models.CharField(max_length=200, blank=True)
    vram_total_mb = models.PositiveIntegerField(null=True, blank=True)
    agent_version = models.CharField(max_length=60, blank=True)
    max_concurrent = models.PositiveIntegerField(default=1)
    model_names = ArrayField(models.CharField(max_length=200), default=list, blank=True)
    model_endpoints = models.JSONField(null=True, blank=True, help_text="API paths by model; a model not in it answers any")
    # What operators and the owner decided. These survive reconnects.
    mode = models.CharField(max_length=10, choices=[(m.value, m.value) for m in NodeMode], default=NodeMode.SPARE_ON.value)
    mode_said_at = models.DateTimeField(null=True, blank=True, help_text="When the mode was asked for; an older wish is void")
    cordoned = models.BooleanField(default=False)
    draining = models.BooleanField(default=False)
    drain_deadline_at = models.DateTimeField(null=True, blank=True, help_text="When in-flight work is ended as interrupted")
    drain_reason = models.CharField(max_length=200, blank=True)
    draining_since = models.DateTimeField(null=True, blank=True, help_text="When the drain or reclaim in force began; names it")
    drain_actor = models.CharField(max_length=200, blank=True, default="", db_default="")
    drained_at = models.DateTimeField(null=True, blank=True, help_text="When nothing ran on the node any more")
    drain_interrupted = models.PositiveIntegerField(
        default=0, db_default=0, help_text="Requests that the drain or reclaim interrupted"
    )
    epoch = models.BigIntegerField(default=0, help_text="Rises with each session; older sessions are fenced")
    agent_id = models.CharField(max_length=36, null=True, blank=True, unique=True, help_text="UUID of the agent on it")
    agent_session = models.UUIDField(null=True, blank=True, unique=True, help_text="Its agent's; older ones are fenced")
    agent_session_at = models.DateTimeField(null=True, blank=True)
    instance_id = models.CharField(max_length=64, blank=True)
    former_instances = ArrayField(models.CharField(max_length=64), default=list, db_default=[], blank=True)
    installation = models.CharField(max_length=64, blank=True, default="", db_default="")
    rival_seen_at = models.DateTimeField(null=True, blank=True)
    rival_address = models.CharField(max_length=64, blank=True, default="", db_default="")
    # How the node decides about operations, as it said when it registered. Its key certifies its runner id.
    op_level = models.CharField(max_length=2, blank=True, help_text="L0, L1 or L2; empty = takes no operations from here")
    runner_id = models.CharField(max_length=200, blank=True, db_index=True, help_text="The target that approvers sign")
    box_key = models.CharField(max_length=400, blank=True, help_text="SPKI DER in base64url; signs receipts")
    policy_version = models.PositiveIntegerField(default=0, help_text="The approval policy that the node pinned, 0 = none")
    policy_sha256 = models.CharField(max_length=64, blank=True)
    policy_error = models.CharField(max_length=300, blank=True)
    witness_size = models.BigIntegerField(default=0, help_text="Entries of the last audit checkpoint that the node saw")
    witness_alarm = models.CharField(max_length=300, blank=True)
    clock_skew_ms = models.IntegerField(null=True, blank=True)
    keeps_models = models.BooleanField(default=False, db_default=False, help_text="Its loads take keepLoaded")
    reloads_settings = models.BooleanField(default=False, db_default=False, help_text="It takes settings-reload")
    cluster_address = models.CharField(
        max_length=200, blank=True, default="", db_default="", help_text="Where other nodes of a replica reach it"
    )
    figures = models.JSONField(
        default=dict, db_default={}, blank=True, editable=False, help_text="How each model does on it, by its request records"
    )
    excluded_models = ArrayField(
        models.CharField(max_length=200),
        default=list,
        db_default=[],
        blank=True,
        editable=False,
        help_text="Models that it has loaded and that none of its GPUs can run by the models' documents",
    )
    ticket_url = models.CharField(
        max_length=300, blank=True, default="", db_default="", help_text="Where clients reach it with a ticket"
    )
    ticket_error = models.CharField(
        max_length=300, blank=True, default="", db_default="", help_text="Why no client is sent there; empty = they are"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True, db_index=True)

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["credential", "name"], name="node_name_unique_per_credential")]

    def __str__(self) -> str:
        return self.name

    @property
    def printed_id(self) -> str:
        """The ``node_…`` form shown by every API."""
        return format_id("node", self.id)

    def read_api_key(self) -> str:
        """Return what calls of its URL authenticate with, empty = nothing. Raises ApiKeyUnreadable."""
        if not self.sealed_api_key:
            return ""
        try:
            return _cipher().decrypt(self.sealed_api_key.encode()).decode()
        except InvalidToken:
            raise ApiKeyUnreadable(
                "its API key cannot be decrypted: MUSTER_SECRET_KEY has changed since the key was given. Give the key again",
                param="api_key",
            ) from None


def seal_credential(text: str) -> str:
    """Return a credential as ``NodeCredential.sealed_text`` keeps it."""
    return _credential_cipher().encrypt(text.encode()).decode()


def open_credential(credential: NodeCredential) -> str:
    """Return the text of a credential; empty where it was made before texts were kept, or under another MUSTER_SECRET_KEY."""
    try:
        return _credential_cipher().decrypt(credential.sealed_text.encode()).decode() if credential.sealed_text else ""
    except InvalidToken:
        return ""


def _credential_cipher() -> Fernet:
    return derive_cipher(settings.SECRET_KEY, purpose="muster node credentials")


def seal_api_key(text: str) -> str:
    """Return an API key as ``Node.sealed_api_key`` keeps it."""
    return _cipher().encrypt(text.encode()).decode() if text else ""


def _cipher() -> Fernet:
    return derive_cipher(settings.SECRET_KEY, purpose="muster node API keys")


class NodePresence(models.Model):
    """How a node does now, written in place by its heartbeats (REST) or by the gateway that holds its socket."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="presence")
    connected = models.BooleanField(default=False, help_text="A gateway holds its socket")
    gateway_id = models.UUIDField(null=True, blank=True)
    gateway_links = models.JSONField(
        default=dict, db_default={}, blank=True, help_text="Open links by gateway, in hex; what another link reports is old"
    )
    last_heartbeat_at = models.DateTimeField(null=True, blank=True)  # no index: it changes with every report
    reported_status = models.CharField(max_length=10, default=NodeStatus.OFFLINE.value)
    is_accepting_jobs = models.BooleanField(default=True)
    active_requests = models.PositiveIntegerField(default=0)
    gpu_util_percent = models.FloatField(null=True, blank=True)
    vram_used_mb = models.PositiveIntegerField(null=True, blank=True)
    vram_free_mb = models.PositiveIntegerField(null=True, blank=True)
    spare_score = models.FloatField(null=True, blank=True)
    gpus = models.JSONField(default=list, blank=True)
    replicas = models.JSONField(default=list, blank=True)
    available_models = models.JSONField(null=True, blank=True, help_text="On the node or to be fetched by it, not loaded")
    memory = models.JSONField(null=True, blank=True, help_text="What its models share, in MiB")
    queue_depth = models.PositiveIntegerField(null=True, blank=True, help_text="Requests that wait on the node itself")
    avg_wait_ms = models.PositiveIntegerField(null=True, blank=True)
    last_error = models.CharField(max_length=500, blank=True)
    ejections = models.JSONField(
        default=dict, db_default={}, blank=True, help_text="Models for which a gateway sends it nothing new, by gateway, in hex"
    )
    protocol = models.CharField(max_length=40, blank=True)
    peer_address = models.CharField(max_length=64, blank=True)
    observed_at = models.DateTimeField(null=True, blank=True)
    probed_at = models.DateTimeField(null=True, blank=True, help_text="When its URL was last called to see whether it answers")
    probe_error = models.CharField(max_length=300, blank=True, help_text="Why that failed; empty = it answered")
    capabilities_at = models.DateTimeField(
        null=True, blank=True, help_text="When its GET /v1/capabilities was last read; empty = it never answered that"
    )
    updated_at = models.DateTimeField(default=timezone.now)  # noqa: TID251 - Django writes the name of it into migrations

    def __str__(self) -> str:
        return str(self.node_id)


class Gpu(models.Model):
    """One GPU as its node last named it; what changes all the time is as old as ``last_seen_at``. Memory in MiB.

    The id follows from the node and ``own_id``: a GPU that was forgotten and comes back has the one that it had.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="gpus")
    own_id = models.CharField(max_length=40, help_text="What the node calls it, unique there")
    index = models.PositiveIntegerField()
    vendor = models.CharField(max_length=40, blank=True)
    model = models.CharField(max_length=200, blank=True)
    vram_mb = models.PositiveIntegerField(null=True, blank=True)
    compute_capability = models.CharField(max_length=40, blank=True)
    driver_version = models.CharField(max_length=40, blank=True)
    runtime_version = models.CharField(max_length=40, blank=True)
    group = models.CharField(max_length=40, blank=True, help_text="GPUs that are joined by NVLink or one PCI switch share it")
    max_batch = models.PositiveIntegerField(null=True, blank=True)
    max_context_tokens = models.PositiveIntegerField(null=True, blank=True)
    load_percent = models.FloatField(null=True, blank=True)
    vram_used_mb = models.PositiveIntegerField(null=True, blank=True)
    temperature_c = models.FloatField(null=True, blank=True)
    power_w = models.FloatField(null=True, blank=True)
    active_requests = models.PositiveIntegerField(null=True, blank=True)
    first_seen_at = models.DateTimeField()
    last_seen_at = models.DateTimeField()
    gone_at = models.DateTimeField(null=True, blank=True, help_text="When its node no longer named it")

    class Meta:
        verbose_name = "GPU"
        ordering = ["node__name", "index", "own_id"]
        constraints = [models.UniqueConstraint(fields=["node", "own_id"], name="gpu_once_a_node")]

    def __str__(self) -> str:
        return self.model or self.printed_id

    @property
    def printed_id(self) -> str:
        """The ``gpu_…`` form shown by every API."""
        return format_id("gpu", self.id)

    @property
    def vram_free_mb(self) -> int | None:
        """What of its memory is not used, None = not known."""
        return None if self.vram_mb is None or self.vram_used_mb is None else max(0, self.vram_mb - self.vram_used_mb)


class GpuMoment(models.Model):
    """How a GPU did at ``at``, or in the time that begins then. Rows outlive that of the GPU: they are deleted by age alone."""

    pk = models.CompositePrimaryKey("gpu_id", "at")
    gpu_id = models.UUIDField()
    at = models.DateTimeField()
    load_percent = models.FloatField(null=True)
    vram_used_mb = models.FloatField(null=True)
    temperature_c = models.FloatField(null=True)
    power_w = models.FloatField(null=True)
    active_requests = models.FloatField(null=True)
    weights_mb = models.FloatField(null=True, help_text="Of the memory in use, what models' weights take; empty = not known")
    kv_mb = models.FloatField(null=True, help_text="Of the memory in use, what their KV caches take")

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.gpu_id} at {self.at}"


class GpuSample(GpuMoment):
    """A sample. Rows are written in the order of time, so the smallest of indexes finds those that are to be deleted."""

    class Meta:
        indexes = (BrinIndex(fields=["at"], name="gpu_sample_at"),)


class GpuMinute(GpuMoment):
    """The means of a minute."""

    class Meta:
        indexes = (BrinIndex(fields=["at"], name="gpu_minute_at"),)


class GpuTenMinutes(GpuMoment):
    """The means of ten minutes."""

    class Meta:
        indexes = (BrinIndex(fields=["at"], name="gpu_ten_minutes_at"),)


class RequestFigures(models.Model):
    """How a model did somewhere, counted from request records; older requests weigh less. The service ``figures`` reads it.

    ``ok``, ``failed``: requests, as they weigh at ``counted_at``. ``latency``, ``ttft``, ``rate``: how many fell into which
    bucket, by its number; milliseconds, milliseconds and tokens a second.
    """

    model = models.CharField(max_length=200)
    ok = models.FloatField(default=0.0)
    failed = models.FloatField(default=0.0)
    latency = models.JSONField(default=dict)
    ttft = models.JSONField(default=dict)
    rate = models.JSONField(default=dict)
    latency_ms = models.FloatField(null=True, help_text="Median")
    latency_p95_ms = models.FloatField(null=True)
    ttft_ms = models.FloatField(null=True, help_text="Median")
    tokens_per_s = models.FloatField(null=True, help_text="Median")
    counted_at = models.DateTimeField()

    class Meta:
        abstract = True


class NodeFigures(RequestFigures):
    """How a model did on a node."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="model_figures")

    class Meta:
        verbose_name_plural = "node figures"
        constraints = [models.UniqueConstraint(fields=["node", "model"], name="figures_once_a_model")]

    def __str__(self) -> str:
        return f"{self.model} on {self.node_id}"


class GpuFigures(RequestFigures):
    """How a model did on one of several GPUs of a node, while no other one of them had it."""

    gpu = models.ForeignKey(Gpu, on_delete=models.CASCADE, related_name="model_figures")

    class Meta:
        verbose_name_plural = "GPU figures"
        constraints = [models.UniqueConstraint(fields=["gpu", "model"], name="gpu_figures_once_a_model")]

    def __str__(self) -> str:
        return f"{self.model} on {self.gpu_id}"


class NodeOnline(models.Model):
    """A time without a break in which a node was heard. The last one of a node grows as long as it is heard."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="online")
    began_at = models.DateTimeField()
    ended_at = models.DateTimeField()

    class Meta:
        verbose_name_plural = "nodes online"
        constraints = [models.UniqueConstraint(fields=["node", "began_at"], name="online_once_a_moment")]

    def __str__(self) -> str:
        return f"{self.node_id} from {self.began_at}"


class SweepMark(models.Model):
    """How far a sweep came. Whoever goes on locks its row, so each thing is counted once."""

    name = models.CharField(max_length=20, primary_key=True)
    until = models.DateTimeField()
    last_id = models.UUIDField(null=True)

    def __str__(self) -> str:
        return self.name


class NodeDrainCount(models.Model):
    """What one gateway still runs on a draining node. A row with the node's ``draining_since`` also says that this gateway
    places nothing there any more; a gateway without one has not heard of the drain yet.
    """

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="drain_counts")
    gateway_id = models.UUIDField()
    draining_since = models.DateTimeField()
    active = models.PositiveIntegerField(default=0)
    updated_at = models.DateTimeField(default=timezone.now)  # noqa: TID251 - Django writes the name of it into migrations

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "gateway_id"], name="node_drain_count_once_a_gateway")]

    def __str__(self) -> str:
        return f"{self.active} on {self.node_id}"


class NodeLog(models.Model):
    """The last lines of a node's log, as somebody asked for them last. Deleted soon: the log itself stays on the node."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="log")
    query_id = models.UUIDField(help_text="Names the question; an answer to an older one is dropped")
    asked_at = models.DateTimeField()
    told_at = models.DateTimeField(null=True, blank=True, help_text="When the node, or the gateway for it, answered")
    is_told = models.BooleanField(default=False, help_text="The node tells its log; False = it cannot, or its owner forbids it")
    lines = models.JSONField(default=list)
    left_out = models.PositiveIntegerField(default=0)

    class Meta:
        default_permissions = ("view",)
        verbose_name = "log of a node"
        verbose_name_plural = "logs of nodes"

    def __str__(self) -> str:
        return str(self.node_id)


class Question(NamedTuple):
    """A question of somebody that a node is to answer. ``text``: what is looked for, where something is."""

    query_id: uuid.UUID
    text: str = ""


class HubSearch(models.Model):
    """What a node's hub has under a text, as somebody asked for it last. Deleted soon."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="hub_search")
    query_id = models.UUIDField(help_text="Names the question; an answer to an older one is dropped")
    text = models.CharField(max_length=200)
    asked_at = models.DateTimeField()
    told_at = models.DateTimeField(null=True, blank=True, help_text="When the node, or the gateway for it, answered")
    error = models.CharField(max_length=500, blank=True, default="", db_default="", help_text="Why it found nothing out")
    found = models.JSONField(default=list, db_default=[], help_text="Repositories, as the node names them")

    class Meta:
        default_permissions = ("view",)
        verbose_name = "search of a hub"
        verbose_name_plural = "searches of hubs"

    def __str__(self) -> str:
        return str(self.node_id)


class NodeOpKey(models.Model):
    """An HMAC key that operation tokens for one node are signed with. The node makes and renews it; several may be valid."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="op_keys")
    kid = models.CharField(max_length=64)
    secret = models.BinaryField(max_length=64, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)
    retired_at = models.DateTimeField(null=True, blank=True, help_text="The node no longer named it")

    class Meta:
        ordering = ["-pk"]
        constraints = [models.UniqueConstraint(fields=["node", "kid"], name="nodeopkey_kid")]

    def __str__(self) -> str:
        return self.kid


class TicketKey(models.Model):
    """An Ed25519 key that signs tickets and nothing else. One that was replaced still verifies for ``ticket_overlap_s``."""

    kid = models.CharField(max_length=64, unique=True)
    public = models.BinaryField(max_length=32, editable=False)
    sealed_private = models.TextField(editable=False, help_text="Encrypted")
    created_at = models.DateTimeField()
    retired_at = models.DateTimeField(null=True, blank=True, help_text="When another one took its place")

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return self.kid


class NodeAuthority(models.Model):
    """An internal CA that gives nodes certificates. The newest one whose ``issues_at`` has passed does it."""

    certificate = models.TextField(help_text="PEM")
    sealed_private = models.TextField(blank=True, editable=False, help_text="Encrypted; empty = it gives no more certificates")
    created_at = models.DateTimeField()
    issues_at = models.DateTimeField()
    dropped_at = models.DateTimeField(null=True, blank=True, help_text="When nobody is to trust it any more")

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"node CA of {self.created_at:%Y-%m-%d}"


def read_clock() -> datetime:
    """Return what time it is. What one process writes and another one judges by its age is reckoned from this."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement_timestamp()")
        row = cursor.fetchone()
    now: datetime = row[0]
    return now


def with_clock(nodes: QuerySet[Node]) -> QuerySet[Node]:
    """Have each node come with the time at which it was read, for ``clock_of``."""
    return nodes.annotate(database_now=Now())


def clock_of(row: Node | Gpu) -> datetime:
    """Return what time it was when a row was read ``with_clock``: its age and its status count then."""
    now: datetime = row.database_now  # type: ignore[union-attr]  # the annotation
    return now


def save_changes(row: Node | NodePresence, changes: Mapping[str, object]) -> None:
    """Set these columns of a row, and write them alone."""
    for name, value in changes.items():
        setattr(row, name, value)
    row.save(update_fields=[*changes, "updated_at"])


def presence_of(node: Node) -> NodePresence:
    """Return how a node does, as loaded with it or else read now; a row that nobody wrote where it was never heard."""
    found: NodePresence | None = getattr(node, "presence", None)
    return NodePresence(node_id=node.pk) if found is None else found


def silence_before_s(presence: NodePresence) -> float:
    """Return for how many seconds nothing had been heard of a node when its row was last written."""
    heard_at = presence.last_heartbeat_at
    return (presence.updated_at - heard_at).total_seconds() if heard_at is not None and presence.updated_at is not None else 0.0


def heartbeat_age_s(presence: NodePresence, *, now: datetime) -> float | None:
    """Return the seconds since the last sign of life by the database's clock, or None when there was none."""
    last = presence.last_heartbeat_at
    return None if last is None else max(0.0, (now - last).total_seconds())
