"""A gateway's background: start, staying in step with rows that others change and hold, and stopping when a part of it dies."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from channels.layers import get_channel_layer
from django.db import connection, connections
from django.db.models.functions import Now
from django.utils import timezone

from core.db.threads import run_upkeep, with_kept_connection
from core.hints import HINT_GROUP
from core.limits import GatewayLimits
from core.throttle import AuthThrottle
from gateway.errors import InvalidApiKey, RateLimited
from gateway.models import ApiKey, GatewayProcess, Model, Tenant
from gateway.process import GatewayRuntime
from gateway.request.identity import KeyRing
from gateway.request.models import AliasEntry, Catalogue, KeyEntry, read_marks, store_key_use
from gateway.services.keys import change_key_limits, create_api_key, revoke_api_key, rotate_api_key
from gateway.services.models import allow_model
from gateway.services.tenants import create_tenant, disable_tenant
from gateway.values import Caller, ModelEntry
from nodes.channel import NodeChannel
from nodes.links import Link, LinkRegistry
from nodes.links.keeper import LinkKeeper
from nodes.models import Node, NodePresence, Provider
from nodes.services.availability import list_ejections
from nodes.services.drains import cordon_node
from nodes.services.sessions import KnownNodes, SessionEnd, close_sessions
from tests.fakes.clock import install_virtual_clock, shift_clock
from tests.fakes.limits import set_limits
from tests.fakes.nodes import audited, make_credential, make_gateway, make_node, make_presence
from tests.fakes.pipeline import run_gateway
from tests.fakes.waiting import eventually, turns
from wire.credentials import CredentialKind, mint_credential

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
async def _close_connections() -> AsyncIterator[None]:
    yield
    await sync_to_async(connections.close_all)()


@sync_to_async
def new_key() -> tuple[ApiKey, str]:
    create_tenant(name="acme", actor=ACTOR)
    return create_api_key(name="k", tenant_name="acme", actor=ACTOR)


class CountingRuntime(GatewayRuntime):
    """Counts its sweeps."""

    sweeps = 0

    async def _sweep(self) -> None:
        self.sweeps += 1
        await super()._sweep()


async def test_a_storm_of_hints_costs_ten_sweeps_a_second_and_a_single_hint_does_not_wait_for_the_next_sweep() -> None:
    set_limits(gateway={"sweep_s": 600.0})
    loop = asyncio.get_running_loop()
    async with run_gateway(CountingRuntime()) as runtime:
        assert isinstance(runtime, CountingRuntime)
        layer = get_channel_layer()
        begun_at, begun_with = loop.time(), runtime.sweeps
        while runtime.sweeps < begun_with + 10:
            await layer.group_send(HINT_GROUP, {"type": "hint", "topic": "models", "ident": ""})
        assert loop.time() - begun_at > 0.85
        quiet_at = loop.time() + 0.3
        await eventually(lambda: loop.time() > quiet_at)
        before = runtime.sweeps
        await layer.group_send(HINT_GROUP, {"type": "hint", "topic": "models", "ident": ""})
        await eventually(lambda: runtime.sweeps > before)


async def test_a_hint_has_the_row_read_that_it_names_and_no_other() -> None:
    set_limits(gateway={"sweep_s": 600.0})
    node = await sync_to_async(make_node)(name="n")
    await sync_to_async(make_presence)(node)
    key, _ = await new_key()
    await sync_to_async(allow_model)(name="tiny", actor=ACTOR)
    async with run_gateway(CountingRuntime()) as runtime:
        assert isinstance(runtime, CountingRuntime)
        await eventually(lambda: runtime.sweeps == 2)  # the first, and that for what came before its hints were heard
        lower = sync_to_async(change_key_limits)
        await lower(key_id=key.pk, requests_per_minute=3, allowed_models=(), actor=ACTOR)
        await eventually(lambda: runtime.catalogue.keys[key.keyid].caller.requests_per_minute == 3)
        await sync_to_async(disable_tenant)(name="acme", actor=ACTOR)
        await eventually(lambda: runtime.catalogue.keys[key.keyid].revoked)
        await sync_to_async(allow_model)(name="large", actor=ACTOR)
        await eventually(lambda: set(runtime.catalogue.models) == {"tiny", "large"})
        await sync_to_async(cordon_node)(node_id=node.pk, actor=ACTOR)
        await eventually(lambda: runtime.keeper.rows[node.pk].cordoned)
        assert runtime.sweeps == 2
        known = runtime.keeper.rows[node.pk]
        await runtime._sweep()
        assert runtime.keeper.rows[node.pk] is known, "what a hint had read is not read again"


@pytest.mark.parametrize(
    ("topic", "ident"),
    [("nodes", ""), ("nodes", "key_1"), ("keys", "\0"), ("models", ""), ("tenants", "\0"), ("aliases", "a"), ("later", "x")],
)
async def test_a_hint_that_names_no_row_is_followed_by_a_sweep(topic: str, ident: str) -> None:
    set_limits(gateway={"sweep_s": 600.0})
    async with run_gateway(CountingRuntime()) as runtime:
        assert isinstance(runtime, CountingRuntime)
        await eventually(lambda: runtime.sweeps == 2)
        runtime._take_hint(topic, ident)
        await eventually(lambda: runtime.sweeps == 3)


async def test_hints_of_more_rows_than_are_read_one_by_one_are_followed_by_a_sweep() -> None:
    set_limits(gateway={"sweep_s": 600.0, "hint_rows": 3})
    async with run_gateway(CountingRuntime()) as runtime:
        assert isinstance(runtime, CountingRuntime)
        await eventually(lambda: runtime.sweeps == 2)
        for number in range(4):
            runtime._take_hint("nodes", str(uuid.UUID(int=number)))
        await eventually(lambda: runtime.sweeps == 3)


async def test_a_sweep_is_due_however_many_hints_come() -> None:
    set_limits(gateway={"sweep_s": 0.5})
    async with run_gateway(CountingRuntime()) as runtime:
        assert isinstance(runtime, CountingRuntime)
        until = runtime.sweeps + 3
        while runtime.sweeps < until:
            runtime._take_hint("nodes", str(uuid.UUID(int=7)))
            await asyncio.sleep(0.01)


class CountedRegistry(LinkRegistry):
    """Counts how often somebody goes through the links."""

    rounds = 0

    def __iter__(self) -> Iterator[Link]:
        self.rounds += 1
        return super().__iter__()


async def test_a_storm_of_hints_costs_ten_looks_at_the_commands_of_nodes_a_second() -> None:
    loop, registry = asyncio.get_running_loop(), CountedRegistry()
    channel = NodeChannel(LinkKeeper(registry, gateway_id=uuid.uuid4(), connect_s=1.0), advertised_gateways=[])
    running = asyncio.create_task(channel.run())
    await eventually(lambda: registry.rounds)
    begun_at, begun_with = loop.time(), registry.rounds
    while registry.rounds < begun_with + 6:
        channel.wake("commands")
        await turns(1)
    assert loop.time() - begun_at > 0.3
    running.cancel()


async def test_a_change_without_a_hint_is_found_by_the_sweep_and_a_database_with_lower_marks_is_read_whole() -> None:
    set_limits(gateway={"sweep_s": 0.1})
    async with run_gateway() as runtime:
        key, _ = await new_key()
        await eventually(lambda: key.keyid in runtime.catalogue.keys)
        await ApiKey.objects.filter(pk=key.pk).aupdate(requests_per_minute=3)
        await eventually(lambda: runtime.catalogue.keys[key.keyid].caller.requests_per_minute == 3)
        runtime._keys_mark = 2**60  # as read from the database before it was replaced
        await sync_to_async(revoke_api_key)(key_id=key.pk, actor=ACTOR)
        await eventually(lambda: runtime.catalogue.keys[key.keyid].revoked)


class CountingTables(Catalogue):
    """Counts how often a table is read."""

    reads = 0

    def load_keys(self, since: int | None) -> list[tuple[str, KeyEntry]]:
        self.reads += 1
        return super().load_keys(since)

    def load_models(self, names: Collection[str] | None = None) -> list[ModelEntry]:
        self.reads += 1
        return super().load_models(names)

    def load_aliases(self) -> list[AliasEntry]:
        self.reads += 1
        return super().load_aliases()


async def test_a_sweep_reads_the_tables_that_changed_and_no_other() -> None:
    set_limits(gateway={"sweep_s": 0.1})
    runtime = CountingRuntime()
    await sync_to_async(allow_model)(name="tiny", actor=ACTOR)
    tables = CountingTables(runtime.limits)
    runtime.catalogue = tables
    async with run_gateway(runtime):
        await _sweep_twice(runtime)
        read = tables.reads
        await _sweep_twice(runtime)
        assert tables.reads == read
        await Model.objects.filter(name="tiny").aupdate(max_tokens=7)  # no hint says so
        await eventually(lambda: tables.models["tiny"].max_tokens == 7)
        assert tables.reads == read + 1
        await Model.objects.filter(name="tiny").adelete()
        await eventually(lambda: "tiny" not in tables.models)
        assert tables.reads == read + 2


async def _sweep_twice(runtime: CountingRuntime) -> None:
    until = runtime.sweeps + 2
    await eventually(lambda: runtime.sweeps >= until)


def test_one_node_of_many_is_read_in_one_statement(django_assert_num_queries: Any) -> None:
    rows = [make_node(name=f"n{number}", credential=make_credential(f"c{number}")[0]) for number in range(3)]
    gateway_id = uuid.uuid4()
    nodes = KnownNodes(gateway_id)
    nodes.refresh()
    kept = nodes.rows[rows[0].pk]
    cordon_node(node_id=rows[1].pk, actor=ACTOR)
    Node.objects.filter(pk=rows[2].pk).delete()
    with django_assert_num_queries(1):
        nodes.read([rows[1].pk, rows[2].pk])
    assert nodes.rows.keys() == {rows[0].pk, rows[1].pk}
    assert nodes.rows[rows[1].pk].cordoned
    assert nodes.rows[rows[0].pk] is kept
    assert nodes.mark == read_marks(since=None, gateway_id=gateway_id, credentials=[], dead_s=10).nodes


def test_only_rows_of_nodes_that_changed_are_read_again_and_the_others_age() -> None:
    ours, theirs, gateway_id = make_node(name="ours"), make_node(name="theirs"), uuid.uuid4()
    make_presence(ours, gateway_id=uuid.uuid4(), gateway_links={gateway_id.hex: uuid.uuid4().hex})
    make_presence(theirs, gateway_id=uuid.uuid4())
    nodes = KnownNodes(gateway_id)

    def look() -> object:
        return read_marks(since=None, gateway_id=gateway_id, credentials=[], dead_s=10).nodes

    nodes.refresh()
    seen, before = look(), {row.name: (row, row.heartbeat_age_s) for row in nodes.rows.values()}
    NodePresence.objects.filter(node=ours).update(active_requests=3)
    assert look() == seen, "a gateway hears a node on its own socket, whoever else writes what that node says"
    NodePresence.objects.filter(node=theirs).update(active_requests=4)
    assert look() != seen
    nodes.refresh()
    again = {row.name: row for row in nodes.rows.values()}
    assert (again["theirs"].active_requests, again["ours"].active_requests) == (4, 0)
    assert again["ours"] is before["ours"][0]
    assert (again["ours"].heartbeat_age_s or 0) > (before["ours"][1] or 0) > 0
    seen = look()
    Provider.objects.filter(pk=ours.provider_id).update(state="disabled")
    assert look() != seen
    nodes.refresh()
    assert {row.provider_state for row in nodes.rows.values() if row.name == "ours"} == {"disabled"}
    theirs.delete()
    nodes.refresh()
    assert [row.name for row in nodes.rows.values()] == ["ours"]


async def test_a_gateway_whose_clock_is_wrong_is_alive_by_the_clock_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    shift_clock(monkeypatch, -3600)
    set_limits(gateway={"heartbeat_s": 0.2})
    async with run_gateway() as runtime:
        row = GatewayProcess.objects.filter(pk=runtime.gateway_id)
        first = (await row.aget()).heartbeat_at
        await eventually(row.exclude(heartbeat_at=first).aexists)
        assert await row.filter(heartbeat_at__gt=Now() - timedelta(minutes=1)).aexists()


async def test_a_gateway_that_was_started_anew_does_not_ask_itself_for_nodes_of_the_process_before_it(settings: Any) -> None:
    settings.GATEWAY_INTERNAL_URL, settings.CLUSTER_SECRET = "http://10.0.0.1:8080", "a secret of the cluster"
    held = {}
    for url in (settings.GATEWAY_INTERNAL_URL, "http://10.0.0.2:8080"):
        gateway = await sync_to_async(make_gateway)()
        await GatewayProcess.objects.filter(pk=gateway.pk).aupdate(internal_url=url)
        held[url] = await sync_to_async(make_node)(f"on {url}", model_names=["m"])
        await sync_to_async(make_presence)(held[url], gateway_id=gateway.pk)
    async with run_gateway() as runtime:
        assert {link.node_name for link in runtime.registry} == {"on http://10.0.0.2:8080"}


async def test_what_a_gateway_ejects_is_written_down_and_told_once() -> None:
    node = await sync_to_async(make_node)()
    await sync_to_async(make_presence)(node)

    @sync_to_async
    def read() -> list[str]:
        return [one.reason for one in list_ejections(NodePresence.objects.get(pk=node.pk), now=datetime.now(UTC))]

    async def shows(reasons: list[str]) -> bool:
        return await read() == reasons

    async with run_gateway() as runtime:
        ejections = runtime.registry.ejections
        for _ in range(12):
            ejections.note_connect(node.pk, time.monotonic())
        await eventually(lambda: shows(["unsteady"]))
        ejections.tick(time.monotonic() + 3600)
        await eventually(lambda: shows([]))
    assert len(await sync_to_async(audited)("node.ejected")) == 1


async def test_a_gateway_whose_background_dies_stops_itself() -> None:
    stopped: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    try:
        async with run_gateway() as runtime:
            sweeps = runtime._tasks[0]
            runtime.keeper.apply = None  # type: ignore[method-assign, assignment]  # whatever bug there may be
            await eventually(sweeps.done)
            await eventually(lambda: stopped)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert stopped == [signal.SIGTERM]


class OvertakenCatalogue(Catalogue):
    """A catalogue whose look-up of a key is still on its way when the key is changed and a sweep takes the change."""

    def __init__(self, change: Callable[..., object]) -> None:
        super().__init__(GatewayLimits())
        self._change = change

    def load_key(self, keyid: str) -> KeyEntry | None:
        entry = super().load_key(keyid)
        if entry is not None:
            self._change(key_id=entry.caller.key_id, actor=ACTOR)
            self.apply_keys(self.load_keys(None), replace=False)
        return entry


@pytest.mark.parametrize("change", [revoke_api_key, rotate_api_key])
async def test_a_look_up_that_a_change_overtook_does_not_let_the_key_live_on(change: Callable[..., object]) -> None:
    _, text = await new_key()
    ring = KeyRing(OvertakenCatalogue(change))
    for _ in range(2):
        with pytest.raises(InvalidApiKey):
            await ring.identify({"authorization": f"Bearer {text}"})


async def test_boxes_that_leave_while_their_rows_are_held_do_not_make_a_gateway_look_dead() -> None:
    set_limits(gateway={"heartbeat_s": 0.2})
    async with run_gateway() as runtime:
        other = psycopg.connect(**connection.get_connection_params())
        other.execute("LOCK TABLE nodes_nodepresence IN ACCESS EXCLUSIVE MODE")  # as a migration does
        ends = [SessionEnd(uuid.uuid4(), uuid.uuid4(), "gone")]
        leaving = [run_upkeep(close_sessions, ends, gateway_id=uuid.uuid4()) for _ in range(64)]
        farewell = asyncio.gather(*leaving, return_exceptions=True)
        row = GatewayProcess.objects.filter(pk=runtime.gateway_id)
        for _ in range(3):
            last = (await row.aget()).heartbeat_at
            await eventually(row.exclude(heartbeat_at=last).aexists)
        other.close()
        await farewell


async def test_a_rotated_key_is_taken_by_its_new_text_alone() -> None:
    async with run_gateway() as runtime:
        key, old = await new_key()
        ring = KeyRing(runtime.catalogue)
        assert (await ring.identify({"x-api-key": old})).key_id == key.pk

        _, text = await sync_to_async(rotate_api_key)(key_id=key.pk, actor=ACTOR)

        assert (await ring.identify({"x-api-key": text})).key_id == key.pk
        await eventually(lambda: key.keyid not in runtime.catalogue.keys)
        with pytest.raises(InvalidApiKey):
            await ring.identify({"x-api-key": old})


@sync_to_async
def end_key(key: ApiKey, **columns: object) -> None:
    ApiKey.objects.filter(pk=key.pk).update(**columns)


@pytest.mark.parametrize("column", ["revoked_at", "expires_at"])
async def test_keys_that_ended_long_ago_are_not_held_in_memory_and_stay_refused(column: str) -> None:
    key, text = await new_key()
    catalogue = Catalogue(GatewayLimits())
    await end_key(key, **{column: Now() - timedelta(hours=23)})
    assert [keyid for keyid, _entry in await sync_to_async(catalogue.load_keys)(None)] == [key.keyid]
    await end_key(key, **{column: Now() - timedelta(hours=25)})
    assert await sync_to_async(catalogue.load_keys)(None) == []
    with pytest.raises(InvalidApiKey):
        await KeyRing(catalogue).identify({"authorization": f"Bearer {text}"})


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


async def identify(ring: KeyRing, text: str) -> Caller:
    return await ring.identify({"authorization": f"Bearer {text}"})


async def refuse(ring: KeyRing, headers: dict[str, str]) -> InvalidApiKey:
    with pytest.raises(InvalidApiKey) as caught:
        await ring.identify(headers)
    return caught.value


class TestKeyRing:
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
        clock = install_virtual_clock()
        ring = KeyRing(catalogue, AuthThrottle(failures=20, block_s=1.0))
        await identify(ring, text)
        for _ in range(20):
            await refuse(ring, {"authorization": f"Bearer {mint_credential(CredentialKind.CLIENT).text}"})
        for _ in range(200):
            unknown = {"authorization": f"Bearer {mint_credential(CredentialKind.CLIENT).text}"}
            with pytest.raises(RateLimited) as caught:
                await ring.identify(unknown)
            assert caught.value.retry_after_s == 1
        assert catalogue.lookups == 21
        assert (await identify(ring, text)).key_name == "k"
        _, new = await sync_to_async(make_key)("new")
        assert (await ring.identify({"x-api-key": new}, address="192.0.2.8")).key_name == "new"
        _, newer = await sync_to_async(make_key)("newer")
        catalogue.apply_keys(await sync_to_async(catalogue.load_keys)(None), replace=True)
        assert (await identify(ring, newer)).key_name == "newer", "the sweep, which a hint brings at once, has it"
        clock.advance(1.0)
        await refuse(ring, {"authorization": f"Bearer {mint_credential(CredentialKind.CLIENT).text}"})

    async def test_the_right_key_id_with_another_secret_is_refused(self) -> None:
        key, text = await sync_to_async(make_key)()
        catalogue = CountingCatalogue()
        ring = KeyRing(catalogue)
        for headers in ({"authorization": f"bearer  {text} "}, {"x-api-key": f" {text}"}):
            assert (await ring.identify(headers)).tenant == "acme"
        forged = mint_credential(CredentialKind.CLIENT).text
        changed = text[:-1] + ("a" if text[-1] != "a" else "b")
        others = [mint_credential(kind).text for kind in (CredentialKind.WORKER, CredentialKind.ADMIN)]
        for wrong in (f"mst_{key.keyid}{forged[16:]}", "", "sk-1234", changed, text + "a", *others, "é", "mst_" * 50):
            error = await refuse(ring, {"authorization": f"Bearer {wrong}"})
            assert not wrong or wrong not in error.message
        for value in (f"Basic {text}", text):
            await refuse(ring, {"authorization": value})
        assert (await refuse(ring, {})).message == "API key is missing."
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
        since = await sync_to_async(read_mark)()
        await identify(ring, text)
        await sync_to_async(revoke_api_key)(key_id=key.pk, actor=ACTOR)
        catalogue.apply_keys(await sync_to_async(catalogue.load_keys)(since), replace=False)
        await refuse(ring, {"authorization": f"Bearer {text}"})
        assert catalogue.lookups == 1


def read_mark() -> int:
    return read_marks(since=None, gateway_id=uuid.uuid4(), credentials=[], dead_s=10).since


def mark_now() -> int:
    """Return the mark that nothing committed so far reaches.

    The real one is the oldest transaction of the whole server, on which other tests run theirs: it may lie further back.
    """
    oldest = read_mark()
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
        now = int(cursor.fetchone()[0])
    assert oldest <= now
    return now


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


@pytest.mark.parametrize("behind", [timedelta(hours=2), timedelta(hours=-2)], ids=["behind", "ahead"])
def test_a_revocation_is_seen_whatever_the_clock_of_its_writer_says(behind: timedelta) -> None:
    key, _ = make_key("k")
    other, _ = make_key("o", tenant="closing")
    catalogue = Catalogue(LIMITS)
    since = read_mark()
    moment = timezone.now() - behind
    ApiKey.objects.filter(pk=key.pk).update(revoked_at=moment, updated_at=moment)
    Tenant.objects.filter(name="closing").update(is_active=False, updated_at=moment)
    entries = dict(catalogue.load_keys(since))
    assert entries.keys() == {key.keyid, other.keyid}
    assert all(entry.revoked for entry in entries.values())


def test_a_change_is_seen_however_late_it_is_committed() -> None:
    late, _ = make_key("late")
    writer = connections["default"].copy()
    try:
        writer.set_autocommit(False)
        with writer.cursor() as cursor:
            cursor.execute("UPDATE gateway_apikey SET revoked_at = now(), updated_at = now() - interval '1 day'")
        sooner, _ = make_key("committed sooner")
        since = read_mark()
        seen = dict(Catalogue(LIMITS).load_keys(since))
        assert not any(entry.revoked for entry in seen.values())
        assert sooner.keyid in seen
        writer.commit()
    finally:
        writer.close()
    assert dict(Catalogue(LIMITS).load_keys(since))[late.keyid].revoked


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


def test_a_kept_connection_that_the_server_ended_is_left_for_a_new_one() -> None:
    def ask() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            return int(cursor.fetchone()[0])

    with ThreadPoolExecutor(max_workers=1) as one:
        kept = [one.submit(with_kept_connection, ask).result() for _ in range(2)]
        assert kept[0] == kept[1]
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [kept[0]])
        assert one.submit(with_kept_connection, ask).result() != kept[0]
        one.submit(connections.close_all).result()
