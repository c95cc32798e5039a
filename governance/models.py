"""Tables of governance: people and their keys, approvals, notices, and the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from django.conf import settings
from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from core.limits import limits
from governance.states import ApprovalState, RunState, Severity
from wire.ids import format_id, new_uuid7
from wire.optoken.approval import (
    ApprovalError,
    Policy,
    Statement,
    decode_bytes,
    load_public_key,
    policy_words,
    read_canonical,
    read_policy,
    read_statement,
)

# Signed bytes are read several times in one transaction and for each line of a list; what they say never changes.
_read_statement = lru_cache(maxsize=512)(read_statement)
_read_policy = lru_cache(maxsize=32)(read_policy)

# People, their keys, and the ways in


class AdminToken(models.Model):
    """Bearer credential for the admin APIs (``msa_…``). Only its SHA-256 is stored."""

    name = models.CharField(max_length=80)
    keyid = models.CharField(max_length=12, unique=True)
    digest = models.BinaryField(max_length=32, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)
    minted_by = models.OneToOneField(
        "governance.Operation", on_delete=models.PROTECT, null=True, blank=True, related_name="minted_token"
    )
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, null=True, blank=True, related_name="admin_tokens",
        help_text="Whoever proposes with the token proposes as this person, and so cannot approve it"
    )  # fmt: skip
    role = models.CharField(
        max_length=20, blank=True, default="", db_default="", help_text="Empty: older than roles; it may do everything"
    )
    tenant = models.CharField(
        max_length=80, blank=True, default="", db_default="", help_text="The one tenant in which its role counts"
    )
    expires_at = models.DateTimeField(null=True, blank=True)
    variable = models.CharField(
        max_length=60,
        blank=True,
        default="",
        db_default="",
        help_text="The variable that has its text; empty = it was made here",
    )
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return self.name


class ApproverKey(models.Model):
    """A public key of a person: a passkey of a browser, or an Ed25519 key file. Revoked, never deleted.

    It signs in as soon as it is enrolled; it approves once an active policy names it.
    """

    class Kind(models.TextChoices):
        """What holds the private half."""

        WEBAUTHN = "webauthn", "passkey"
        ED25519 = "ed25519", "key file"

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="approver_keys")
    kind = models.CharField(max_length=10, choices=Kind.choices)
    keyid = models.CharField(max_length=300, unique=True, help_text="Credential id in base64url, or the head of the thumbprint")
    public_key = models.CharField(max_length=800, help_text="SPKI DER in base64url")
    thumbprint = models.CharField(max_length=64, unique=True, help_text="SHA-256 of the SPKI DER")
    label = models.CharField(max_length=80)
    transports = models.JSONField(default=list, blank=True)
    sign_count = models.BigIntegerField(default=0)
    is_backup_eligible = models.BooleanField(default=False, help_text="Can be copied to other devices of its owner")
    is_break_glass = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["created_at"]

    def __str__(self) -> str:
        return self.label

    @property
    def is_passkey(self) -> bool:
        """Whether a browser signs with it."""
        return self.kind == self.Kind.WEBAUTHN

    @property
    def is_rsa(self) -> bool:
        """Whether a runner of an earlier release refuses a policy that names it."""
        return isinstance(load_public_key(decode_bytes(self.public_key)), RSAPublicKey)


class Invitation(models.Model):
    """A one-time link with which a person signs in for the first time and enrols a passkey. Only its SHA-256 is stored."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="invitations")
    digest = models.BinaryField(max_length=32, unique=True, editable=False)
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return f"invitation of {self.user}"


class OneTimePassword(models.Model):
    """The shared secret of a person's authenticator app (TOTP, RFC 6238): looks at pages, never approves."""

    user = models.OneToOneField(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="one_time_password")
    secret = models.CharField(max_length=64, editable=False)
    confirmed_at = models.DateTimeField(null=True, blank=True)
    last_step = models.BigIntegerField(default=0, help_text="The last time step that was used: a code works once")

    def __str__(self) -> str:
        return f"authenticator app of {self.user}"


class SignInFailure(models.Model):
    """Failed sign-ins of one name from one address, counted so that guessing is slowed down. Rows are swept."""

    name = models.CharField(max_length=150, help_text="Keyed digest of what was typed; empty for an address as a whole")
    address = models.CharField(max_length=64)
    count = models.PositiveIntegerField(default=0)
    last_at = models.DateTimeField()
    signed_in_at = models.DateTimeField(null=True, blank=True, help_text="When the name last signed in well from the address")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["name", "address"], name="signinfailure_name_address")]

    def __str__(self) -> str:
        return f"{self.name} from {self.address}"


class SeenMark(models.Model):
    """Up to when a person has seen what was decided, changed and failed without them."""

    user = models.OneToOneField(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="seen_mark")
    seen_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.user} until {self.seen_at}"


# Policies, operations, what people said to them, and how they were carried out


class PolicyVersion(models.Model):
    """One version of the approval policy: the very bytes that were signed."""

    class State(models.TextChoices):
        """Where a version stands."""

        DRAFT = "draft"
        ACTIVE = "active"
        SUPERSEDED = "superseded"
        DROPPED = "dropped"

    version = models.PositiveIntegerField()
    document = models.BinaryField(max_length=65536)
    sha256 = models.CharField(max_length=64, unique=True)
    state = models.CharField(max_length=10, choices=State.choices, default=State.DRAFT)
    created_by = models.CharField(max_length=200)
    created_at = models.DateTimeField(auto_now_add=True)
    activated_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-version", "-created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["version"], condition=models.Q(state__in=["active", "superseded"]), name="policyversion_one_a_version"
            ),
            # Exactly one is active.
            models.UniqueConstraint(fields=["state"], condition=models.Q(state="active"), name="policyversion_one_active"),
        ]

    def __str__(self) -> str:
        return f"policy version {self.version}"

    @property
    def words(self) -> str:
        """The fingerprint as twelve words, as every node shows it."""
        return policy_words(self.sha256)

    def read_policy(self) -> Policy:
        """Return what the signed bytes say. Raises ApprovalError when the row was tampered with."""
        return _read_policy(bytes(self.document))


class Operation(models.Model):
    """Something that was asked for: the signed statement and how its approval stands. An edit is another operation."""

    id = models.UUIDField(primary_key=True, default=new_uuid7, editable=False)
    statement = models.BinaryField(max_length=8192)
    digest = models.CharField(max_length=64, unique=True)
    operation = models.CharField(max_length=40, db_index=True)
    op_class = models.CharField(max_length=40)
    policy = models.ForeignKey(PolicyVersion, on_delete=models.PROTECT, related_name="operations")
    requested_by = models.CharField(max_length=200, db_index=True)
    reason = models.CharField(max_length=1000, blank=True, help_text="Only its digest is signed and audited; it may be erased")
    requested_at = models.DateTimeField(db_index=True)
    not_before = models.DateTimeField()
    not_after = models.DateTimeField()
    expires_at = models.DateTimeField(help_text="Until when it waits for approvals")
    max_uses = models.PositiveIntegerField(default=1)
    stops_on_failure = models.BooleanField(default=True)
    state = models.CharField(
        max_length=10, choices=[(s.value, s.value) for s in ApprovalState], default=ApprovalState.PENDING.value, db_index=True
    )
    state_reason = models.CharField(max_length=300, blank=True)
    decided_at = models.DateTimeField(null=True, blank=True)
    dispatched_at = models.DateTimeField(null=True, blank=True, help_text="From then on nothing can be withdrawn")
    warned_percent = models.PositiveSmallIntegerField(default=0)
    idempotency_key = models.CharField(max_length=120, null=True, blank=True)
    adopts = models.OneToOneField(
        PolicyVersion,
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="adopted_by",
        help_text="Of a policy-change",
    )
    reviews = models.ForeignKey(
        "self", on_delete=models.PROTECT, null=True, blank=True, related_name="reviewed_by", help_text="The break-glass use"
    )
    updated_at = models.DateTimeField(auto_now=True, db_index=True)

    class Meta:
        ordering = ["-requested_at"]
        constraints = [
            models.UniqueConstraint(fields=["requested_by", "idempotency_key"], name="operation_idempotency_key"),
        ]

    def __str__(self) -> str:
        return f"{self.operation} {self.id}"

    @property
    def printed_id(self) -> str:
        """The ``op_…`` form, which is also the opId of the statement."""
        return format_id("op", self.id)

    def read_statement(self) -> Statement:
        """Return what the signed bytes say. Raises ApprovalError when the row was tampered with."""
        return _read_statement(bytes(self.statement))


class Decision(models.Model):
    """What one person said to one operation. Withdrawn, never deleted."""

    operation = models.ForeignKey(Operation, on_delete=models.PROTECT, related_name="decisions")
    person = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="decisions")
    person_name = models.CharField(max_length=150)
    is_approval = models.BooleanField()
    key = models.ForeignKey(ApproverKey, on_delete=models.PROTECT, null=True, blank=True, related_name="decisions")
    proof = models.JSONField(null=True, blank=True)
    brought_by = models.CharField(
        max_length=200,
        blank=True,
        db_default="",
        help_text="Who handed the proof in: session:<person> or token:<name>#<key id>",
    )
    comment = models.CharField(max_length=500, blank=True)
    at = models.DateTimeField(auto_now_add=True)
    withdrawn_at = models.DateTimeField(null=True, blank=True)
    void_at = models.DateTimeField(
        null=True, blank=True, help_text="When its key was revoked or its person switched off; the database writes it"
    )

    class Meta:
        ordering = ["at"]
        constraints = [
            models.UniqueConstraint(
                fields=["operation", "person"], condition=models.Q(withdrawn_at=None), name="decision_one_a_person"
            )
        ]

    def __str__(self) -> str:
        return f"{self.person_name}: {'approve' if self.is_approval else 'reject'}"


class OperationRun(models.Model):
    """One carrying out of one operation on one target. Written by compare-and-set alone."""

    id = models.UUIDField(primary_key=True, default=new_uuid7, editable=False)
    operation = models.ForeignKey(Operation, on_delete=models.PROTECT, related_name="runs")
    target = models.CharField(max_length=300)
    use = models.PositiveIntegerField(default=1)
    position = models.PositiveIntegerField(default=0, help_text="In a batch they are carried out in this order, one by one")
    started_by = models.CharField(max_length=200, blank=True)
    state = models.CharField(
        max_length=10, choices=[(s.value, s.value) for s in RunState], default=RunState.QUEUED.value, db_index=True
    )
    fence = models.BigIntegerField(null=True, blank=True, unique=True)
    attempt = models.PositiveIntegerField(default=0)
    stage = models.CharField(max_length=200, blank=True)
    fraction = models.FloatField(null=True, blank=True)
    eta_s = models.FloatField(null=True, blank=True)
    code = models.CharField(max_length=80, blank=True)
    message = models.CharField(max_length=500, blank=True)
    result = models.JSONField(default=dict, blank=True)
    receipt = models.TextField(blank=True)
    receipt_key = models.CharField(max_length=400, blank=True, help_text="Of the node that signed it: SPKI DER in base64url")
    queued_at = models.DateTimeField(auto_now_add=True)
    dispatched_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    due_at = models.DateTimeField(db_index=True, help_text="When a worker looks at it again")
    lease_owner = models.CharField(
        max_length=80, blank=True, help_text="The worker that looked at it last; due_at ends its lease"
    )
    node_id = models.UUIDField(null=True, blank=True, editable=False, help_text="The node that carries it out, if one does")
    token = models.TextField(blank=True, editable=False, db_default="", help_text="What the node verifies; until it has ended")
    token_expires_at = models.DateTimeField(null=True, blank=True, editable=False)
    sent_at = models.DateTimeField(null=True, blank=True, editable=False, help_text="When the node was given this token")
    contact_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="When the node was last sent something about it, or said something"
    )
    gateway_id = models.UUIDField(null=True, blank=True, editable=False, help_text="The gateway that sent it last")
    task_id = models.CharField(
        max_length=80, blank=True, editable=False, db_default="", help_text="Of a node that is called over HTTP"
    )
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["operation", "use", "position"]
        constraints = [models.UniqueConstraint(fields=["operation", "target", "use"], name="operationrun_once")]
        indexes = [
            models.Index(fields=["due_at"], condition=models.Q(ended_at=None), name="operationrun_due"),
            models.Index(fields=["node_id"], condition=models.Q(ended_at=None), name="operationrun_node"),
            models.Index(
                fields=["node_id", "queued_at"], condition=models.Q(node_id__isnull=False), name="operationrun_of_node"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.operation} on {self.target}"

    @property
    def percent(self) -> int | None:
        """How much of it is done; None before it says."""
        return 100 if self.state == RunState.SUCCEEDED else None if self.fraction is None else round(100 * self.fraction)

    @property
    def receipt_members(self) -> Mapping[str, object] | None:
        """What the receipt says, without a look at its signature: for showing. None when there is none that can be read."""
        try:
            members = read_canonical(decode_bytes(self.receipt), limit=limits().governance.receipt_bytes).get("receipt")
        except ApprovalError:
            return None
        return members if isinstance(members, dict) else None


class Freeze(models.Model):
    """Everything stands still: nothing is dispatched until a quorum lifts it."""

    frozen_by = models.CharField(max_length=200)
    reason = models.CharField(max_length=300, blank=True)
    frozen_at = models.DateTimeField(auto_now_add=True)
    lifted_at = models.DateTimeField(null=True, blank=True)
    lifted_by = models.ForeignKey(Operation, on_delete=models.PROTECT, null=True, blank=True, related_name="+")

    class Meta:
        ordering = ["-frozen_at"]
        constraints = [
            # PostgreSQL otherwise takes every NULL for a value of its own: two freezes could be in force.
            models.UniqueConstraint(
                fields=["lifted_at"], condition=models.Q(lifted_at=None), nulls_distinct=False, name="freeze_one"
            )
        ]

    def __str__(self) -> str:
        return f"frozen by {self.frozen_by}"


# Alerts


class Alert(models.Model):
    """One problem from its start to its end. The evaluator alone writes it, but for its silence.

    ``code`` and ``params`` say it: the sentence is made where it is shown, in the language of whoever reads it.
    """

    kind = models.CharField(max_length=40, help_text="What is wrong, as <thing>.<state>")
    object_type = models.CharField(max_length=20, help_text="node, model, replica, gateway, …; installation = the whole of it")
    object_id = models.CharField(max_length=400, blank=True)
    object_name = models.CharField(max_length=400, blank=True)
    severity = models.PositiveSmallIntegerField(choices=[(one.value, one.word) for one in Severity])
    code = models.CharField(max_length=60, help_text="Which sentence says it")
    params = models.JSONField(default=dict, blank=True)
    since = models.DateTimeField(help_text="Since when it is so, as far as is known")
    started_at = models.DateTimeField(help_text="When the evaluator saw it first")
    seen_at = models.DateTimeField(help_text="When the evaluator saw it last")
    missed_at = models.DateTimeField(null=True, blank=True, help_text="Since when the evaluator sees it no more")
    ended_at = models.DateTimeField(null=True, blank=True)
    told_at = models.DateTimeField(null=True, blank=True, help_text="When its start was told; empty = not yet, or silenced")
    end_told_at = models.DateTimeField(null=True, blank=True)
    is_settled = models.BooleanField(default=False, db_default=False, help_text="It has ended, and nothing is left to tell")
    silenced_until = models.DateTimeField(null=True, blank=True)
    silenced_by = models.CharField(max_length=200, blank=True, default="", db_default="")
    silence_reason = models.CharField(max_length=300, blank=True, default="", db_default="")

    class Meta:
        ordering = ["severity", "since", "pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "object_type", "object_id"], condition=models.Q(ended_at=None), name="alert_one_open"
            )
        ]
        indexes = [
            models.Index(fields=["severity", "since"], condition=models.Q(is_settled=False), name="alert_unsettled"),
            models.Index(fields=["-ended_at"], name="alert_by_end"),
        ]

    sentence: str = ""
    """What a page calls it, where there is one."""

    def __str__(self) -> str:
        return self.sentence or f"{self.kind} {self.object_name}".strip()


class AlertSilence(models.Model):
    """Alerts of one kind and object count for nothing and are not told until then, those that begin later included."""

    kind = models.CharField(max_length=40)
    object_type = models.CharField(max_length=20)
    object_id = models.CharField(max_length=400, blank=True)
    object_name = models.CharField(max_length=400, blank=True)
    until = models.DateTimeField(db_index=True)
    by = models.CharField(max_length=200)
    reason = models.CharField(max_length=300)

    class Meta:
        ordering = ["until"]
        constraints = [models.UniqueConstraint(fields=["kind", "object_type", "object_id"], name="alertsilence_once")]

    def __str__(self) -> str:
        return f"{self.kind} {self.object_name}".strip()


class AlertLook(models.Model):
    """When the evaluator last looked; one row."""

    at = models.DateTimeField()

    def __str__(self) -> str:
        return f"looked at {self.at}"


# Messages to people and programs


class WebhookEndpoint(models.Model):
    """Where notices are posted to, signed with its secret (HMAC-SHA256)."""

    class Format(models.TextChoices):
        """What a message looks like when it arrives."""

        GENERIC = "generic", _("Signed JSON")
        SLACK = "slack", "Slack"
        DISCORD = "discord", "Discord"
        TEAMS = "teams", "Microsoft Teams"
        NTFY = "ntfy", "ntfy"

    name = models.CharField(max_length=80, unique=True)
    url = models.URLField(max_length=300)
    secret = models.CharField(max_length=100, editable=False)
    is_active = models.BooleanField(default=True)
    takes_usage = models.BooleanField(
        default=False, db_default=False, help_text="Whether it gets the usage of finished requests instead of notices"
    )
    format = models.CharField(
        max_length=10, choices=Format.choices, default=Format.GENERIC.value, db_default=Format.GENERIC.value
    )
    takes_operations = models.BooleanField(default=True, db_default=True, help_text="Whether it gets notices of operations")
    takes_events = models.BooleanField(default=True, db_default=True, help_text="Whether it gets notices of nodes and budgets")
    takes_alerts = models.BooleanField(default=False, db_default=False, help_text="Whether it gets starts and ends of alerts")
    least_severity = models.PositiveSmallIntegerField(
        choices=[(one.value, one.word) for one in Severity], default=Severity.NOTICE.value, db_default=Severity.NOTICE.value,
        help_text="Alerts that are less urgent are not sent there"
    )  # fmt: skip
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Notice(models.Model):
    """One message to one receiver, kept until delivered or given up. Its link opens a page and approves nothing."""

    id = models.UUIDField(primary_key=True, default=new_uuid7, editable=False)
    operation = models.ForeignKey(Operation, on_delete=models.PROTECT, null=True, blank=True, related_name="notices")
    event = models.CharField(max_length=40)
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, null=True, blank=True, related_name="notices"
    )
    webhook = models.ForeignKey(WebhookEndpoint, on_delete=models.PROTECT, null=True, blank=True, related_name="notices")
    created_at = models.DateTimeField(auto_now_add=True)
    attempt = models.PositiveIntegerField(default=0)
    due_at = models.DateTimeField(db_index=True)
    lease_until = models.DateTimeField(null=True, blank=True)
    sent_at = models.DateTimeField(null=True, blank=True)
    given_up_at = models.DateTimeField(null=True, blank=True)
    last_error = models.CharField(max_length=300, blank=True)

    class Meta:
        ordering = ["created_at"]
        constraints = [
            # A second call for the same event tells nobody twice.
            models.UniqueConstraint(
                fields=["operation", "event", "person"], condition=models.Q(person__isnull=False), name="notice_once_a_person"
            ),
            models.UniqueConstraint(
                fields=["operation", "event", "webhook"],
                condition=models.Q(webhook__isnull=False),
                name="notice_once_a_webhook",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.event} to {self.person or self.webhook}"


# The audit log, and what nodes saw of it. All of it is append-only


class AuditEvent(models.Model):
    """One act of an operator or of the system on the fleet. Never changed, never deleted."""

    at = models.DateTimeField(default=timezone.now, db_index=True)  # noqa: TID251 - Django writes the name of it into migrations
    actor = models.CharField(max_length=200, help_text="user:<name>, token:<name>, node:<name> or system:<part>")
    action = models.CharField(max_length=60, help_text="What was done, as <thing>.<verb>", db_index=True)
    target = models.CharField(max_length=200, blank=True)
    detail = models.JSONField(default=dict, blank=True)
    op_id = models.CharField(max_length=64, blank=True, db_default="", help_text="The operation it belongs to, if any")
    body = models.BinaryField(
        default=b"", editable=False, help_text="The exact bytes that the chain covers; the database writes them"
    )

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["op_id", "id"], condition=~models.Q(op_id=""), name="auditevent_of_operation"),
            models.Index(fields=["target", "id"], name="auditevent_of_target"),
        ]

    def __str__(self) -> str:
        return f"{self.action} {self.target}"


class AuditEntry(models.Model):
    """The place of an event in the hash chain. Written by the database alone, when a transaction commits (migration 0003)."""

    seq = models.BigIntegerField(primary_key=True, help_text="From 1, without gaps")
    event = models.OneToOneField(AuditEvent, models.DO_NOTHING, db_constraint=False, related_name="entry")
    prev_hash = models.BinaryField(max_length=32, unique=True, editable=False)
    hash = models.BinaryField(max_length=32, unique=True, editable=False)

    class Meta:
        ordering = ["-seq"]
        verbose_name_plural = "audit entries"

    def __str__(self) -> str:
        return f"{self.seq} {bytes(self.hash).hex()[:12]}"


class AuditCheckpoint(models.Model):
    """The signed Merkle root over the first ``size`` entries."""

    size = models.BigIntegerField(primary_key=True)
    root = models.BinaryField(max_length=32, editable=False)
    frontier = models.BinaryField(editable=False, help_text="Roots of its complete subtrees, 32 bytes each, largest first")
    note = models.TextField(help_text="C2SP signed note")
    made_at = models.DateTimeField()

    class Meta:
        ordering = ["-size"]

    def __str__(self) -> str:
        return f"checkpoint {self.size}"


class WitnessStatement(models.Model):
    """A checkpoint that a node says it saw, signed by the node. ``alarm`` = it did not agree with the log of that time."""

    node_name = models.CharField(max_length=200)
    size = models.BigIntegerField()
    root = models.BinaryField(max_length=32, editable=False)
    signature = models.BinaryField(max_length=64, editable=False)
    public_key = models.BinaryField(max_length=44, editable=False, help_text="Ed25519, 32 bytes or SubjectPublicKeyInfo")
    note = models.TextField(
        blank=True, db_default="", editable=False, help_text="The checkpoint as the log signed it, which the node shows"
    )
    alarm = models.BooleanField(default=False)
    heard_at = models.DateTimeField()

    class Meta:
        ordering = ["-heard_at"]
        indexes = [models.Index(fields=["size"], name="witness_by_size")]
        constraints = [
            models.UniqueConstraint(fields=["node_name", "public_key", "size", "root", "alarm"], name="witness_once")
        ]

    def __str__(self) -> str:
        return f"{self.node_name} saw {self.size}"
