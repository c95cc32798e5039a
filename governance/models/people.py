"""People's keys and the ways in: passkeys, invitations, authenticator apps, failed sign-ins, and admin tokens."""

from __future__ import annotations

from django.conf import settings
from django.db import models


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
