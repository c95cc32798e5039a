"""Client keys in memory and in rows: lookups, misses, revocation, expiry, and incremental loading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.utils import timezone

from core.limits import GatewayLimits
from core.throttle import AuthThrottle
from gateway.auth import KeyRing
from gateway.catalogue import Catalogue, read_change_mark, store_key_use
from gateway.errors import InvalidApiKey, RateLimited
from gateway.models import ApiKey, Tenant
from gateway.services import create_api_key, create_tenant, disable_tenant, revoke_api_key
from gateway.values import Caller
from tests.fakes.limits import set_limits
from wire.credentials import CredentialKind, mint_credential

ACTOR = "user:ada"
LIMITS = GatewayLimits(requests_per_minute=77, max_tokens_cap=1000, max_prompt_chars=2000, max_queue=3)


class CountingCatalogue(Catalogue):
    """A catalogue that counts how often it is asked for one key."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.lookups = 0

    def load_key(self, keyid: str):  # type: ignore[no-untyped-def]  # the type of the base
        self.lookups += 1
        return super().load_key(keyid)


def make_key(name: str = "k", tenant: str = "acme", **changes: object) -> tuple[ApiKey, str]:
    if not Tenant.objects.filter(name=tenant).exists():
        create_tenant(name=tenant, actor=ACTOR)
    return create_api_key(name=name, tenant_name=tenant, actor=ACTOR, **changes)  # type: ignore[arg-type]  # its keywords


async def identify(ring: KeyRing, text: str, **options: bool) -> Caller:
    return await ring.identify({"authorization": f"Bearer {text}"}, allow_x_api_key=options.get("allow_x_api_key", True))


async def refuse(ring: KeyRing, headers: dict[str, str], *, allow_x_api_key: bool = True) -> InvalidApiKey:
    with pytest.raises(InvalidApiKey) as caught:
        await ring.identify(headers, allow_x_api_key=allow_x_api_key)
    return caught.value


@pytest.fixture
async def _close_connections() -> AsyncIterator[None]:
    yield
    await sync_to_async(connections.close_all)()


over_rows = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("_close_connections")]


class TestKeyRing:
    pytestmark = over_rows

    async def test_a_key_that_memory_does_not_have_is_looked_up_once(self) -> None:
        key, text = await sync_to_async(make_key)(requests_per_minute=5, allowed_models=["m"])
        catalogue = CountingCatalogue()
        ring = KeyRing(catalogue)
        callers = [await identify(ring, text) for _ in range(3)]
        assert callers == [callers[0]] * 3
        assert callers[0] == Caller(
            key_id=key.pk, key_name="k", tenant="acme", requests_per_minute=5, allowed_models=frozenset({"m"})
        )
        assert catalogue.lookups == 1
        assert ring.used.keys() == {key.pk}

    async def test_an_unknown_key_is_asked_for_once_until_keys_change(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_limits(gateway={"unknown_key_s": 600.0})  # two seconds pass where a machine stands still
        catalogue = CountingCatalogue()
        ring = KeyRing(catalogue)
        unknown = mint_credential(CredentialKind.CLIENT).text
        for _ in range(5):
            await refuse(ring, {"authorization": f"Bearer {unknown}"})
        assert catalogue.lookups == 1
        ring.forget_unknown()
        await refuse(ring, {"authorization": f"Bearer {unknown}"})
        assert catalogue.lookups == 2
        assert ring.used == {}

    async def test_unknown_keys_of_one_address_cost_a_bounded_number_of_queries_and_good_ones_pass(self) -> None:
        _, text = await sync_to_async(make_key)()
        catalogue = CountingCatalogue()
        clock = [1000.0]
        ring = KeyRing(catalogue, AuthThrottle(failures=20, block_s=1.0, clock=lambda: clock[0]))
        await identify(ring, text)
        for _ in range(20):
            await refuse(ring, {"authorization": f"Bearer {mint_credential(CredentialKind.CLIENT).text}"})
        for _ in range(200):
            unknown = {"authorization": f"Bearer {mint_credential(CredentialKind.CLIENT).text}"}
            with pytest.raises(RateLimited) as caught:
                await ring.identify(unknown, allow_x_api_key=True)
            assert caught.value.retry_after_s == 1
        assert catalogue.lookups == 21
        assert (await identify(ring, text)).key_name == "k"
        _, new = await sync_to_async(make_key)("new")
        assert (await ring.identify({"x-api-key": new}, allow_x_api_key=True, address="192.0.2.8")).key_name == "new"
        _, newer = await sync_to_async(make_key)("newer")
        catalogue.apply_keys(await sync_to_async(catalogue.load_keys)(None), replace=True)
        assert (await identify(ring, newer)).key_name == "newer", "the sweep, which a hint brings at once, has it"
        clock[0] += 1.0
        await refuse(ring, {"authorization": f"Bearer {mint_credential(CredentialKind.CLIENT).text}"})

    async def test_the_right_key_id_with_another_secret_is_refused(self) -> None:
        key, text = await sync_to_async(make_key)()
        catalogue = CountingCatalogue()
        ring = KeyRing(catalogue)
        for headers in ({"authorization": f"bearer  {text} "}, {"x-api-key": f" {text}"}):
            assert (await ring.identify(headers, allow_x_api_key=True)).tenant == "acme"
        forged = mint_credential(CredentialKind.CLIENT).text
        changed = text[:-1] + ("a" if text[-1] != "a" else "b")
        others = [mint_credential(kind).text for kind in (CredentialKind.WORKER, CredentialKind.ADMIN)]
        for wrong in (f"mst_{key.keyid}{forged[16:]}", "", "sk-1234", changed, text + "a", *others, "é", "mst_" * 50):
            error = await refuse(ring, {"authorization": f"Bearer {wrong}"})
            assert not wrong or wrong not in error.message
        for value in (f"Basic {text}", text):
            await refuse(ring, {"authorization": value})
        for headers in ({"x-api-key": text}, {}):
            assert (await refuse(ring, headers, allow_x_api_key=False)).message == "API key is missing."
        assert catalogue.lookups == 1, "noise costs no query"

    async def test_many_requests_with_a_new_key_at_once_all_pass(self) -> None:
        _, text = await sync_to_async(make_key)()
        ring = KeyRing(CountingCatalogue())
        callers = await asyncio.gather(*(identify(ring, text) for _ in range(20)))
        assert len(set(callers)) == 1

    async def test_a_revoked_key_stops_with_the_next_sweep(self) -> None:
        key, text = await sync_to_async(make_key)()
        catalogue = CountingCatalogue()
        ring = KeyRing(catalogue)
        since = await sync_to_async(read_change_mark)()
        await identify(ring, text)
        await sync_to_async(revoke_api_key)(key_id=key.pk, actor=ACTOR)
        catalogue.apply_keys(await sync_to_async(catalogue.load_keys)(since), replace=False)
        await refuse(ring, {"authorization": f"Bearer {text}"})
        assert catalogue.lookups == 1


def mark_now() -> int:
    """Return the mark that nothing committed so far reaches.

    The real one is the oldest transaction of the whole server, on which other tests run theirs: it may lie further back.
    """
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
        now = int(cursor.fetchone()[0])
    assert read_change_mark() <= now
    return now


@pytest.mark.django_db
def test_expired_and_revoked_keys_and_those_of_a_closed_tenant_are_not_usable() -> None:
    now = timezone.now()
    make_key("fine")
    make_key("later", expires_at=now + timedelta(hours=1))
    expired, _ = make_key("expired", expires_at=now + timedelta(hours=1))
    ApiKey.objects.filter(pk=expired.pk).update(expires_at=now - timedelta(seconds=1))
    revoke_api_key(key_id=make_key("revoked")[0].pk, actor=ACTOR)
    make_key("closed", tenant="gone")
    disable_tenant(name="gone", actor=ACTOR)
    entries = dict(Catalogue(LIMITS).load_keys(None)).values()
    usable = {entry.caller.key_name for entry in entries if entry.is_usable(now.timestamp())}
    assert usable == {"fine", "later"}


@pytest.mark.django_db(transaction=True)
def test_only_what_changed_is_loaded_again_and_a_tenant_counts_as_part_of_its_keys() -> None:
    make_key("old")
    make_key("other", tenant="quiet")
    catalogue = Catalogue(LIMITS)
    since = mark_now()
    assert catalogue.load_keys(since) == []
    new, _ = make_key("new", tenant="fresh")
    assert [keyid for keyid, _ in catalogue.load_keys(since)] == [new.keyid]
    disable_tenant(name="acme", actor=ACTOR)
    changed = dict(catalogue.load_keys(since))
    assert {entry.caller.key_name for entry in changed.values()} == {"new", "old"}
    assert catalogue.load_keys(mark_now()) == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("behind", [timedelta(hours=2), timedelta(hours=-2)], ids=["behind", "ahead"])
def test_a_revocation_is_seen_whatever_the_clock_of_its_writer_says(behind: timedelta) -> None:
    key, _ = make_key("k")
    other, _ = make_key("o", tenant="closing")
    catalogue = Catalogue(LIMITS)
    since = read_change_mark()
    moment = timezone.now() - behind
    ApiKey.objects.filter(pk=key.pk).update(revoked_at=moment, updated_at=moment)
    Tenant.objects.filter(name="closing").update(is_active=False, updated_at=moment)
    entries = dict(catalogue.load_keys(since))
    assert entries.keys() == {key.keyid, other.keyid}
    assert all(entry.revoked for entry in entries.values())


@pytest.mark.django_db(transaction=True)
def test_a_change_is_seen_however_late_it_is_committed() -> None:
    late, _ = make_key("late")
    writer = connections["default"].copy()
    try:
        writer.set_autocommit(False)
        with writer.cursor() as cursor:
            cursor.execute("UPDATE gateway_apikey SET revoked_at = now(), updated_at = now() - interval '1 day'")
        sooner, _ = make_key("committed sooner")
        since = read_change_mark()
        seen = dict(Catalogue(LIMITS).load_keys(since))
        assert not any(entry.revoked for entry in seen.values())
        assert sooner.keyid in seen
        writer.commit()
    finally:
        writer.close()
    assert dict(Catalogue(LIMITS).load_keys(since))[late.keyid].revoked


@pytest.mark.django_db(transaction=True)
def test_rows_restored_from_a_server_that_had_counted_further_are_no_changes() -> None:
    restored, _ = make_key("restored")
    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER TABLE gateway_apikey DISABLE TRIGGER USER")  # as a dump is restored, data first
        cursor.execute("UPDATE gateway_apikey SET changed_in = '9000000000'")
        cursor.execute("ALTER TABLE gateway_apikey ENABLE TRIGGER USER")
    since = mark_now()
    assert Catalogue(LIMITS).load_keys(since) == []
    revoke_api_key(key_id=restored.pk, actor=ACTOR)
    assert [keyid for keyid, _ in Catalogue(LIMITS).load_keys(since)] == [restored.keyid]


@pytest.mark.django_db(transaction=True)
def test_use_of_a_key_is_stored_without_looking_like_a_change_and_never_backwards() -> None:
    key, _ = make_key()
    since = mark_now()
    store_key_use({key.pk: 2_000_000_000.0})
    store_key_use({key.pk: 1_000_000_000.0})
    ApiKey.objects.update(name="k")  # as it was
    assert Catalogue(LIMITS).load_keys(since) == []
    again = ApiKey.objects.get(pk=key.pk)
    assert again.last_used_at is not None
    assert (again.last_used_at.timestamp(), again.updated_at) == (2_000_000_000.0, key.updated_at)
