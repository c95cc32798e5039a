"""One inference request as the box sees it, from either door: its own HTTP port, or the socket of a gateway. Pure.

With it the paths that may be asked, and how a refusal is said in JSON: the error object of the model-runner specification,
which OpenAI's clients read as theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    IMAGES,
    MESSAGES,
    RESPONSES,
    TRANSCRIPTIONS,
    CacheMode,
    Priority,
)
from runner.errors import InvalidRequest, RequestRefused
from runner.limits import limits
from wire.bounds import find_crowd, find_out_of_bounds
from wire.unreadable import UNREADABLE

INFERENCE_PATHS = (
    CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES, IMAGES, TRANSCRIPTIONS, "/v1/audio/translations", "/v1/audio/speech",
    "/v1/images/edits", "/v1/moderations", "/v1/rerank", "/v1/score",
)  # fmt: skip
"""What a server that does not say which paths it answers is asked for by POST: none of them loads, unloads or flushes."""
_PATH = re.compile(r"/v1(?:/[A-Za-z0-9_.:@~-]+)+/?(?:\?[\x21-\x7e]*)?\Z")
_TAG = re.compile(r"[A-Za-z0-9._:-]{1,64}\Z")
_PATH_IN_ERROR = re.compile(r"at `\$\.?([^`]*)`")
_MODES: dict[str, CacheMode] = {"": "auto", "auto": "auto", "prefix": "prefix", "none": "none"}
_PRIORITIES: dict[str, Priority] = {"": "normal", "high": "high", "normal": "normal", "low": "low"}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class Inference:
    """A request for a model. ``path`` may carry a query; ``headers`` are lower-case. ``allow_remote``: its owner agrees that
    it leaves the box. ``on_socket``: it came through a gateway, which has checked tenant and limits.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    model: str
    tenant: str
    priority: Priority = "normal"
    cache_mode: CacheMode = "auto"
    cache_tag: str = ""
    is_streaming: bool = False
    allow_remote: bool = False
    on_socket: bool = False
    request_id: str = ""
    """The one that its client was told, for the log."""

    @property
    def endpoint(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]


class BodyFields(msgspec.Struct):
    """What serving reads of a JSON body; everything else stays in the bytes."""

    model: str
    stream: bool | None = None
    allow_remote: bool | None = None


_decoder = msgspec.json.Decoder(BodyFields)


def read_fields(body: bytes) -> BodyFields:
    """Parse a JSON body. Raises InvalidRequest naming the field at fault."""
    if not body.strip():
        raise InvalidRequest("The request body is empty; send a JSON object.")
    try:
        fields = _decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH_IN_ERROR.search(text)
        param = "model" if "missing required field `model`" in text else (found.group(1) if found else None)
        raise InvalidRequest(f"Invalid request body: {text}.", param=param or None) from None
    except UNREADABLE as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    if not 1 <= len(fields.model) <= limits().models.id_chars:
        raise InvalidRequest(f"The field 'model' must have 1 to {limits().models.id_chars} characters.", param="model")
    return fields


def check_bounds(endpoint: str, fields: Mapping[str, object]) -> None:
    """Raise InvalidRequest for a number that the endpoint's original refuses. ``fields``: the members of a JSON body."""
    fault = find_out_of_bounds(endpoint, fields)
    if fault is not None:
        raise InvalidRequest(fault[1], param=fault[0])


def check_crowd(body: bytes) -> None:
    """Raise InvalidRequest for a JSON body with so much in one value that an engine would read it for minutes."""
    if (crowd := find_crowd(body)) is not None:
        raise InvalidRequest(crowd[1], param=crowd[0])


def read_cache_mode(text: str) -> CacheMode:
    """Return the value of ``X-Cache-Mode``. Raises InvalidRequest."""
    try:
        return _MODES[text.strip().lower()]
    except KeyError:
        raise InvalidRequest("X-Cache-Mode must be prefix, none or auto.", param="X-Cache-Mode") from None


def read_cache_tag(text: str) -> str:
    """Return the value of ``X-Cache-Tag``. Raises InvalidRequest."""
    tag = text.strip()
    if tag and not _TAG.match(tag):
        raise InvalidRequest(
            "X-Cache-Tag must have at most 64 characters of letters, digits, dot, underscore, colon and minus.",
            param="X-Cache-Tag",
        )
    return tag


def read_priority(text: str) -> Priority:
    """Return the value of ``X-Priority``. Raises InvalidRequest."""
    try:
        return _PRIORITIES[text.strip().lower()]
    except KeyError:
        raise InvalidRequest("X-Priority must be high, normal or low.", param="X-Priority") from None


def is_allowed_path(path: str) -> bool:
    """Return whether an engine may be asked for ``path``: below ``/v1/``, no dot segments, no escapes, no fragment."""
    if not _PATH.match(path) or "#" in path:
        return False
    segments = path.partition("?")[0].split("/")
    return "." not in segments and ".." not in segments


def refusal_body(refusal: RequestRefused, *, endpoint: str = "") -> bytes:
    """Return ``{"error": {code, message, type, param, retryable, …}}`` with the details of the refusal beside them.

    ``endpoint``: the path that was asked; on /v1/messages Anthropic's ``"type": "error"`` stands outside.
    """
    outside = {"type": "error"} if endpoint == MESSAGES else {}
    return msgspec.json.encode({**outside, "error": refusal_fields(refusal)})


def refusal_fields(refusal: RequestRefused) -> dict[str, object]:
    """Return the members of the error object."""
    return {
        "code": refusal.code,
        "message": refusal.message,
        "type": _TYPES.get(refusal.status, "api_error"),
        "param": refusal.param,
        "retryable": refusal.retryable,
        **refusal.details,
    }
