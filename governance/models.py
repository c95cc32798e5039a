"""Tables of governance. Rows are written by ``governance.services`` and ``governance.audit`` alone."""

from __future__ import annotations

from django.db import models


class AdminToken(models.Model):
    """Bearer credential for the admin APIs (``msa_…``). Only its SHA-256 is stored."""

    name = models.CharField(max_length=80)
    keyid = models.CharField(max_length=12, unique=True)
    digest = models.BinaryField(max_length=32, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return self.name


class AuditEvent(models.Model):
    """One act of an operator or of the system on the fleet. Never changed, never deleted."""

    at = models.DateTimeField(auto_now_add=True, db_index=True)
    actor = models.CharField(max_length=200, help_text="user:<name>, token:<name>, node:<name> or system:<part>")
    action = models.CharField(max_length=60, help_text="What was done, as <thing>.<verb>", db_index=True)
    target = models.CharField(max_length=200, blank=True)
    detail = models.JSONField(default=dict, blank=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.action} {self.target}"
