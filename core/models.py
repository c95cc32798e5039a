"""The people of a Muster installation, and the tenants whose members they are."""

from __future__ import annotations

from typing import Any, Self

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.db.models.functions import Now


class User(AbstractUser):
    """A person who signs in to the control plane. The name stays once it is given."""

    _given_name: str | None = None

    checklist_hidden_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="When the person put away the first steps on Overview"
    )

    class Meta(AbstractUser.Meta):
        verbose_name = "operator"
        verbose_name_plural = "operators"

    @classmethod
    def from_db(cls, *args: Any, **options: Any) -> Self:  # Any: Django's own
        """Return a person as the row has it."""
        person = super().from_db(*args, **options)
        person.__dict__["_given_name"] = person.__dict__.get("username")
        return person

    def save(self, **options: Any) -> None:
        """Store the row. Raises ValueError for another name than the one it was loaded with."""
        fields = options.get("update_fields")
        is_written = fields is None or "username" in fields
        # Policies, decisions and the audit trail know people by their names: whoever had another name than the policy has
        # could approve what they asked for themselves.
        if is_written and self._given_name is not None and self.username != self._given_name:
            raise ValueError("the name of a person stays; make a new person and switch this one off")
        super().save(**options)


class Membership(models.Model):
    """A person's role in one tenant. ``tenant``: its name, which stays; tenants are rows of the gateway, above this package."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    tenant = models.CharField(max_length=80)
    role = models.CharField(max_length=20, help_text="tenant-admin or tenant-viewer")
    is_from_issuer = models.BooleanField(db_default=False, help_text="Given and taken by a group of single sign-on")
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering = ["tenant", "user__username"]
        constraints = [models.UniqueConstraint(fields=["user", "tenant"], name="membership_once")]

    def __str__(self) -> str:
        return f"{self.user_id} in {self.tenant}"
