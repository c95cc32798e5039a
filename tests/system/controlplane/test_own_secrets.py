"""What variables of the operator's own bring: a node credential, an admin token, and requests without a key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.conf import settings as django_settings
from django.utils import timezone
from pytest_django import Settings
from rest_framework.test import APIClient

from controlplane.serve_control import keep_own_secrets
from controlplane.system import Sign, look_at_keys
from gateway.models import ApiKey, Tenant
from gateway.services.keys import revoke_api_key
from governance.admin_tokens import revoke_admin_token, verify_admin_token
from governance.models import AdminToken, PolicyVersion
from nodes.models import NodeCredential
from nodes.services.credentials import find_credential, revoke_credential
from tests.fakes.clock import install_virtual_clock
from tests.fakes.nodes import audited
from wire.credentials import CredentialKind, digest_credential, mint_credential

pytestmark = pytest.mark.django_db

SECRET, OTHER = "correct-horse-battery", "another-horse-battery"


def use_worker(settings: Settings, secret: str) -> NodeCredential | None:
    settings.OWN_WORKER_SECRET = secret
    keep_own_secrets()
    return find_credential(SECRET)


def use_admin(settings: Settings, secret: str) -> AdminToken | None:
    settings.OWN_ADMIN_TOKEN = secret
    keep_own_secrets()
    return verify_admin_token(SECRET)


Use = Callable[[Settings, str], NodeCredential | AdminToken | None]


@pytest.mark.parametrize("use", [use_worker, use_admin], ids=["worker", "admin"])
def test_a_secret_of_ones_own_is_one_row_that_ends_with_the_variable_and_comes_back_with_it(
    settings: Settings, use: Use
) -> None:
    first = use(settings, SECRET)
    assert first is not None
    assert (first.name, first.revoked_at) == ("environment", None)
    assert bytes(first.digest) != digest_credential(SECRET), "whoever has the database alone can try no guesses"
    again = use(settings, SECRET)
    assert again is not None
    assert again.pk == first.pk, "a start changes nothing"
    assert use(settings, OTHER) is None
    first.refresh_from_db()
    assert first.revoked_at is not None
    back = use(settings, SECRET)
    assert back is not None
    assert back.pk != first.pk
    assert use(settings, "") is None
    rows = type(first)._default_manager.exclude(variable="")
    assert {row.revoked_at is None for row in rows} == {False}


@pytest.mark.parametrize("use", [use_worker, use_admin], ids=["worker", "admin"])
def test_a_secret_that_somebody_revoked_stays_so_and_one_that_muster_made_is_not_taken_as_ones_own(
    settings: Settings, use: Use
) -> None:
    row = use(settings, SECRET)
    if isinstance(row, NodeCredential):
        revoke_credential(credential_id=row.pk, actor="user:ada")
    else:
        assert row is not None
        revoke_admin_token(token_id=row.pk, actor="user:ada")
    assert use(settings, SECRET) is None
    assert use(settings, OTHER) is None
    assert use(settings, SECRET) is None
    count = type(row)._default_manager.count()
    kind = CredentialKind.WORKER if isinstance(row, NodeCredential) else CredentialKind.ADMIN
    use(settings, mint_credential(kind).text)
    assert type(row)._default_manager.count() == count


def test_each_secret_opens_its_own_door_alone_under_the_key_of_the_installation(settings: Settings) -> None:
    assert use_worker(settings, SECRET) is not None
    assert verify_admin_token(SECRET) is None
    settings.OWN_ADMIN_TOKEN = OTHER
    keep_own_secrets()
    assert find_credential(OTHER) is None
    settings.OWN_WORKER_SECRET = ""
    assert find_credential(SECRET) is None, "a process without the variable does not take it"
    settings.OWN_WORKER_SECRET, settings.SECRET_KEY = SECRET, django_settings.SECRET_KEY + "x"
    assert find_credential(SECRET) is None


@pytest.mark.parametrize(
    ("requires", "addresses", "sign", "words"),
    [
        (True, [], Sign.OK, "Every request needs a key."),
        (True, ["0.0.0.0"], Sign.OK, "Every request needs a key."),
        (False, [], Sign.OK, "Programs on this machine need no key"),
        (False, ["0.0.0.0"], Sign.ATTENTION, "Nobody needs a key"),
    ],
)
def test_the_page_system_says_who_needs_no_key(
    settings: Settings, addresses: list[str], sign: Sign, words: str, *, requires: bool
) -> None:
    settings.REQUIRE_API_KEYS, settings.KEYLESS_ADDRESSES = requires, addresses
    part = look_at_keys()
    assert part.sign is sign
    assert part.what.startswith(words)


def test_its_nodes_are_of_the_provider_that_is_named(settings: Settings) -> None:
    settings.OWN_PROVIDER = "lab"
    before = use_worker(settings, SECRET)
    settings.OWN_PROVIDER = "attic"
    after = use_worker(settings, SECRET)
    assert before is not None
    assert after is not None
    assert (before.provider.name, after.provider.name, after.max_nodes > 100) == ("lab", "attic", True)
    assert [event.actor for event in audited("node_credential.revoke")] == ["system:environment"]


def test_an_own_token_opens_the_rest_api_and_wrong_ones_are_slowed_down(settings: Settings) -> None:
    use_admin(settings, SECRET)

    def ask(token: str) -> int:
        answer = APIClient().get("/api/v1/operations", HTTP_AUTHORIZATION=f"Bearer {token}", REMOTE_ADDR="192.0.2.7")
        return int(answer.status_code)

    assert ask(SECRET) == 200
    install_virtual_clock()  # a second of the throttle's does not pass here, however slow the machine
    # A block lasts a second, so which guess meets it depends on the machine; one of some rounds of them does.
    assert ask(f"{SECRET}x") == 401
    assert 429 in (ask(f"{SECRET}{guess}") for guess in range(200))
    assert ask(SECRET) == 200, "a good one waits for nobody"


def test_once_there_is_a_policy_an_own_token_is_not_made_and_the_rest_is(settings: Settings) -> None:
    kept = use_admin(settings, SECRET)
    PolicyVersion.objects.create(version=1, activated_at=timezone.now(), document=b"{}")
    assert kept is not None
    assert use_admin(settings, SECRET) == kept, "one that was there goes on"
    settings.OWN_ADMIN_TOKEN, settings.REQUIRE_API_KEYS = OTHER, False
    keep_own_secrets()
    assert verify_admin_token(OTHER) is None
    assert ApiKey.objects.exclude(variable="").count() == 1


def test_requests_without_a_key_are_those_of_one_key_of_a_tenant_that_keeps_its_limits(settings: Settings) -> None:
    settings.REQUIRE_API_KEYS = False
    keep_own_secrets()
    keep_own_secrets()
    key = ApiKey.objects.exclude(variable="").get()
    assert (key.name, key.tenant.name, key.revoked_at) == ("keyless", "keyless", None)
    Tenant.objects.filter(name="keyless").update(requests_per_minute=7)
    settings.REQUIRE_API_KEYS = True
    keep_own_secrets()
    key.refresh_from_db()
    assert key.revoked_at is not None
    settings.REQUIRE_API_KEYS = False
    keep_own_secrets()
    made = ApiKey.objects.exclude(variable="").get()
    assert (made.pk != key.pk, made.tenant.requests_per_minute) == (True, 7)
    revoke_api_key(key_id=made.pk, actor="user:ada")
    keep_own_secrets()
    assert not ApiKey.objects.exclude(variable="").filter(revoked_at=None).exists(), "somebody ended it: it stays so"
