"""Messages to people and programs about operations."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from governance.models.approvals import Operation
from wire.ids import new_uuid7


class WebhookEndpoint(models.Model):
    """Where notices are posted to, signed with its secret (HMAC-SHA256)."""

    name = models.CharField(max_length=80, unique=True)
    url = models.URLField(max_length=300)
    secret = models.CharField(max_length=100, editable=False)
    is_active = models.BooleanField(default=True)
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
