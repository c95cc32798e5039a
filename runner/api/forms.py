"""The few fields that the box itself reads of a multipart body; the rest is the engine's."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from runner.errors import InvalidRequest
from runner.limits import limits
from runner.serving.request import BodyFields

_OURS = frozenset({b"model", b"stream", b"allow_remote"})
_FLAGS = {"true": True, "1": True, "false": False, "0": False, "": False}


class _Reader:
    """Callbacks of the parser: keeps the small fields and lets everything else pass."""

    def __init__(self) -> None:
        self.fields: dict[bytes, bytearray] = {}
        self._parts = 0
        self._header = bytearray()
        self._value = bytearray()
        self._name: bytes | None = None

    def on_part_begin(self) -> None:
        """A part follows."""
        self._parts += 1
        if self._parts > limits().api.form_parts:
            raise InvalidRequest(f"The multipart body has more than {limits().api.form_parts} parts.")
        self._name = None

    def on_header_begin(self) -> None:
        """A header of the part follows."""
        self._header, self._value = bytearray(), bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        """A piece of its name."""
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        """A piece of its value."""
        self._value += data[start:end]

    def on_header_end(self) -> None:
        """The header is whole."""
        if bytes(self._header).lower() != b"content-disposition":
            return
        _, options = parse_options_header(bytes(self._value))
        name = options.get(b"name")
        if name not in _OURS or b"filename" in options:
            return
        if name in self.fields:
            text = name.decode()
            raise InvalidRequest(f"The field {text!r} comes twice.", param=text)
        self._name = name
        self.fields[name] = bytearray()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """A piece of the part's content."""
        if self._name is None:
            return
        value = self.fields[self._name]
        value += data[start:end]
        if len(value) > limits().api.form_value_bytes:
            text = self._name.decode()
            raise InvalidRequest(f"The field {text!r} is too long.", param=text)


def read_form_fields(content_type: str, body: bytes) -> BodyFields:
    """Return what serving reads of a form. Raises InvalidRequest naming the field at fault."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidRequest("The Content-Type names no boundary, so the multipart body cannot be read.")
    reader = _Reader()
    callbacks = {
        name: getattr(reader, name)
        for name in ("on_part_begin", "on_header_begin", "on_header_field", "on_header_value", "on_header_end", "on_part_data")
    }
    try:
        parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]  # its callbacks are a TypedDict
        parser.write(body)
        parser.finalize()
    except FormParserError:
        raise InvalidRequest("The multipart body cannot be read.") from None
    try:
        fields = {name.decode(): value.decode().strip() for name, value in reader.fields.items()}
    except UnicodeDecodeError:
        raise InvalidRequest("A field of the multipart body is not UTF-8.") from None
    if not 1 <= len(fields.get("model", "")) <= limits().models.id_chars:
        raise InvalidRequest(
            f"The field 'model' must be there, with 1 to {limits().models.id_chars} characters.", param="model"
        )
    return BodyFields(fields["model"], stream=_flag(fields, "stream"), allow_remote=_flag(fields, "allow_remote"))


def _flag(fields: dict[str, str], name: str) -> bool:
    try:
        return _FLAGS[fields.get(name, "").lower()]
    except KeyError:
        raise InvalidRequest(f"The field {name!r} must be true or false.", param=name) from None
