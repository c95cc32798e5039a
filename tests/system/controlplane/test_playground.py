"""The playground without a browser: who may, which key is used, and how an answer passes through whatever the gateway does."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Permission
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session
from django.test import Client, RequestFactory
from django.urls import reverse
from django.utils import timezone

from controlplane.playground import relay
from controlplane.playground.asks import AskRefused, GatewayUnreachable, SignedOut, TooManyAnswers, build_body, read_ask
from controlplane.playground.keys import SESSION_KEYS, _cipher, _open_held, lend_key
from controlplane.playground.relay import Call, Relay
from controlplane.playground.views import SAID_BY_SCRIPTS
from core.limits import limits
from core.models import User
from gateway.models import ApiKey
from gateway.services.models import allow_model
from gateway.services.tenants import create_tenant, disable_tenant
from tests.fakes.control_process import free_port
from tests.fakes.nodes import ACTOR, audited, make_node, make_operator, make_presence
from tests.fakes.waiting import eventually
from wire.credentials import CredentialKind, mint_credential

pytestmark = pytest.mark.django_db(transaction=True)
PAGE, SEND, CODE, TICKET = (f"/admin/playground/{name}" for name in ("", "send", "code", "ticket"))
MODEL = "tiny"


def form(**fields: Any) -> dict[str, Any]:
    return {"surface": "chat", "model": MODEL, "tenant": "default", "prompt": "Hello", **fields}


def post(client: Client, path: str, **fields: Any) -> Any:  # Django's test response
    return client.post(path, form(**fields), content_type="application/json")


def say_error(answer: Any) -> dict[str, str]:
    said: dict[str, str] = answer.json()["error"]
    return said


@pytest.fixture
def operator(settings: Any) -> Client:
    """Somebody who may do everything, at a control plane whose gateway does not run."""
    settings.PLAYGROUND_GATEWAY_URL = f"http://127.0.0.1:{free_port()}"
    create_tenant(name="default", actor=ACTOR)
    allow_model(name=MODEL, actor=ACTOR)
    client = Client()
    client.force_login(make_operator())
    return client


def make_helper(*permissions: str) -> Client:
    person = make_operator("ben", is_superuser=False)
    for name in permissions:
        person.user_permissions.add(Permission.objects.get(content_type__app_label="gateway", codename=name))
    client = Client()
    client.force_login(person)
    return client


# The page


def test_the_page_is_for_operators_who_may_see_models(operator: Client) -> None:
    stranger = make_helper("view_tenant")
    assert stranger.get(PAGE).status_code == 403
    assert f'href="{PAGE}"' not in stranger.get(reverse("admin:index")).content.decode()
    for path in (SEND, CODE, TICKET):
        assert (post(stranger, path).status_code, post(Client(), path).status_code) == (403, 401)
    assert Client().get(PAGE).status_code == 302


def test_the_page_may_ask_the_nodes_that_take_tickets_and_nobody_else(operator: Client) -> None:
    assert "--ticket-url" in operator.get(PAGE).content.decode()
    for number, (url, error) in enumerate((
        ("http://gpu1.lan:8090", ""), ("http://gpu1.lan:8090/deep", ""), ("https://[fd00::1]:8443", ""),
        ("http://gpu2.lan:8090", "was not looked at yet"), ("http://a;script-src *", ""), ("http://b 'unsafe-inline'", ""),
    )):  # fmt: skip
        make_presence(make_node(f"n{number}", ticket_url=url, ticket_error=error))
    shown = operator.get(PAGE)
    assert "start one with" not in shown.content.decode()
    (asked,) = [part for part in shown["Content-Security-Policy"].split("; ") if part.startswith("connect-src")]
    assert asked == "connect-src 'self' http://gpu1.lan:8090 https://[fd00::1]:8443"
    assert operator.get(reverse("admin:index"))["Content-Security-Policy"].count("connect-src 'self';") == 1


# The key


def test_the_key_is_made_once_for_a_person_and_tenant_and_is_stored_nowhere_in_clear(operator: Client) -> None:
    first, second = post(operator, SEND), post(operator, SEND)
    assert [answer.status_code for answer in (first, second)] == [502, 502]
    assert "MUSTER_PLAYGROUND_GATEWAY_URL" in say_error(first)["message"]
    key = ApiKey.objects.get()
    assert (key.name, key.tenant.name, key.allowed_models) == ("playground: ada", "default", [])
    assert key.expires_at is not None
    assert key.expires_at - timezone.now() <= timedelta(hours=1)
    assert [event.actor for event in audited("api_key.create")] == ["user:ada"]
    session = Session.objects.get()
    assert "mst_" not in json.dumps(session.get_decoded())
    assert b"mst_" not in base64.b64decode(session.session_data.partition(":")[0] + "==", altchars=b"-_")
    create_tenant(name="research", actor=ACTOR)
    post(operator, SEND, tenant="research")
    assert sorted(ApiKey.objects.values_list("tenant__name", flat=True)) == ["default", "research"]
    assert not ApiKey.objects.exclude(revoked_at=None).exists()
    operator.post(reverse("admin:logout"))
    assert not ApiKey.objects.filter(revoked_at=None).exists()
    assert {event.target for event in audited("api_key.revoke")} == {"playground: ada"}


def open_tab(operator: Client) -> Any:
    """A request of a tab that has read the session before it asks."""
    tab = RequestFactory().post(SEND)
    tab.user = User.objects.get(username="ada")
    tab.session = SessionStore(operator.session.session_key)
    assert SESSION_KEYS not in tab.session
    return tab


def test_a_second_tab_takes_the_key_of_the_first_and_none_is_left_for_a_session_that_has_ended(operator: Client) -> None:
    one, other, late = (open_tab(operator) for _ in range(3))
    assert lend_key(one, "default") == lend_key(other, "default")
    assert ApiKey.objects.get().revoked_at is None
    operator.post(reverse("admin:logout"))
    with pytest.raises(SignedOut):
        lend_key(late, "default")
    assert not ApiKey.objects.filter(revoked_at=None).exists()


def test_a_key_that_soon_expires_is_replaced_and_still_serves_what_it_began(operator: Client) -> None:
    post(operator, SEND)
    entry, console = operator.session[SESSION_KEYS]["default"], limits().console
    made_at = datetime.fromtimestamp(_cipher().extract_timestamp(entry["sealed"].encode()), UTC)
    edge = made_at + timedelta(seconds=console.playground_key_s - console.playground_key_reserve_s)
    for off_s, is_held in ((-5, True), (5, False)):
        assert (_open_held(entry, at=edge + timedelta(seconds=off_s)) is not None) is is_held
    ApiKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    post(operator, SEND)
    assert ApiKey.objects.filter(revoked_at=None).count() == 2
    assert ApiKey.objects.filter(revoked_at=None, expires_at__gt=timezone.now()).count() == 1


def test_what_the_session_holds_opens_with_the_secret_of_the_installation_alone(operator: Client, settings: Any) -> None:
    post(operator, SEND)
    entry = operator.session[SESSION_KEYS]["default"]
    settings.SECRET_KEY = "another secret of another installation"
    assert _open_held(entry) is None


def test_a_pasted_key_is_used_and_not_kept(operator: Client) -> None:
    helper = make_helper("view_model")
    missing = post(helper, SEND)
    assert (missing.status_code, say_error(missing)["param"]) == (400, "key")
    assert say_error(post(helper, SEND, key="mst_\u00e4"))["param"] == "key"
    assert say_error(post(helper, SEND, key="mst_a\r\nx: y"))["param"] == "key"
    assert post(helper, SEND, key="mst_pasted").status_code == 502
    assert SESSION_KEYS not in helper.session
    assert not ApiKey.objects.exists()


def test_what_the_page_never_sends_is_refused(operator: Client) -> None:
    disable_tenant(name="default", actor=ACTOR)
    for tenant in ("default", "nobody", ""):
        refused = post(operator, SEND, tenant=tenant)
        assert (refused.status_code, say_error(refused)["param"]) == (400, "tenant")
    for surface in ("speech", "/v1/models", "http://evil.test/v1/chat/completions", "../admin/keys"):
        assert say_error(post(operator, SEND, surface=surface))["param"] == "surface"
    assert operator.post(SEND, form()).status_code == 400
    assert operator.get(SEND).status_code == 405
    large = operator.post(SEND, b" " * (limits().console.playground_form_bytes + 1), content_type="application/json")
    assert (large.status_code, say_error(large)["code"]) == (413, "BODY_TOO_LARGE")
    assert not ApiKey.objects.exists()


# A relay, against servers that do what no gateway should


@dataclass
class Rogue:
    """A server on loopback. ``sent``: bytes it could write; ``lost``: connections that their client closed."""

    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter, Rogue], Awaitable[None]]
    sent: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    heard: bytes = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heard = await reader.readuntil(b"\r\n\r\n")
            await self.talk(reader, writer, self)
        except ConnectionError:
            self.lost.set()
        finally:
            writer.close()


@asynccontextmanager
async def rogue(talk: Callable[..., Awaitable[None]], settings: Any) -> AsyncIterator[Rogue]:
    made = Rogue(talk)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    settings.PLAYGROUND_GATEWAY_URL = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield made


def answer(status: int, body: object) -> Callable[..., Awaitable[None]]:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: Rogue) -> None:
        said = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\nx-request-id: req_1\r\n"
        writer.write(f"{head}content-length: {len(said)}\r\nconnection: close\r\n\r\n".encode() + said)
        server.heard += await reader.read(65_536)
        await writer.drain()

    return talk


async def test_the_page_is_told_what_to_ask_the_node_of_its_ticket(operator: Client, settings: Any) -> None:
    given = {"ticket": "a.b.c", "ticket_id": "tkt_1", "base_url": "http://gpu1.lan:8090/v1", "model": "tiny-q8", "node_id": "n"}
    ask = sync_to_async(lambda **fields: post(operator, TICKET, max_tokens="20", priority="low", **fields))
    async with rogue(answer(201, given), settings) as gateway:
        said = (await ask(surface="messages", system="Be brief.")).json()
    head, _, wish = gateway.heard.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/tickets ")
    assert json.loads(wish) == {
        "model": MODEL, "dialects": ["messages"], "prompt_tokens_est": 3, "max_tokens": 20,
        "x_pool_options": {"priority": "low"},
    }  # fmt: skip
    assert (said["url"], said["ticket"], said["body"]["model"]) == ("http://gpu1.lan:8090/v1/messages", "a.b.c", "tiny-q8")
    assert ("x_pool_options" in said["body"], said["request"]) == (False, "req_1"), "a node knows nothing of them"
    for status, body in ((200, {"relay": True, "base_url": "http://g/v1"}), (429, {"error": {"message": "slow down"}})):
        async with rogue(answer(status, body), settings):
            passed = await ask()
        assert (passed.status_code, passed.json()) == (status, body)


async def test_a_new_key_is_tried_and_the_page_says_what_came_of_it(operator: Client, settings: Any) -> None:
    key = mint_credential(CredentialKind.CLIENT).text
    ask = sync_to_async(lambda text=key: operator.post("/admin/playground/trial", {"key": text, "model": MODEL}).text)
    good = {"choices": [{"message": {"role": "assistant", "content": "Hello & <hi>"}}]}
    for status, body, said in (
        (200, good, "Hello &amp; &lt;hi&gt;"),
        (429, {"error": {"message": "slow down"}}, "slow down"),
        (502, ["?"], "The gateway answered with status 502"),
    ):
        async with rogue(answer(status, body), settings) as gateway:
            assert said in await ask()
        assert f"bearer {key}".encode().lower() in gateway.heard.lower()
    assert "This is no API key" in await ask("sk-1")
    settings.PLAYGROUND_GATEWAY_URL = f"http://127.0.0.1:{free_port()}"
    assert "No gateway answers" in await ask()


def test_the_scripts_say_nothing_that_the_page_does_not_know() -> None:
    folder, said = Path("controlplane/static/muster"), set()
    for script in folder.glob("playground*.js"):
        text = script.read_text(encoding="utf-8")
        said |= set(re.findall(r'say\(\s*"((?:[^"\\]|\\.)*)"', text))
        said |= set(re.findall(r'^    \w+: "([A-Z][^"]*)",$', text, re.MULTILINE))
    assert said <= set(SAID_BY_SCRIPTS)
    assert len(said) > 30


TURNS = [{"role": "user", "text": "Hi"}, {"role": "assistant", "text": "Hello"}, {"role": "system", "text": "no"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    ("surface", "turns", "shape"),
    [
        ("chat", "messages", ("response_format", "json_schema", "schema")),
        ("messages", "messages", ()),
        ("responses", "input", ("text", "format", "schema")),
    ],
)
def test_earlier_turns_and_a_schema_go_where_the_endpoint_wants_them(surface: str, turns: str, shape: tuple[str, ...]) -> None:
    said = {**form(surface=surface), "turns": TURNS, "schema": json.dumps(SCHEMA)}
    body: Any = build_body(read_ask(json.dumps(said).encode()))
    assert body[turns] == [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hello"},
    ]  # fmt: skip
    for member in shape:
        body = body[member]
    assert not shape or body == SCHEMA


@pytest.mark.parametrize(("schema", "why"), [("{", "not JSON"), ("[]", "an object"), ("[" * 70 + "]" * 70, "an object")])
def test_a_schema_that_is_none_is_refused_by_its_field(schema: str, why: str) -> None:
    with pytest.raises(AskRefused, match=why) as refused:
        read_ask(json.dumps({**form(), "schema": schema}).encode())
    assert refused.value.param == "schema"


def test_a_conversation_is_bounded() -> None:
    turns = [{"role": "user", "text": "x"}] * (limits().console.playground_turns + 1)
    with pytest.raises(AskRefused, match="at most"):
        read_ask(json.dumps({**form(), "turns": turns}).encode())


CALL = Call(path="/v1/chat/completions", body=b"{}", headers={"authorization": "Bearer mst_x"})


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: Rogue) -> None:
    if not await reader.read(-1):
        server.lost.set()


async def talk_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: Rogue) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    while True:
        writer.write(b":" * 65_536)
        await writer.drain()
        server.sent += 65_536


async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: Rogue) -> None:
    writer.write(b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n")
    await writer.drain()


async def test_a_reader_that_stops_reading_stops_the_gateway_and_leaving_closes_it(settings: Any) -> None:
    async with rogue(talk_for_ever, settings) as server:
        answer = Relay(CALL)
        assert (await answer.head()).status == 200
        seen = [-1]

        def stands_still() -> bool:
            seen.append(server.sent)
            return seen[-1] == seen[-2]

        await eventually(stands_still, what="nothing more is taken", pause_s=0.2)
        assert seen[-1] < limits().console.playground_chunks * 65_536 + 16 * 2**20  # what waits here, and what sockets hold
        await answer.aclose()
        await asyncio.wait_for(server.lost.wait(), 30)


async def test_only_so_many_answers_are_on_their_way(settings: Any) -> None:
    async with rogue(stay_silent, settings):
        answers = [Relay(CALL) for _ in range(limits().console.playground_answers)]
        with pytest.raises(TooManyAnswers):
            Relay(CALL)
        for answer in answers:
            answer.close()
        await asyncio.gather(*(answer.aclose() for answer in answers))
        again = Relay(CALL)
        await again.aclose()


async def test_a_redirect_leads_nowhere(settings: Any) -> None:
    async with rogue(redirect, settings):
        answer = Relay(CALL)
        head = await answer.head()
        assert (head.status, "location" in head.headers) == (307, False)
        assert [chunk async for chunk in answer] == []


async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: Rogue) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\ndata: half")
    await writer.drain()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: Rogue) -> None:
    writer.close()


async def test_an_answer_that_breaks_off_ends_and_a_gateway_that_hangs_up_is_said_without_the_key(
    settings: Any, caplog: Any
) -> None:
    async with rogue(break_off, settings):
        answer = Relay(CALL)
        await answer.head()
        assert b"".join([chunk async for chunk in answer]) == b"data: half"
    async with rogue(hang_up, settings):
        with pytest.raises(GatewayUnreachable, match="broke the connection off"):
            await Relay(CALL).head()
    assert "mst_x" not in caplog.text + repr(CALL)
    assert relay._open == set()


def test_a_link_that_names_a_model_has_it_chosen(operator: Client) -> None:
    for name in ("alpha", "omega"):
        allow_model(name=name, actor=ACTOR)
    for wanted, chosen in (("omega", "omega"), ("nobody", "alpha")):
        answer: Any = operator.get("/admin/playground/", {"model": wanted})
        assert answer.context["chosen_model"] == chosen
