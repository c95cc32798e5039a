"""The content of input items as chat content: text, images, files and audio."""

from __future__ import annotations

from gateway.dialects.responses.checks import field_error, kind_of, need_list, need_object, need_text, read_text, show_name

Content = str | list[dict[str, object]]
"""Chat content: text alone as one string, which every engine takes, else a list of parts."""

_TEXT_TYPES = frozenset({"input_text", "output_text", "text"})
_DETAILS = {"low": "low", "high": "high", "auto": "auto", "original": "high"}
"""``original`` is newer than chat completions."""


def translate_content(content: object, where: str) -> Content:
    """Return what a user, a tool or the system said. ``where``: path of the field. Raises BadRequest naming the part."""
    if isinstance(content, str):
        return content
    if content is None:
        raise field_error(where, "is required")
    parts = [_translate_part(part, f"{where}[{n}]") for n, part in enumerate(need_list(content, where))]
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def read_system_text(content: object, where: str) -> str:
    """Return what a system or developer message says; it has text alone. Raises BadRequest."""
    translated = translate_content(content, where)
    if isinstance(translated, str):
        return translated
    at = next(n for n, part in enumerate(translated) if part["type"] != "text")
    raise field_error(f"{where}[{at}].type", "must be input_text in a system or developer message")


def read_answer(content: object, where: str) -> tuple[str | None, str | None]:
    """Return text and refusal of an assistant's message, None where it has no such part. Raises BadRequest."""
    if isinstance(content, str):
        return content, None
    if content is None:
        raise field_error(where, "is required")
    texts: list[str] = []
    refusals: list[str] = []
    for n, value in enumerate(need_list(content, where)):
        path = f"{where}[{n}]"
        part = need_object(value, path)
        kind = kind_of(part)
        if kind == "refusal":
            refusals.append(need_text(part, "refusal", path))
        elif kind in _TEXT_TYPES:
            texts.append(need_text(part, "text", path))
        else:
            raise field_error(
                f"{path}.type", f"must be output_text or refusal in an assistant's message, not {show_name(kind)}"
            )
    return "".join(texts) if texts or not refusals else None, "".join(refusals) if refusals else None


def split_result(content: Content, call_id: str) -> tuple[str, list[dict[str, object]]]:
    """Return what a tool's message may say of its result, which is text, and the parts that the user has to show."""
    if isinstance(content, str):
        return content, []
    told = [str(part["text"]) for part in content if part["type"] == "text"]
    shown = [part for part in content if part["type"] != "text"]
    told.append(f"[{len(shown)} attached in the next user message]")
    title: dict[str, object] = {"type": "text", "text": f"Attached to the result of tool call {call_id}:"}
    return "\n".join(told), [title, *shown]


def join_contents(contents: list[Content]) -> Content:
    """Return several contents as one, with an empty line between texts."""
    if len(contents) == 1:
        return contents[0]
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n\n".join(texts)
    joined: list[dict[str, object]] = []
    for content in contents:
        joined += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return joined


def _translate_part(value: object, where: str) -> dict[str, object]:
    part = need_object(value, where)
    kind = kind_of(part)
    if kind in _TEXT_TYPES:
        return {"type": "text", "text": need_text(part, "text", where)}
    if kind == "input_image":
        return _translate_image(part, where)
    if kind == "input_file":
        return _translate_file(part, where)
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": need_object(part.get("input_audio"), f"{where}.input_audio")}
    if kind == "refusal":
        return {"type": "text", "text": need_text(part, "refusal", where)}
    raise field_error(f"{where}.type", f"must be input_text, input_image, input_file or input_audio, not {show_name(kind)}")


def _translate_image(part: dict[str, object], where: str) -> dict[str, object]:
    if part.get("file_id") is not None and part.get("image_url") is None:
        raise field_error(f"{where}.file_id", "names a stored file, and none are stored here; send the image as image_url")
    image: dict[str, object] = {"url": need_text(part, "image_url", where)}
    detail = _DETAILS.get(read_text(part, "detail", where))
    if detail is not None:
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def _translate_file(part: dict[str, object], where: str) -> dict[str, object]:
    if part.get("file_data") is None:
        for name in ("file_id", "file_url"):
            if part.get(name) is not None:
                raise field_error(
                    f"{where}.{name}", "names a file that is not fetched from here; send its content as file_data"
                )
    file: dict[str, object] = {"file_data": need_text(part, "file_data", where)}
    if part.get("filename") is not None:
        file["filename"] = need_text(part, "filename", where)
    return {"type": "file", "file": file}
