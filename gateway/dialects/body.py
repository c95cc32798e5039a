"""Reading just what policy needs from a JSON body, in one pass, leaving the bytes as they are."""

from __future__ import annotations

import re

import msgspec

from gateway.errors import BadRequest

_PATH_RE = re.compile(r"at `\$\.?([^`]*)`")
_MISSING_RE = re.compile(r"missing required field `([^`]*)`")
_IMAGE_URL_PREFIX = "data:"


class StreamOptions(msgspec.Struct):
    """``stream_options`` of the OpenAI surfaces."""

    include_usage: bool | None = None


class RequestBody(msgspec.Struct):
    """The fields policy looks at, over all surfaces. Everything else stays in the bytes."""

    model: str
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    stream_options: StreamOptions | None = None
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()

    @property
    def token_limit(self) -> tuple[int | None, str]:
        """The largest number of output tokens the caller asks for, and the field that asks for it."""
        limit, field = self.max_tokens, "max_tokens"
        if self.max_completion_tokens is not None and (limit is None or self.max_completion_tokens > limit):
            limit, field = self.max_completion_tokens, "max_completion_tokens"
        if self.max_output_tokens is not None and (limit is None or self.max_output_tokens > limit):
            limit, field = self.max_output_tokens, "max_output_tokens"
        return limit, field


_decoder = msgspec.json.Decoder(RequestBody)


def read_body(body: bytes) -> RequestBody:
    """Parse a request body. Raises BadRequest naming the field at fault."""
    if not body.strip():
        raise BadRequest("The request body is empty; send a JSON object.")
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        missing = _MISSING_RE.search(text)
        path = _PATH_RE.search(text)
        param = missing.group(1) if missing else (path.group(1) if path else None)
        raise BadRequest(f"Invalid request body: {text}.", param=param or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None


def require_list(raw: msgspec.Raw, name: str) -> None:
    """Raise BadRequest unless ``raw`` is a non-empty JSON array."""
    text = bytes(raw).lstrip()
    if not text:
        raise BadRequest(f"The field '{name}' is required.", param=name)
    if not text.startswith(b"["):
        raise BadRequest(f"The field '{name}' must be a list.", param=name)
    if text[1:].lstrip().startswith(b"]"):
        raise BadRequest(f"The field '{name}' must not be empty.", param=name)


class _Part(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


_messages_decoder = msgspec.json.Decoder(list[_Message])


def count_prompt_chars(messages: msgspec.Raw, *others: msgspec.Raw) -> int:
    """Return how many characters of text the prompt has. Images and files given as data URLs are not text."""
    total = 0
    if data := bytes(messages):
        try:
            total = sum(
                _count_content(message.content) + len(bytes(message.tool_calls)) for message in _messages_decoder.decode(data)
            )
        except (msgspec.DecodeError, UnicodeDecodeError):
            total = _count_text(_decode(data))
    for raw in others:
        if data := bytes(raw):
            total += _count_text(_decode(data))
    return total


def _count_content(content: str | list[_Part] | None) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text) for part in content or () if part.text is not None)


def _decode(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The prompt is not valid JSON: {error}.") from None


def _count_text(value: object) -> int:
    """Return the characters of all text in a JSON value. Walks without recursion: clients choose the depth."""
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            total += 0 if item.startswith(_IMAGE_URL_PREFIX) else len(item)
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(part for key, part in item.items() if key not in {"data", "file_data"})
    return total
