"""The public keys of people: passkeys and Ed25519 key files. Enrolled, listed, revoked; never changed, never deleted.

A key signs in, or says who somebody is, from the moment it is enrolled. What it approves is for the policy to say.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from core.limits import limits
from governance.audit import record_event
from governance.errors import InvalidName, InvalidProposal, NotFound, NotPermitted
from governance.models import ApproverKey
from governance.operations.approvals import active_policy
from wire import COMMAND, clock
from wire.optoken.approval import MAX_KEYS_EACH, ApprovalError, decode_bytes, encode_bytes, load_public_key

if TYPE_CHECKING:
    from core.models import User
    from governance.passkeys import NewPasskey  # only pages need the library behind it

LINE_WORD = "ed25519"
Kind = ApproverKey.Kind


def list_keys(user: User) -> list[ApproverKey]:
    """Return the person's keys, those in use first, then by age."""
    rows = ApproverKey.objects.filter(user_id=user.pk).order_by("created_at")
    return sorted(rows, key=lambda row: row.revoked_at is not None)


def list_approving() -> frozenset[str]:
    """Return the thumbprints of the keys that the active policy names, which approve."""
    found = active_policy()
    return frozenset() if found is None else frozenset(key.thumbprint for key in found[1].keys.values())


def list_passkey_ids(user: User) -> list[str]:
    """Return the credential ids of the person's passkeys in use."""
    rows = ApproverKey.objects.filter(user_id=user.pk, kind=Kind.WEBAUTHN, revoked_at__isnull=True)
    return list(rows.values_list("keyid", flat=True))


def has_passkeys() -> bool:
    """Return whether anybody can sign in by a passkey."""
    return ApproverKey.objects.filter(kind=Kind.WEBAUTHN, revoked_at__isnull=True).exists()


def find_passkey(keyid: str) -> ApproverKey | None:
    rows = ApproverKey.objects.select_related("user").filter(kind=Kind.WEBAUTHN, revoked_at__isnull=True)
    return rows.filter(keyid=keyid).first() if keyid else None


def note_use(key: ApproverKey, *, sign_count: int) -> None:
    ApproverKey.objects.filter(pk=key.pk).update(last_used_at=clock.now(), sign_count=sign_count)


@transaction.atomic
def enrol_passkey(*, user: User, passkey: NewPasskey, label: str, actor: str) -> ApproverKey:
    """Keep a passkey that was just made. Raises NotPermitted for one too many or one that is known, InvalidName."""
    key = ApproverKey(
        user_id=user.pk, kind=Kind.WEBAUTHN, keyid=passkey.keyid, public_key=encode_bytes(passkey.public_key),
        thumbprint=hashlib.sha256(passkey.public_key).hexdigest(), label=check_label(label),
        transports=list(passkey.transports), sign_count=passkey.sign_count,
        is_backup_eligible=passkey.is_backup_eligible, last_used_at=clock.now(),
    )  # fmt: skip
    return _add_key(key, owner=user.get_username(), actor=actor)


@transaction.atomic
def add_key_file(*, user: User, line: str, label: str = "", is_break_glass: bool = False, actor: str) -> ApproverKey:
    """Keep the public half of a key file. ``line``: what ``./muster keys show`` prints. ``label`` "" = the name in the line.

    Raises InvalidProposal for another line, NotPermitted for one key too many or a known one, InvalidName.
    """
    spki, name = read_public_line(line)
    thumbprint = hashlib.sha256(spki).hexdigest()
    key = ApproverKey(
        user_id=user.pk, kind=Kind.ED25519, keyid=thumbprint[:32], public_key=encode_bytes(spki), thumbprint=thumbprint,
        label=check_label(label or name), is_break_glass=is_break_glass,
    )  # fmt: skip
    return _add_key(key, owner=user.get_username(), actor=actor)


@transaction.atomic
def revoke_key(*, user: User, key_id: int, actor: str, accepts_policy_change: bool) -> ApproverKey:
    """Take a key out of use. A new key in the place of one that the policy names approves only after a policy change.

    Raises NotFound; NotPermitted when the policy names the key and ``accepts_policy_change`` is False.
    """
    key = ApproverKey.objects.select_for_update().filter(pk=key_id, user_id=user.pk, revoked_at__isnull=True).first()
    if key is None:
        raise NotFound(_("There is no such key in use."))
    if key.thumbprint in list_approving() and not accepts_policy_change:
        raise NotPermitted(
            _(
                "The active policy names this key. Removing it here stops it from signing in; nodes trust it until a new "
                "version of the policy leaves it out, and another key of yours approves only once a version names it. "
                "Say that you know."
            )
        )
    key.revoked_at = clock.now()
    key.save(update_fields=["revoked_at"])
    record_event(actor=actor, action="approver-key.revoke", target=user.get_username(), detail=_describe(key))
    return key


def read_public_line(line: str) -> tuple[bytes, str]:
    """Return SPKI DER and name of ``ed25519 BASE64URL NAME``. Raises InvalidProposal."""
    words = line.split(maxsplit=2)
    spki = b""
    if len(words) > 1 and words[0] == LINE_WORD:
        try:
            spki = decode_bytes(words[1])
            spki = spki if isinstance(load_public_key(spki), Ed25519PublicKey) else b""
        except ApprovalError:
            spki = b""
    if not spki:
        raise InvalidProposal(
            _("This is not the public line of a key file. Paste what %(muster)s keys show prints: ed25519, the key, a name.")
            % {"muster": COMMAND},
            param="public",
        )
    return spki, words[2].strip() if len(words) > 2 else "key file"


def check_label(label: str) -> str:
    text = label.strip()
    if not (0 < len(text) <= limits().governance.key_label_chars and text.isprintable()):
        raise InvalidName(
            _("A key needs a name of 1 to %(most)s characters.") % {"most": limits().governance.key_label_chars}, param="label"
        )
    return text


def _add_key(key: ApproverKey, *, owner: str, actor: str) -> ApproverKey:
    if ApproverKey.objects.filter(user_id=key.user_id, revoked_at__isnull=True).count() >= MAX_KEYS_EACH:
        raise NotPermitted(
            _("A person has at most %(max_keys_each)s keys. Remove one first.") % {"max_keys_each": MAX_KEYS_EACH}
        )
    try:
        with transaction.atomic():
            key.save(force_insert=True)
    except IntegrityError:
        raise NotPermitted(_("This key is enrolled already, or was once. Every key belongs to one person, once.")) from None
    record_event(actor=actor, action="approver-key.enrol", target=owner, detail=_describe(key))
    return key


def _describe(key: ApproverKey) -> dict[str, object]:
    return {"kind": key.kind, "thumbprint": key.thumbprint, "break_glass": key.is_break_glass}
