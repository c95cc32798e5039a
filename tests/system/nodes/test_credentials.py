"""Node credentials and providers: made, found, switched off and revoked; no other kind of credential passes for one."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from django.db import connection

from governance.services import create_admin_token
from nodes.errors import BadRequest, Conflict, CredentialNotFound, EnrolmentRefused, NodeError, NodeNotFound, ProviderNotFound
from nodes.models import Node, NodeCredential, Provider, ProviderState
from nodes.services import (
    claim_node,
    create_credential,
    create_provider,
    delete_provider,
    disable_provider,
    enable_provider,
    find_credential,
    revoke_credential,
)
from tests.fakes.nodes import ACTOR, audited, make_credential, make_node, make_provider
from wire.credentials import CredentialKind, digest_credential, mint_credential

pytestmark = pytest.mark.django_db


def test_a_new_credential_is_found_and_only_its_digest_is_stored() -> None:
    credential, text = make_credential(" rack 4 ", max_nodes=3)
    assert text.startswith("msw_")
    assert (credential.name, credential.max_nodes) == ("rack 4", 3)
    assert bytes(NodeCredential.objects.get().digest) == digest_credential(text)
    found = find_credential(text)
    assert found is not None
    assert (found.pk, found.provider.name) == (credential.pk, "local")
    assert text not in str(audited("node_credential.create")[0].detail)


def test_no_other_credential_passes_for_a_node_credential() -> None:
    _, text = make_credential()
    _, admin_token = create_admin_token(name="ops", actor=ACTOR)
    forged = mint_credential(CredentialKind.WORKER).text
    same_id = f"msw_{text.split('_')[1]}_{forged.split('_')[2]}"
    client = mint_credential(CredentialKind.CLIENT).text
    for wrong in ("", text[:-1], text + "x", text.replace("msw_", "msa_"), admin_token, client, forged, same_id):
        assert find_credential(wrong) is None, wrong


def test_the_credential_of_a_disabled_provider_is_found_for_the_caller_to_judge() -> None:
    _, text = make_credential()
    disable_provider(name="local", actor=ACTOR)
    found = find_credential(text)
    assert found is not None
    assert found.provider.state == "disabled"


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"name": " "}, BadRequest, "name"),
        ({"name": "x" * 81}, BadRequest, "name"),
        ({"max_nodes": 0}, BadRequest, "max_nodes"),
        ({"max_nodes": 10_001}, BadRequest, "max_nodes"),
        ({"provider_name": "nowhere"}, ProviderNotFound, "provider_name"),
        ({"node_id": uuid.UUID(int=0)}, NodeNotFound, "node_id"),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], error: type[NodeError], param: str) -> None:
    make_provider()
    with pytest.raises(error) as caught:
        create_credential(**{"name": "box", "provider_name": "local", "actor": ACTOR, **changes})
    assert caught.value.param == param
    assert not NodeCredential.objects.exists()


def test_a_bound_credential_must_be_of_the_nodes_provider() -> None:
    node = make_node()
    make_provider("other")
    bound, _ = make_credential("spare", node_id=node.pk)
    assert bound.node == node
    with pytest.raises(BadRequest):
        create_credential(name="spare", provider_name="other", node_id=node.pk, actor=ACTOR)


def test_a_revoked_credential_is_not_found_and_revoking_twice_records_once() -> None:
    credential, text = make_credential()
    first = revoke_credential(credential_id=credential.pk, actor=ACTOR)
    again = revoke_credential(credential_id=credential.pk, actor=ACTOR)
    assert first.revoked_at == again.revoked_at is not None
    assert first.updated_at > credential.updated_at
    assert find_credential(text) is None
    assert len(audited("node_credential.revoke")) == 1
    with pytest.raises(CredentialNotFound):
        revoke_credential(credential_id=0, actor=ACTOR)


def test_use_is_noted_without_looking_like_a_change() -> None:
    credential, text = make_credential()
    find_credential(text)
    row = NodeCredential.objects.get()
    assert row.last_used_at is not None
    assert row.updated_at == credential.updated_at


# Providers


@pytest.mark.parametrize("name", ["", "-a", "a b", "ä", "a/b", "x" * 61, "a\n"])
def test_a_name_that_cannot_stand_in_a_url_is_refused(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        create_provider(name=name, actor=ACTOR)
    assert caught.value.param == "name"


def test_a_name_is_taken_once() -> None:
    make_provider()
    with pytest.raises(Conflict):
        create_provider(name="local", actor=ACTOR)
    assert len(audited("provider.create")) == 1


def test_switching_off_and_on_is_recorded_once_each() -> None:
    make_provider()
    assert disable_provider(name="local", actor=ACTOR).state == ProviderState.DISABLED
    assert disable_provider(name="local", actor=ACTOR).state == ProviderState.DISABLED
    assert enable_provider(name="local", actor=ACTOR).state == ProviderState.ENABLED
    assert enable_provider(name="local", actor=ACTOR).state == ProviderState.ENABLED
    assert len(audited("provider.disable")) == len(audited("provider.enable")) == 1


def test_every_change_touches_updated_at() -> None:
    before = make_provider().updated_at
    for change in (disable_provider, enable_provider, delete_provider):
        after = change(name="local", actor=ACTOR).updated_at
        assert after > before
        before = after


@pytest.mark.parametrize("change", [enable_provider, disable_provider, delete_provider])
def test_a_provider_that_is_not_there_cannot_be_changed(change: Callable[..., Provider]) -> None:
    make_provider("gone")
    delete_provider(name="gone", actor=ACTOR)
    for name in ("gone", "never"):
        with pytest.raises(ProviderNotFound):
            change(name=name, actor=ACTOR)


def test_deleting_revokes_its_credentials_and_coming_back_does_not_revive_them() -> None:
    _, text = make_credential()
    _, other = make_credential(provider="other")
    delete_provider(name="local", actor=ACTOR)
    assert find_credential(text) is None
    assert find_credential(other) is not None
    assert audited("provider.delete")[0].detail == {"revoked_credentials": 1}
    assert create_provider(name="local", actor=ACTOR).state == ProviderState.ENABLED
    assert find_credential(text) is None


# Enrolment


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("names", "made"), [(["a", "b", "c", "d"], 2), (["a", "a", "a", "a"], 1)])
def test_at_once_is_no_way_around_the_limit(names: list[str], made: int) -> None:
    credential, _ = make_credential(max_nodes=2)
    start = Barrier(len(names))

    def enrol(name: str) -> bool:
        try:
            start.wait(30)
            return claim_node(credential=credential, name=name)[1]
        except EnrolmentRefused:
            return False
        finally:
            connection.close()

    with ThreadPoolExecutor(len(names)) as boxes:
        results = list(boxes.map(enrol, names))
    assert sum(results) == made == Node.objects.count()
