"""The page on which the owner of a machine adds it as a node, with a code and without an account."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator

import httpx
import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import override_settings

from gateway.process import GatewayRuntime
from gateway.urls import make_application
from nodes.models import NodeCredential, SetupCode
from nodes.services.credentials import create_provider, find_credential, revoke_credential
from nodes.services.enrolment import create_setup_code, read_reached
from tests.fakes.asgi_client import on_our_server
from tests.fakes.clock import shift_clock
from tests.fakes.nodes import ACTOR, audited, make_node, make_presence

pytestmark = pytest.mark.django_db(transaction=True)
TOKEN = re.compile(r"msw_[0-9A-Za-z_]{51}")


@pytest.fixture
async def owner() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(on_our_server(make_application(GatewayRuntime())))
    with override_settings(GATEWAY_PUBLIC_URL="https://gateway.example.com"):
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client
    await sync_to_async(connections.close_all)()


@sync_to_async
def make_code(name: str = "attic") -> str:
    create_provider(name="local", actor=ACTOR)
    return create_setup_code(name=name, provider_name="local", actor=ACTOR)[1]


async def test_a_code_shows_its_credential_once_in_a_command_that_can_be_pasted(owner: httpx.AsyncClient) -> None:
    code = await make_code()
    asked = await owner.get("/setup", params={"code": code})
    assert (asked.status_code, code in asked.text) == (200, True)

    shown = await owner.post("/setup", data={"code": code.lower().replace("-", " "), "software": "ollama"})

    (token,) = set(TOKEN.findall(shown.text))
    command = (
        f"./muster node --gateway https://gateway.example.com --token {token} --name attic --backend http://127.0.0.1:11434"
    )
    assert command in html.unescape(shown.text)
    assert "no-store" in shown.headers["cache-control"]
    found = await sync_to_async(find_credential)(token)
    assert found is not None
    again = await owner.post("/setup", data={"code": code})
    assert (again.status_code, TOKEN.findall(again.text)) == (400, [])
    assert [(await sync_to_async(audited)(f"setup_code.{what}"))[0].target for what in ("create", "use")] == ["attic", "attic"]


async def test_a_code_that_is_wrong_or_too_old_or_of_a_revoked_credential_shows_nothing(
    owner: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, revoked = await make_code("old"), await sync_to_async(create_setup_code)(name="r", provider_name="local", actor=ACTOR)
    await sync_to_async(revoke_credential)(credential_id=revoked[0].credential_id, actor=ACTOR)
    shift_clock(monkeypatch, 3601)
    for code in (old, revoked[1], "AAAAA-AAAAA", "", "\x00", "x" * 500):
        refused = await owner.post("/setup", data={"code": code})
        assert (refused.status_code, TOKEN.findall(refused.text)) == (400, []), code
        assert "Ask for another one." in refused.text


async def test_whoever_guesses_codes_waits(owner: httpx.AsyncClient) -> None:
    code = await make_code()
    for _guess in range(20):
        assert (await owner.post("/setup", data={"code": "AAAAA-AAAAA"})).status_code == 400
    refused = await owner.post("/setup", data={"code": code})
    assert (refused.status_code, TOKEN.findall(refused.text)) == (429, [])
    assert await SetupCode.objects.filter(used_at__isnull=True).acount() == 1


async def test_the_page_follows_the_node_of_its_code_and_no_other(owner: httpx.AsyncClient) -> None:
    shown = await owner.post("/setup", data={"code": await make_code(), "software": "vllm"})
    state = html.unescape(re.search(r'src="(/setup/state[^"]+)"', shown.text)[1])  # type: ignore[index]
    assert "Waiting for the node to connect." in (await owner.get(state)).text

    credential = await NodeCredential.objects.aget()
    node = await sync_to_async(make_node)(name="attic", credential=credential, model_names=["llama3"])
    await sync_to_async(make_presence)(node)
    await sync_to_async(make_node)(name="other")

    page = (await owner.get(state)).text
    assert "The node is connected." in page
    assert "llama3" in page
    assert "other" not in page
    forged = await owner.get(f"{state}x")
    assert (forged.status_code, "attic" in forged.text) == (403, False)
    assert [one.name for one in await sync_to_async(read_reached)(credential.pk)] == ["attic"]


async def test_the_page_speaks_the_language_of_the_browser(owner: httpx.AsyncClient) -> None:
    for asked, answered in (("de-AT", "de"), ("fr", "en")):
        page = await owner.get("/setup", headers={"accept-language": asked})
        assert f'<html lang="{answered}">' in page.text
