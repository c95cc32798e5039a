"""What the form of the page asks for: read, checked, and written as the JSON body of a surface. Pure."""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

import msgspec
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from core.admin_pages import Text
from core.errors import ContractError
from core.limits import limits
from wire.contract import ErrorCode


class PlaygroundError(ContractError):
    """Base of the tree. ``param`` names the field of the form."""


TENANT_FIELD = "tenant"
"""The field of an ask that names the tenant whose key is used."""


class AskRefused(PlaygroundError):
    """A field of the form cannot be used."""


class AskTooLarge(PlaygroundError, code=ErrorCode.BODY_TOO_LARGE, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
    """The form holds more than the page may send."""


class SignedOut(PlaygroundError, code=ErrorCode.NOT_PERMITTED, status=HTTPStatus.UNAUTHORIZED):
    def __init__(self) -> None:
        super().__init__(_("You are no longer signed in. Sign in again in another tab, then repeat this."))


class NotAllowed(PlaygroundError, code=ErrorCode.NOT_PERMITTED, status=HTTPStatus.FORBIDDEN):
    """Not for this account."""


class TooManyAnswers(PlaygroundError, code=ErrorCode.TOO_MANY_OPEN, status=HTTPStatus.SERVICE_UNAVAILABLE):
    """As many answers are on their way as one process passes on."""


class GatewayUnreachable(PlaygroundError, code=ErrorCode.INTERNAL_ERROR, status=HTTPStatus.BAD_GATEWAY):
    """Nothing answers at the gateway's address, or what answers breaks off before it says anything."""


class GatewaySilent(PlaygroundError, code=ErrorCode.REQUEST_TIMEOUT, status=HTTPStatus.GATEWAY_TIMEOUT, retry_after_s=5):
    """The gateway took the request and said nothing in time."""


IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
PRIORITIES = ("high", "normal", "low")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")

Json = dict[str, Any]  # Any: a JSON object of one of five surfaces


class SurfaceName(StrEnum):
    CHAT = "chat"
    MESSAGES = "messages"
    RESPONSES = "responses"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class SurfaceKind:
    """One surface: its path at the gateway, and which fields of the form it has a use for."""

    name: SurfaceName
    title: Text
    path: str
    has_parts: bool = True
    """System prompt, image and tools."""
    has_sampling: bool = True
    """Temperature, a limit of tokens and streaming."""
    has_schema: bool = False
    """The shape of the answer."""


SURFACES = {
    kind.name: kind
    for kind in (
        SurfaceKind(SurfaceName.CHAT, gettext_lazy("Chat completions"), "/v1/chat/completions", has_schema=True),
        SurfaceKind(SurfaceName.MESSAGES, "Messages", "/v1/messages"),
        SurfaceKind(SurfaceName.RESPONSES, "Responses", "/v1/responses", has_schema=True),
        SurfaceKind(SurfaceName.COMPLETIONS, gettext_lazy("Completions"), "/v1/completions", has_parts=False),
        SurfaceKind(SurfaceName.EMBEDDINGS, gettext_lazy("Embeddings"), "/v1/embeddings", has_parts=False, has_sampling=False),
    )
}


@dataclass(frozen=True, slots=True)
class Image:
    """A picture beside the prompt. ``data``: base64, empty while only code is written."""

    name: str
    media_type: str
    data: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """One earlier turn of a conversation. ``role``: ``user`` or ``assistant``."""

    role: str
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ask:
    """One question, checked. ``own_key``: what a person without a right to make keys has typed in; never stored."""

    surface: SurfaceKind
    model: str
    tenant: str = ""
    own_key: str = field(default="", repr=False)
    system: str = field(default="", repr=False)
    prompt: str = field(default="", repr=False)
    turns: tuple[Turn, ...] = ()
    image: Image | None = None
    tools: tuple[Json, ...] = ()
    schema: Json | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    is_streaming: bool = False
    pool_options: Mapping[str, object] = field(default_factory=dict)


class _ImageForm(msgspec.Struct):
    name: str = ""
    type: str = ""
    data: str = ""


class _TurnForm(msgspec.Struct):
    role: str = ""
    text: str = ""


class _Form(msgspec.Struct):
    """The page's JSON."""

    surface: str = ""
    model: str = ""
    tenant: str = ""
    key: str = ""
    system: str = ""
    prompt: str = ""
    image: _ImageForm | None = None
    turns: list[_TurnForm] = []
    tools: str = ""
    schema: str = ""
    # Numbers as they were typed, so that one sentence says what is wrong with them.
    temperature: str = ""
    max_tokens: str = ""
    stream: bool = False
    prefer_gpu: str = ""
    max_latency_ms: str = ""
    fallback_models: str = ""
    priority: str = ""


_decode_form = msgspec.json.Decoder(_Form).decode


def read_ask(data: bytes, *, is_draft: bool = False) -> Ask:
    """Read what the page sent. ``is_draft``: code is written while the form is filled in, so prompt and image may be missing.

    Fields that the surface has no use for are left out. Raises AskRefused, whose ``param`` is the field's name.
    """
    try:
        form = _decode_form(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise AskRefused(_("The page sent something that cannot be read. Reload it and try again.")) from None
    kind = SURFACES.get(form.surface)  # type: ignore[call-overload]  # a StrEnum is found by its text
    if kind is None:
        raise AskRefused(_("Choose one of these endpoints: %(names)s.") % {"names": ", ".join(SURFACES)}, param="surface")
    if not form.model.strip():
        raise AskRefused(_("Choose a model."), param="model")
    if not (form.prompt.strip() or is_draft):
        raise AskRefused(_("Write a prompt."), param="prompt")
    has_parts, has_sampling = kind.has_parts, kind.has_sampling
    return Ask(
        surface=kind,
        model=form.model.strip(),
        tenant=form.tenant,
        own_key=form.key.strip(),
        system=form.system if has_parts else "",
        prompt=form.prompt,
        turns=_read_turns(form.turns) if has_parts else (),
        image=_read_image(form.image, is_draft=is_draft) if has_parts and form.image is not None else None,
        tools=_read_tools(form.tools) if has_parts else (),
        schema=_read_schema(form.schema) if kind.has_schema else None,
        temperature=_read_temperature(form.temperature) if has_sampling else None,
        max_tokens=_read_whole(form.max_tokens, "max_tokens", least=1) if has_sampling else None,
        is_streaming=form.stream and has_sampling,
        pool_options=_read_options(form),
    )


def build_body(ask: Ask, place_image: Callable[[str, Image], object] = lambda prefix, image: prefix + image.data) -> Json:
    """Return the body for the ask's surface, members in the order in which a person would write them.

    ``place_image(prefix, image)`` returns what stands where the picture goes: a ``data:`` URL, or on Messages bare base64.
    """
    builders: dict[SurfaceName, Callable[[Ask, Callable[[str, Image], object]], Json]] = {
        SurfaceName.CHAT: _build_chat,
        SurfaceName.MESSAGES: _build_messages,
        SurfaceName.RESPONSES: _build_responses,
        SurfaceName.COMPLETIONS: lambda ask, _: {"prompt": ask.prompt, **_add_sampling(ask)},
        SurfaceName.EMBEDDINGS: lambda ask, _: {"input": ask.prompt},
    }
    body: Json = {"model": ask.model, **builders[ask.surface.name](ask, place_image)}
    if ask.pool_options:
        body["x_pool_options"] = dict(ask.pool_options)
    return body


def build_wish(ask: Ask) -> Json:
    """Return the body that asks for a ticket for the same."""
    body = build_body(ask)
    most = body.get("max_tokens", body.get("max_output_tokens"))
    return {
        "model": ask.model,
        "dialects": [ask.surface.name],
        "prompt_tokens_est": (len(ask.system) + len(ask.prompt)) // limits().gateway.token_chars,
        **({"max_tokens": most} if most is not None else {}),
        **({"x_pool_options": body["x_pool_options"]} if ask.pool_options else {}),
    }


def _build_chat(ask: Ask, place_image: Callable[[str, Image], object]) -> Json:
    content: object = ask.prompt
    if ask.image is not None:
        url = place_image(f"data:{ask.image.media_type};base64,", ask.image)
        content = [{"type": "text", "text": ask.prompt}, {"type": "image_url", "image_url": {"url": url}}]
    system = [{"role": "system", "content": ask.system}] if ask.system else []
    schema = {"name": "answer", "schema": ask.schema, "strict": True}
    shape = {"response_format": {"type": "json_schema", "json_schema": schema}} if ask.schema is not None else {}
    messages = [*system, *_list_turns(ask), {"role": "user", "content": content}]
    return {"messages": messages, **shape, **_add_tools(ask), **_add_sampling(ask)}


def _list_turns(ask: Ask) -> list[Json]:
    return [{"role": turn.role, "content": turn.text} for turn in ask.turns]


def _build_messages(ask: Ask, place_image: Callable[[str, Image], object]) -> Json:
    content: object = ask.prompt
    if ask.image is not None:
        source = {"type": "base64", "media_type": ask.image.media_type, "data": place_image("", ask.image)}
        content = [{"type": "image", "source": source}, {"type": "text", "text": ask.prompt}]
    sampling = _add_sampling(ask, asks_for_usage=False)
    return {
        "max_tokens": sampling.pop("max_tokens", limits().console.playground_messages_tokens),
        **({"system": ask.system} if ask.system else {}),
        "messages": [*_list_turns(ask), {"role": "user", "content": content}],
        **_add_tools(ask),
        **sampling,
    }


def _build_responses(ask: Ask, place_image: Callable[[str, Image], object]) -> Json:
    content: object = ask.prompt
    if ask.image is not None:
        url = place_image(f"data:{ask.image.media_type};base64,", ask.image)
        parts = [{"type": "input_text", "text": ask.prompt}, {"type": "input_image", "image_url": url, "detail": "auto"}]
        content = [{"role": "user", "content": parts}]
    if ask.turns:
        last = content if isinstance(content, list) else [{"role": "user", "content": content}]
        content = [*_list_turns(ask), *last]
    schema = {"type": "json_schema", "name": "answer", "schema": ask.schema, "strict": True}
    return {
        **({"instructions": ask.system} if ask.system else {}),
        "input": content,
        **({"text": {"format": schema}} if ask.schema is not None else {}),
        **_add_tools(ask),
        **_add_sampling(ask, limit="max_output_tokens", asks_for_usage=False),
    }


def _add_sampling(ask: Ask, *, limit: str = "max_tokens", asks_for_usage: bool = True) -> Json:
    members: Json = {}
    if ask.temperature is not None:
        members["temperature"] = ask.temperature
    if ask.max_tokens is not None:
        members[limit] = ask.max_tokens
    if ask.is_streaming:
        members["stream"] = True
        if asks_for_usage:
            members["stream_options"] = {"include_usage": True}
    return members


def _add_tools(ask: Ask) -> Json:
    return {"tools": [_say_tool(tool, ask.surface.name) for tool in ask.tools]} if ask.tools else {}


def _say_tool(tool: Json, surface: SurfaceName) -> Json:
    """Return a function in the words of the surface, from those of any of the three; anything else as it was written."""
    function = tool.get("function")
    said = function if isinstance(function, dict) else tool
    schema = said.get("parameters", said.get("input_schema"))
    is_function = isinstance(said.get("name"), str) and tool.get("type", "function") in ("function", "custom")
    if not is_function or not isinstance(schema, dict):
        return tool
    named = {key: said[key] for key in ("name", "description") if key in said}
    strict = {"strict": said["strict"]} if "strict" in said else {}
    match surface:
        case SurfaceName.CHAT:
            return {"type": "function", "function": {**named, "parameters": schema, **strict}}
        case SurfaceName.RESPONSES:
            return {"type": "function", **named, "parameters": schema, **strict}
        case _:
            return {**named, "input_schema": schema, **strict}


def _read_image(form: _ImageForm, *, is_draft: bool) -> Image:
    if form.type not in IMAGE_TYPES:
        raise AskRefused(_("The image must be PNG, JPEG, WebP or GIF."), param="image")
    try:
        size = len(binascii.a2b_base64(form.data, strict_mode=True))
    except (binascii.Error, ValueError):
        size = 0
    if not (size or is_draft):
        raise AskRefused(_("The image arrived empty or damaged. Choose it again."), param="image")
    # The name ends up in shell commands and programs.
    name = form.name if _SAFE_NAME.match(form.name) else f"image.{form.type.partition('/')[2]}"
    return Image(name=name, media_type=form.type, data=form.data)


def _read_turns(turns: list[_TurnForm]) -> tuple[Turn, ...]:
    if len(turns) > limits().console.playground_turns:
        raise AskRefused(
            _("A conversation has at most %(turns)s earlier turns. Begin a new one.")
            % {"turns": limits().console.playground_turns},
            param="prompt",
        )
    return tuple(Turn(turn.role, turn.text) for turn in turns if turn.role in ("user", "assistant") and turn.text)


def _read_schema(text: str) -> Json | None:
    if not text.strip():
        return None
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise AskRefused(_("The schema is not JSON: %(error)s.") % {"error": str(error)[:200]}, param="schema") from None
    if not isinstance(schema, dict):
        raise AskRefused(_("Give a JSON schema, which is an object."), param="schema")
    if _is_deeper(schema, limits().console.playground_tool_depth):
        raise AskRefused(
            _("The schema is nested more than %(levels)s levels deep.") % {"levels": limits().console.playground_tool_depth},
            param="schema",
        )
    return schema


def _read_tools(text: str) -> tuple[Json, ...]:
    if not text.strip():
        return ()
    try:
        tools = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise AskRefused(_("The tools are not JSON: %(error)s.") % {"error": str(error)[:200]}, param="tools") from None
    listed = tools if isinstance(tools, list) else [tools]
    if not all(isinstance(tool, dict) for tool in listed):
        raise AskRefused(_("Give a JSON list of tools, each an object."), param="tools")
    if _is_deeper(listed, limits().console.playground_tool_depth):
        raise AskRefused(
            _("The tools are nested more than %(levels)s levels deep.") % {"levels": limits().console.playground_tool_depth},
            param="tools",
        )
    return tuple(listed)


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether lists and objects are nested more than so many levels deep."""
    layer = [value]
    for _level in range(levels):
        held = [one.values() if isinstance(one, dict) else one for one in layer if isinstance(one, dict | list)]
        layer = [inner for members in held for inner in members]
    return any(isinstance(one, dict | list) for one in layer)


def _read_temperature(text: str) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 2:
        raise AskRefused(_("The temperature is a number from 0 to 2, or empty for the model's own."), param="temperature")
    return value


def _read_whole(text: str, name: str, *, least: int) -> int | None:
    text = text.strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= least):
        raise AskRefused(_("Give a whole number of at least %(least)s, or leave it empty.") % {"least": least}, param=name)
    return int(text)


def _read_options(form: _Form) -> Json:
    """Return ``x_pool_options`` with the members that were filled in (central-server design, section 3.1)."""
    if form.priority and form.priority not in PRIORITIES:
        raise AskRefused(
            _("The priority is one of %(names)s, or the key's own.") % {"names": ", ".join(PRIORITIES)}, param="priority"
        )
    models = [name.strip() for name in form.fallback_models.split(",") if name.strip()]
    members: Json = {
        "prefer_gpu": form.prefer_gpu.strip() or None,
        "max_latency_ms": _read_whole(form.max_latency_ms, "max_latency_ms", least=0),
        "fallback_models": models or None,
        "priority": form.priority or None,
    }
    return {name: value for name, value in members.items() if value is not None}
