"""Calling the REST API of governance the way a program does."""

from __future__ import annotations

from typing import Any

from django.test import Client

from governance.models import AdminToken
from tests.system.governance.team import Member
from wire.credentials import CredentialKind, mint_credential


def make_client(member: Member | None, *, name: str = "ci") -> Client:
    """A client with an admin token of a person, or of nobody."""
    minted = mint_credential(CredentialKind.ADMIN)
    owner = member.user if member else None
    AdminToken.objects.create(name=name, keyid=minted.keyid, digest=minted.digest, owner=owner)
    return Client(headers={"authorization": f"Bearer {minted.text}"})


def post(client: Client, path: str, body: object | None = None, **headers: str) -> Any:
    """Send JSON."""
    return client.post(path, body if body is not None else {}, content_type="application/json", headers=headers)


def refusal(answer: Any, status: int) -> dict[str, Any]:
    """The error of an answer that has this status."""
    assert answer.status_code == status, answer.content
    error: dict[str, Any] = answer.json()["error"]
    assert {"code", "message", "retryable", "type", "param"} <= set(error)
    return error
