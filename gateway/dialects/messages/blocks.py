"""Content blocks that a person, a tool or a server wrote, as parts of a chat message.

A chat message has parts of text, images and files. A block that is none of these is given as text where it has any; what an
engine could not see (a file in Anthropic's storage) is refused by name.
"""

from __future__ import annotations

import msgspec

from gateway.dialects.messages.schema import Block, Source, decode_as, is_absent
from gateway.errors import BadRequest

Part = dict[str, object]
"""A part of a chat message: ``{"type": "text" | "image_url" | "file", …}``."""

SEPARATOR = "\n\n"
"""Between two blocks of text that become one."""

_SECRETS = ("encrypted_", "cache_control", "signature", "citations", "caller")
"""Keys of a server's result that mean nothing to another model."""
_SERVER_RESULTS = "_tool_result"
_source_decoder = msgspec.json.Decoder(Source)
_content_decoder = msgspec.json.Decoder(str | list[Block] | None)
_any_decoder = msgspec.json.Decoder()


def make_text(text: str) -> Part:
    """Return a part of text."""
    return {"type": "text", "text": text}


def join_parts(parts: list[Part]) -> str | list[Part]:
    """Return the content of a chat message: one text where it is all text, for templates that know nothing else."""
    if any(part["type"] != "text" for part in parts):
        return [part for part in parts if part["type"] != "text" or part["text"]]
    return SEPARATOR.join(str(part["text"]) for part in parts if part["text"])


def read_content(raw: msgspec.Raw, path: str) -> list[Block]:
    """Return the blocks of a ``content`` field that may also be one text or absent. Raises BadRequest."""
    if is_absent(raw):
        return []
    content = decode_as(_content_decoder, raw, path)
    return [Block(type="text", text=content)] if isinstance(content, str) else content or []


def render_block(block: Block, path: str) -> list[Part]:
    """Return a block as parts of a chat message. Raises BadRequest naming what cannot be given to a chat engine."""
    match block.type:
        case "text":
            return [make_text(require_text(block.text, f"{path}.text"))]
        case "image":
            return [_render_image(block, path)]
        case "document":
            return _render_document(block, path)
        case "search_result":
            return _render_search_result(block, path)
        case "tool_reference":
            return [make_text(f"Tool available: {block.tool_name or block.name or ''}")]
        case "compaction":
            return _render_described(block.content, "Summary of the conversation so far", path)
        case "browser_state":
            return _render_described(block.tabs, "Open tabs", path)
        case kind if kind.endswith(_SERVER_RESULTS) and kind != "tool_result":
            return _render_described(block.content, f"Result of {kind.removesuffix(_SERVER_RESULTS)}", path)
    message = f"A block of type '{block.type[:80]}' cannot be given to this model."
    raise BadRequest(message, param=f"{path}.type")


def describe_call(block: Block, path: str) -> Part:
    """Return as text which tool of its own the server called, and with what."""
    said = describe(block.input, path)
    return make_text(f"[Called {block.name or block.type}]" + (f"\n{said}" if said else ""))


def describe(raw: msgspec.Raw, path: str) -> str:
    """Return the texts and numbers of a JSON value, one a line with its key. No recursion: clients choose the depth."""
    lines: list[str] = []
    waiting: list[tuple[str, object]] = [("", decode_as(_any_decoder, raw, path))] if not is_absent(raw) else []
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            is_binary = not str(value.get("media_type", "text/")).startswith("text/")
            told = ((name, part) for name, part in reversed(value.items()) if _is_told(name, part))
            waiting.extend((name, part) for name, part in told if not (is_binary and name == "data"))
        elif isinstance(value, list):
            waiting.extend((key, part) for part in reversed(value))
        elif value is not None and value != "":
            lines.append(f"{key}: {value}" if key else str(value))
    return "\n".join(lines)


def require_text(text: str | None, path: str) -> str:
    """Return a text that must be there. Raises BadRequest."""
    if text is None:
        raise BadRequest(f"The field '{path}' is required and must be text.", param=path)
    return text


def _is_told(key: str, value: object) -> bool:
    return not key.startswith(_SECRETS) and (key != "type" or not isinstance(value, str))


def _render_described(raw: msgspec.Raw, title: str, path: str) -> list[Part]:
    said = describe(raw, f"{path}.content")
    return [make_text(f"[{title}]\n{said}")] if said else []


def _render_image(block: Block, path: str) -> Part:
    source = _read_source(block, path)
    if source.type == "url":
        return {"type": "image_url", "image_url": {"url": require_text(source.url, f"{path}.source.url")}}
    if source.type == "base64":
        data = require_text(source.data, f"{path}.source.data")
        return {"type": "image_url", "image_url": {"url": f"data:{source.media_type or 'image/jpeg'};base64,{data}"}}
    raise _refuse_source(source, path, "base64, url")


def _render_document(block: Block, path: str) -> list[Part]:
    source = _read_source(block, path)
    about = [text for text in (block.title, block.context) if text]
    match source.type:
        case "text":
            return [make_text(SEPARATOR.join([*about, require_text(source.data, f"{path}.source.data")]))]
        case "content":
            inner = f"{path}.source.content"
            blocks = read_content(source.content, inner)
            return [make_text(text) for text in about] + [
                part for number, item in enumerate(blocks) for part in _render_flat(item, f"{inner}[{number}]")
            ]
        case "base64":
            media_type = source.media_type or "application/pdf"
            data = require_text(source.data, f"{path}.source.data")
            file = {"filename": block.title or "document.pdf", "file_data": f"data:{media_type};base64,{data}"}
            context = [make_text(block.context)] if block.context else []
            return [*context, {"type": "file", "file": file}]
    raise _refuse_source(source, path, "text, content, base64")


def _render_flat(block: Block, path: str) -> list[Part]:
    """Return a block of a document's content, where the reference allows no documents: each level would be read again."""
    if block.type not in {"text", "image"}:
        raise BadRequest("The content of a document may have text and images only.", param=f"{path}.type")
    return render_block(block, path)


def _render_search_result(block: Block, path: str) -> list[Part]:
    texts = [item.text or "" for item in read_content(block.content, f"{path}.content")]
    source = describe(block.source, f"{path}.source")
    return [make_text("\n".join(text for text in (block.title, source, SEPARATOR.join(texts)) if text))]


def _read_source(block: Block, path: str) -> Source:
    if is_absent(block.source):
        raise BadRequest(f"The field '{path}.source' is required.", param=f"{path}.source")
    return decode_as(_source_decoder, block.source, f"{path}.source")


def _refuse_source(source: Source, path: str, usable: str) -> BadRequest:
    param = f"{path}.source.type"
    return BadRequest(
        f"A source of type '{source.type[:80]}' cannot be given to this model; use one of: {usable}.", param=param
    )
