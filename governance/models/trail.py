"""The audit trail: what was done, its chain, its checkpoints, and what boxes saw of it. All of it append-only."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


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
        indexes = [models.Index(fields=["op_id", "id"], condition=~models.Q(op_id=""), name="auditevent_of_operation")]

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
    """A checkpoint that a box says it saw, signed by the box. ``alarm`` = it did not agree with the log of that time."""

    node_name = models.CharField(max_length=200)
    size = models.BigIntegerField()
    root = models.BinaryField(max_length=32, editable=False)
    signature = models.BinaryField(max_length=64, editable=False)
    public_key = models.BinaryField(max_length=44, editable=False, help_text="Ed25519, 32 bytes or SubjectPublicKeyInfo")
    note = models.TextField(
        blank=True, db_default="", editable=False, help_text="The checkpoint as the log signed it, which the box shows"
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
