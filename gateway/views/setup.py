"""``/setup``: how a machine becomes a node, for its owner, who has no account: a code for a credential, once, and what follows.

The pages need no script and no other file, as a gateway serves no static ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs, urlencode

from django.conf import settings
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils import translation
from django.utils.translation import gettext as _

from core.db.threads import run_in_database
from core.limits import limits
from core.throttle import AuthThrottle
from gateway.process import GatewayRuntime
from gateway.request.client import ClientConnection
from gateway.request.response import Application
from gateway.views.endpoints import make_endpoint
from nodes.errors import BadRequest
from nodes.services.enrolment import (
    CHOICES,
    Software,
    is_local,
    read_progress,
    sign_progress,
    use_setup_code,
    write_commands,
)

Context = Mapping[str, object]


class SetupViews:
    """The three pages. Whoever guesses codes waits, by address; a code has 50 bits and lives an hour."""

    def __init__(self) -> None:
        self._throttle = AuthThrottle()

    async def show_form(self, client: ClientConnection) -> None:
        """``GET /setup``: ask for the code and what the machine runs."""
        code = _read_query(client).get("code", "")[: limits().nodes.setup_code_chars]
        await self._answer(client, 200, "setup/form.html", {"code": code, "software": Software.OURS.value})

    async def use_code(self, client: ClientConnection) -> None:
        """``POST /setup``: take the code, show what is pasted on the machine, and follow what comes of it."""
        body = (await client.read_body(limits().nodes.setup_form_bytes)).decode("utf-8", "replace")
        form = _read_fields(body)
        software = form.get("software", "")
        if software not in set(Software):
            software = Software.OURS.value
        given = {"code": form.get("code", "")[: limits().nodes.setup_code_chars], "software": software}
        if self._throttle.is_blocked(client.address):
            wait = _("Too many wrong codes came from here. Wait a second and try again.")
            await self._answer(client, 429, "setup/form.html", {**given, "problem": wait})
            return
        try:
            credential, token = await run_in_database(use_setup_code, given["code"])
        except BadRequest as refusal:
            self._throttle.record_failure(client.address)
            await self._answer(client, 400, "setup/form.html", {**given, "problem": str(refusal)})
            return
        gateway = str(settings.GATEWAY_PUBLIC_URL).rstrip("/")
        with translation.override(_read_language(client)):
            commands = write_commands(
                Software(software), gateway=gateway, token=token, provider=credential.provider.name, name=credential.name
            )
        progress = urlencode({"progress": sign_progress(credential)})
        context = {"commands": commands, "gateway": gateway, "is_local": is_local(gateway), "progress": progress}
        await self._answer(client, 200, "setup/commands.html", context)

    async def show_state(self, client: ClientConnection) -> None:
        """``GET /setup/state``: how far the node is; it loads itself again."""
        nodes = await run_in_database(read_progress, _read_query(client).get("progress", ""))
        await self._answer(client, 200 if nodes is not None else 403, "setup/state.html", {"nodes": nodes})

    async def _answer(self, client: ClientConnection, status: int, template: str, context: Context) -> None:
        language, nonce = _read_language(client), secrets.token_urlsafe(16)

        def render() -> str:
            with translation.override(language):
                return render_to_string(template, {**context, "choices": CHOICES, "nonce": nonce, "language": language})

        page = await run_in_database(render)  # reads files, and the words of a lazy text
        policy = (
            f"default-src 'none'; style-src 'nonce-{nonce}'; img-src 'self'; form-action 'self'; frame-src 'self'; "
            "base-uri 'none'; frame-ancestors 'self'"
        )
        headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", policy.encode()),
            (b"cache-control", b"no-store"),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
            (b"vary", b"accept-language"),
        ]
        client.respond(status, headers, page.encode())


def make_setup_routes(runtime: GatewayRuntime) -> list[tuple[str, Application]]:
    """Return (pattern, application) of ``/setup`` and what follows it."""
    views = SetupViews()
    page = make_endpoint(runtime, {"GET": views.show_form, "HEAD": views.show_form, "POST": views.use_code})
    return [("setup", page), ("setup/state", make_endpoint(runtime, {"GET": views.show_state}))]


def _read_query(client: ClientConnection) -> dict[str, str]:
    return _read_fields(client.scope.get("query_string", b"").decode("latin-1"))


def _read_fields(text: str) -> dict[str, str]:
    """Return the last value of each field; of a text with too many of them none."""
    try:
        found = parse_qs(text, max_num_fields=limits().nodes.setup_fields)
    except ValueError:
        return {}
    return {name: values[-1] for name, values in found.items()}


def _read_language(client: ClientConnection) -> str:
    request = HttpRequest()
    request.META["HTTP_ACCEPT_LANGUAGE"] = client.headers.get("accept-language", "")
    return translation.get_language_from_request(request)
