"""Reading just what policy needs from a multipart form, in one pass, leaving the bytes as they are.

Only small text fields are kept; a file is walked over and never copied as a whole. Whoever reads the form after us must
come to the same model, so a form that can be read in two ways is refused: a field given twice, or one sent as a file.
"""

from __future__ import annotations

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from core.limits import limits
from gateway.errors import BadRequest

FORM_TYPE = b"multipart/form-data"
_READ_FIELDS = frozenset({b"model", b"stream"})
_TRUE = frozenset({"true", "1", "on", "yes"})
_FALSE = frozenset({"false", "0", "off", "no", ""})


class FormBody(msgspec.Struct):
    """The fields policy looks at, and the names of all parts that are files."""

    model: str
    stream: bool
    files: frozenset[bytes]


def read_form(body: bytes, content_type: str) -> FormBody:
    """Parse a multipart form. Raises BadRequest naming the field at fault."""
    boundary = _read_boundary(content_type)
    collector = _Collector()
    _run_parser(body, boundary, collector)
    if b"model" not in collector.fields:
        raise BadRequest("The field 'model' is required.", param="model")
    return FormBody(
        model=collector.fields[b"model"],
        stream=_read_flag(collector.fields.get(b"stream", "")),
        files=frozenset(collector.files),
    )


def replace_form_model(body: bytes, content_type: str, model: str) -> bytes:
    """Return a form that ``read_form`` has read, with another value of its field ``model``."""
    boundary = _read_boundary(content_type)
    collector = _Collector()
    _run_parser(body, boundary, collector)
    start, end = collector.model_span
    return body[:start] + model.encode() + body[end:]


def _read_boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != FORM_TYPE or not 0 < len(boundary) <= limits().gateway.form_boundary_bytes:
        raise BadRequest("Send this as multipart/form-data, with its boundary in the content-type header.")
    return boundary


def _run_parser(body: bytes, boundary: bytes, collector: _Collector) -> None:
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": collector.begin_part,
            "on_header_field": collector.take_header_name,
            "on_header_value": collector.take_header_value,
            "on_header_end": collector.end_header,
            "on_headers_finished": collector.end_headers,
            "on_part_data": collector.take_data,
            "on_part_end": collector.end_part,
        },
    )
    mark = b"\r\n--" + boundary
    marks = padded = 0
    try:
        for start in range(0, len(body), limits().gateway.form_piece_bytes):
            end = start + limits().gateway.form_piece_bytes
            # The parser is quick between boundaries and slow at each thing that begins like one.
            marks += body.count(mark, max(0, start - len(mark) + 1), end)
            if marks > limits().gateway.form_parts:
                raise BadRequest(f"The form has too many parts; at most {limits().gateway.form_parts} are accepted.")
            collector.offset = start
            parser.write(body[start:end])
            # Blanks behind a boundary are walked one by one: no form needs more than a piece of them.
            padded = padded + 1 if parser.state is MultipartState.BOUNDARY_PADDING else 0
            if padded > 1:
                raise BadRequest("The form cannot be read: a boundary is followed by too many blanks.")
    except FormParserError:
        raise BadRequest("The form cannot be read: it does not keep to multipart/form-data.") from None
    if parser.state is not MultipartState.END:
        raise BadRequest("The form cannot be read: it ends before its last boundary.")


def _read_flag(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise BadRequest("The field 'stream' must be true or false.", param="stream")


class _Collector:
    """What the parser calls. One part at a time; of a part that is not read only its name is kept."""

    def __init__(self) -> None:
        self.fields: dict[bytes, str] = {}
        self.files: set[bytes] = set()
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._name: bytes | None = None
        self._data = b""
        self.offset = 0
        """Where in the whole body the piece begins that is being parsed."""
        self.model_span = (0, 0)
        """Where in the whole body the value of ``model`` stands."""

    def begin_part(self) -> None:
        self._disposition, self._name, self._data = b"", None, b""

    def take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            if self._disposition:
                raise BadRequest("The form cannot be read: a part has two Content-Disposition headers.")
            self._disposition = self._value
        self._header = self._value = b""

    def end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition.decode("latin-1"))
        name = options.get(b"name")
        if kind != b"form-data" or name is None:
            raise BadRequest("The form cannot be read: each part needs a Content-Disposition of form-data with a name.")
        is_file = b"filename" in options
        if is_file:
            self.files.add(name)
        if name not in _READ_FIELDS:
            return
        text = name.decode()
        if is_file:
            raise BadRequest(f"The field '{text}' must be text, not a file.", param=text)
        if name in self.fields:
            raise BadRequest(f"The field '{text}' is given twice.", param=text)
        self.fields[name] = ""
        self._name = name

    def take_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            return
        self._data += data[start:end]
        if self._name == b"model":
            first = self.model_span[0] or self.offset + start
            self.model_span = (first, first + len(self._data))
        if len(self._data) > limits().gateway.form_field_bytes:
            text = self._name.decode()
            raise BadRequest(f"The field '{text}' is too long.", param=text)

    def end_part(self) -> None:
        if self._name is None:
            return
        try:
            self.fields[self._name] = self._data.decode()
        except UnicodeDecodeError:
            text = self._name.decode()
            raise BadRequest(f"The field '{text}' is not UTF-8.", param=text) from None
