"""The scene of the demo, written once into a fresh installation, and played as long as the demo runs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from django.apps import apps
from django.core.management import CommandError
from django.db import connection, transaction

from controlplane.demo import scale
from controlplane.demo.fleet import (
    ACTOR,
    ALIASES,
    CREDENTIAL,
    FALLBACKS,
    MISSING,
    MODELS,
    NODES,
    TENANTS,
    VERSION,
    DemoNode,
)
from controlplane.demo.nodes import LONG, Callers, NodeKeys, Pinned, ScriptedNode, list_held, runner_id_of
from controlplane.demo.people import Approvals, Signer, past
from controlplane.demo.traffic import DemoKey, sum_up, write_gpu_history, write_week
from controlplane.launcher.console import progress
from controlplane.launcher.files import read_json, write_json
from core.models import User
from gateway.routing import Target
from gateway.services.figures import update_figures
from gateway.services.keys import create_api_key, revoke_api_key
from gateway.services.models import allow_model, change_model_details, change_model_prices, create_alias, disallow_model
from gateway.services.tenants import change_tenant_budgets, create_tenant
from gateway.values import Budget, BudgetKind
from governance.keys import enrol_passkey
from nodes.services.credentials import create_credential
from nodes.services.drains import cordon_node, drain_node, undrain_node
from wire import COMMAND, clock
from wire.optoken.approval import decode_bytes, encode_bytes

FILE = "demo-fleet.json"
"""Beside the installation's own files: keys of the demo's people and nodes, with which its pages can be tried and shown."""
_WEIGHTS = {"people": 2, "requests": 14, "GPUs": 4, "sums": 20, "figures": 2}
"""How long the parts take, about, in seconds of a small machine."""
_DRAIN_S, _SETTLE_S = 1_200.0, 2.0


class Meter:
    """Tells a person how far the writing is, in percent, and how long it still takes."""

    def __init__(self, show: Callable[[str], None] = progress) -> None:
        self._show, self._began, self._done, self._said = show, clock.monotonic(), 0.0, 0

    @contextmanager
    def part(self, name: str) -> Iterator[Callable[[float], None]]:
        """Measure one part; what is given is called with how much of it is done."""
        total = sum(_WEIGHTS.values())

        def say_share(share: float) -> None:
            percent = int(100 * (self._done + share * _WEIGHTS[name]) / total)
            if percent >= self._said + 10:
                self._said = percent
                left = (clock.monotonic() - self._began) * (100 - percent) / max(1, percent)
                self._show(f"{percent:3} %  writing {name}, about {left:.0f} s to go")

        say_share(0.0)
        yield say_share
        self._done += _WEIGHTS[name]


@dataclass(frozen=True, slots=True)
class Kept:
    """What the demo keeps of itself in ``FILE``."""

    data: dict[str, object]

    def of(self, name: str) -> Mapping[str, object]:
        found = self.data.get(name)
        return found if isinstance(found, dict) else {}

    @property
    def secret(self) -> str:
        return str(self.data["credential"])

    @property
    def pinned(self) -> Pinned:
        said = self.of("policy")
        return Pinned(int(str(said["version"])), str(said["sha256"]))

    @property
    def nodes(self) -> dict[str, NodeKeys]:
        return {name: _read_keys(str(text)) for name, text in self.of("nodes").items()}

    @property
    def people(self) -> dict[str, Ed25519PrivateKey]:
        return {name: _read_private(str(text)) for name, text in self.of("people").items()}

    @property
    def api_keys(self) -> dict[str, list[str]]:
        return {name: [str(one) for one in texts] for name, texts in self.of("api_keys").items() if isinstance(texts, list)}


def find_scene(data: Path) -> Kept | None:
    """Return what an earlier start of the demo wrote on this installation; None when there was none."""
    kept = read_json(data / FILE)
    return Kept(kept) if kept.get("policy") else None


def require_unused() -> None:
    """Raise CommandError when the installation has served anybody: the demo would mix with that."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT (SELECT count(*) FROM (SELECT FROM gateway_requestrecord LIMIT 1000) AS r),"
            "       (SELECT count(*) FROM nodes_node WHERE name <> 'local'), (SELECT count(*) FROM governance_operation)"
        )
        requests, nodes, operations = cursor.fetchone()
    found = [f"{count:,}{'+' if count == 1000 else ''} {what}" for count, what in (
        (requests, "requests"), (nodes, "nodes"), (operations, "operations")) if count]  # fmt: skip
    if found:
        raise CommandError(
            f"This installation is in use ({', '.join(found)}), and the demo would mix with that. Give the demo a directory of "
            f"its own: {COMMAND} demo fleet --data DIR"
        )


def write_scene(data: Path, admin: User, signers: Mapping[str, User], *, requests: int) -> Kept:
    """Write everything into an installation that nobody used, and return what is to be kept of it.

    ``requests``: about how many there are in the week.
    """
    now, meter = clock.now(), Meter()
    with meter.part("people"):
        kept = _write_people(now, admin, signers)
    write_json(data / FILE, kept)  # without its policy it counts as none
    tenants = {tenant.name: _list_keys(tenant.name) for tenant in TENANTS}
    with meter.part("requests") as show:
        count = write_week(now, tenants, show, requests=requests)
    _write_budgets(now)
    memory = {node: list_held(node, dict(node.models)) for node in NODES}
    with meter.part("GPUs"):
        moments = write_gpu_history(now, memory)
    with meter.part("sums") as show:
        sum_up(show, count)
    with meter.part("figures"):
        while update_figures():
            pass
    people = [Signer(user, Kept(kept).people[name]) for name, user in signers.items()]
    approvals = Approvals(now, admin=admin, signers=people, keys=Kept(kept).nodes)
    pinned = approvals.write_past()
    approvals.write_open()
    _write_nodes_said(Kept(kept).nodes, pinned)
    kept["policy"] = {"version": pinned.version, "sha256": pinned.sha256}
    write_json(data / FILE, kept)
    progress(f"100 %  {count:,} requests, {moments:,} moments of GPUs, {len(NODES)} nodes, {len(TENANTS)} tenants")
    return Kept(kept)


def grow(*, nodes: int, records: int) -> None:
    """Make the scene as large as a large installation; 0 = as it is."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT (SELECT count(*) FROM nodes_node), (SELECT count(*) FROM gateway_usageevent)")
        has_nodes, has_records = cursor.fetchone()
    if nodes > has_nodes:
        scale.add_nodes(nodes - has_nodes)
        progress(f"{nodes:,} nodes")
    if records > has_records:
        began = clock.monotonic()
        scale.add_records(records - has_records, _tell("writing requests", began))
        written = clock.monotonic()
        progress(f"{records:,} requests: written in {written - began:.0f} s")
        sum_up(_tell("summing up", written), records - has_records)
        progress(f"summed up for charts in {clock.monotonic() - written:.0f} s")


def _tell(what: str, began: float) -> Callable[[float], None]:
    said = [0.0]

    def show(share: float) -> None:
        if share >= said[0] + 0.1:
            said[0] = share
            left = (clock.monotonic() - began) * (1 - share) / share
            progress(f"{100 * share:3.0f} %  {what}, about {left:.0f} s to go")

    return show


# People, keys, models


@transaction.atomic
def _write_people(now: datetime, admin: User, signers: Mapping[str, User]) -> dict[str, object]:
    keys = {node.name: NodeKeys(Ed25519PrivateKey.generate(), os.urandom(32)) for node in NODES}
    people = {name: Signer(user, Ed25519PrivateKey.generate()) for name, user in signers.items()}
    with past(now - timedelta(days=21)) as source:
        credential, text = create_credential(name=CREDENTIAL, provider_name="local", max_nodes=1_000, actor=ACTOR)
        passkey = _make_passkey(admin)
        for signer in people.values():
            signer.enrol()
        api_keys: dict[str, list[str]] = {}
        for tenant in TENANTS:
            source.sleep(600)
            create_tenant(name=tenant.name, actor=f"user:{admin.username}")
            api_keys[tenant.name] = [
                create_api_key(
                    name=name, tenant_name=tenant.name, actor=f"user:{admin.username}",
                    expires_at=now + timedelta(days=4) if name == "translations" else None,
                )[1]
                for name in tenant.keys
            ]  # fmt: skip
        old, _ = create_api_key(name="intern-2025", tenant_name="research", actor=f"user:{admin.username}")
        for model in MODELS:
            source.sleep(120)
            allow_model(name=model.name, actor=f"user:{admin.username}")
            price, answer = map(Decimal, model.prices)
            change_model_prices(
                name=model.name, input_price=price, cached_price=price / 4, output_price=answer, actor=f"user:{admin.username}"
            )
        allow_model(name=MISSING, actor=f"user:{admin.username}")
        for name, others in FALLBACKS.items():
            change_model_details(
                name=name, fallbacks=others, context_tokens=None, tokenizer="", tidy=False, resumes=False, actor="user:ana"
            )
        for name, targets, tenant_name in ALIASES:
            create_alias(
                name=name, targets=[Target(model, weight) for model, weight in targets], actor="user:ana",
                tenant_name=tenant_name or None,
            )  # fmt: skip
        revoke_api_key(key_id=old.pk, actor=f"user:{admin.username}")
        _write_nodes(now, keys, credential.pk)
        if not apps.get_model("nodes", "Node").objects.filter(model_names__contains=["muster-tiny"]).exists():
            disallow_model(name="muster-tiny", actor=ACTOR)
    with connection.cursor() as cursor:
        for table in ("gateway_tenant", "gateway_apikey", "gateway_model", "gateway_modelalias", "nodes_nodecredential"):
            cursor.execute(f"UPDATE {table} SET created_at = %s WHERE created_at >= %s", [now - timedelta(days=21), now])  # noqa: S608  # constants
    return {
        "credential": text, "passkey": passkey, "api_keys": api_keys,
        "people": {name: encode_bytes(_bytes_of(signer.private)) for name, signer in people.items()},
        "nodes": {name: encode_bytes(_bytes_of(one.private) + one.op_key) for name, one in keys.items()},
    }  # fmt: skip


def _bytes_of(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def _read_private(text: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(decode_bytes(text)[:32])


def _read_keys(text: str) -> NodeKeys:
    return NodeKeys(_read_private(text), decode_bytes(text)[32:])


def _make_passkey(admin: User) -> dict[str, object]:
    """Enrol a passkey for the administrator, and return it as a browser's virtual authenticator takes it."""
    from governance.passkeys import NewPasskey  # only pages need the library behind it

    private, keyid = generate_private_key(SECP256R1()), encode_bytes(os.urandom(16))
    public = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    passkey = NewPasskey(keyid=keyid, public_key=public, sign_count=0, is_backup_eligible=False, transports=("internal",))
    enrol_passkey(user=admin, passkey=passkey, label="demo", actor=f"user:{admin.username}")
    raw = private.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    return {"credential_id": keyid, "private_key": encode_bytes(raw), "user": admin.username}


def _list_keys(tenant: str) -> list[DemoKey]:
    rows = (
        apps.get_model("gateway", "ApiKey").objects.filter(tenant__name=tenant, revoked_at=None).order_by("created_at", "name")
    )
    return [DemoKey(row.pk, row.name) for row in rows]


def _write_budgets(now: datetime) -> None:
    # Of a size that makes the part that is used by now come out.
    for tenant in TENANTS:
        if tenant.budget is None:
            continue
        name, share, is_hard = tenant.budget
        kind = BudgetKind(name)
        day = now.replace(hour=0, minute=0, second=0, microsecond=0)
        since = day if "day" in name else day.replace(day=1)
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT sum({'cost_micros' if kind.is_cost else 'tokens'}) FROM gateway_usageevent"  # noqa: S608  # constants
                " WHERE tenant = %s AND created_at >= %s",
                [tenant.name, since],
            )
            (used,) = cursor.fetchone()
        amount = max(1_000_000, int(int(used or 0) / share))
        with past(now - timedelta(days=19)):
            change_tenant_budgets(name=tenant.name, budgets=[Budget(kind, amount, is_hard)], actor="user:ana")


# Nodes


def _write_nodes(now: datetime, keys: Mapping[str, NodeKeys], credential_id: int) -> None:
    provider = apps.get_model("nodes", "Provider").objects.get(name="local")
    rows, presences, online = apps.get_model("nodes", "Node"), apps.get_model("nodes", "NodePresence"), []
    times = apps.get_model("nodes", "NodeOnline")
    rows.objects.bulk_create(
        rows(
            id=node.id, name=node.name, owner_name=node.owner, provider=provider, credential_id=credential_id,
            gpu_name=node.gpu, vram_total_mb=node.vram_mb, agent_version=node.version, max_concurrent=node.slots,
            model_names=list(node.model_names),
            op_level=node.level, runner_id=runner_id_of(node, keys[node.name]), box_key=encode_bytes(keys[node.name].public),
            keeps_models=True, reloads_settings=node.version == VERSION, clock_skew_ms=0,
        )
        for node in NODES
    )  # fmt: skip
    presences.objects.bulk_create(
        presences(
            node_id=node.id, protocol="2026-11-muster-v1", last_heartbeat_at=now - (node.offline or timedelta()),
            reported_status="available", vram_used_mb=int(sum(one.used for one in list_held(node, dict(node.models)))),
            gpus=[{"index": 0, "name": node.gpu, "memory_total_mb": node.vram_mb}], observed_at=now,
        )
        for node in NODES
    )  # fmt: skip
    for place, node in enumerate(NODES):
        breaks = [timedelta(days=20), timedelta(days=3 + place % 4, hours=place)]
        online.append(times(node_id=node.id, began_at=now - breaks[0], ended_at=now - breaks[1]))
        ended = now - (node.offline or -timedelta(minutes=1))  # the first to be heard go on where this ends
        online.append(times(node_id=node.id, began_at=now - breaks[1] + timedelta(minutes=4), ended_at=ended))
    times.objects.bulk_create(online)
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE nodes_node SET created_at = %s WHERE credential_id = %s", [now - timedelta(days=20), credential_id]
        )


def _write_nodes_said(keys: Mapping[str, NodeKeys], pinned: Pinned) -> None:
    """Write what operators decided about nodes, and which policy the one trusts that is away."""
    now = clock.now()
    apps.get_model("nodes", "Node").objects.filter(pk__in=[node.id for node in NODES if node.offline]).update(
        policy_version=pinned.version, policy_sha256=pinned.sha256
    )
    for node in NODES:
        if node.is_cordoned:
            with past(now - timedelta(hours=26)):
                cordon_node(node_id=node.id, actor="user:cleo")


# Playing it


def play(kept: Kept, *, gateway: str, per_minute: float, nodes: int, on_ready: Callable[[], None]) -> None:
    """Keep the nodes connected and their callers asking until Ctrl-C or SIGTERM. ``nodes``: how many more there are as rows."""
    asyncio.run(_play(kept, gateway=gateway, per_minute=per_minute, nodes=nodes, on_ready=on_ready))


async def _play(kept: Kept, *, gateway: str, per_minute: float, nodes: int, on_ready: Callable[[], None]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    here = [node for node in NODES if node.offline is None]
    scripted = [
        ScriptedNode(
            node, kept.nodes[node.name], gateway=gateway, secret=kept.secret,
            pinned=Pinned() if node.name == "juno" else kept.pinned,
        )
        for node in here
    ]  # fmt: skip
    callers = Callers(gateway, kept.api_keys, per_minute)
    tasks = [asyncio.create_task(one.run()) for one in scripted]
    try:
        await asyncio.gather(*(one.is_connected.wait() for one in scripted))
        await _start_drains(here, callers, kept)
        if per_minute:
            tasks.append(asyncio.create_task(callers.run()))
        if nodes:
            tasks.append(asyncio.create_task(scale.keep_fresh()))
        on_ready()
        ended = [asyncio.create_task(stop.wait()), *tasks]
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a mistake of ours is said
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start_drains(here: list[DemoNode], callers: Callers, kept: Kept) -> None:
    """Drain again what was drained, as a drain ends with its node's session, and what runs something that takes long."""
    loop = asyncio.get_running_loop()
    for node in here:
        if node.is_drained:
            await asyncio.to_thread(_drain, node)
        if node.is_draining:
            await asyncio.to_thread(_undrain, node)
            await asyncio.sleep(_SETTLE_S)
            for _ in range(2):
                loop.run_in_executor(None, callers.ask, kept.api_keys["research"][0], node.model_names[0], LONG)
            await asyncio.sleep(_SETTLE_S)
            await asyncio.to_thread(_drain, node)


def _undrain(node: DemoNode) -> None:
    try:
        undrain_node(node_id=node.id, actor="user:ana")
    finally:
        connection.close()


def _drain(node: DemoNode) -> None:
    try:
        now, reason = clock.now(), "A new power supply." if node.is_drained else "A new driver."
        drain_node(node_id=node.id, actor="user:ana", reason=reason, timeout_s=_DRAIN_S)
        if node.is_drained:
            apps.get_model("nodes", "Node").objects.filter(pk=node.id).update(
                draining_since=now - timedelta(hours=2, minutes=10), drained_at=now - timedelta(hours=2, minutes=4),
                drain_deadline_at=None,
            )  # fmt: skip
    finally:
        connection.close()
