"""Reading JSON strictly: what people will sign must not be readable in two ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import IO, Any, NoReturn

from rest_framework.exceptions import ParseError, ValidationError
from rest_framework.parsers import BaseParser

from core.limits import limits
from governance.errors import GovernanceError
from wire.contract import ErrorCode
from wire.optoken.canonical import MAX_INTEGER


class BodyTooLarge(GovernanceError):
    """More bytes than any request of this API needs."""

    code = ErrorCode.BODY_TOO_LARGE
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE.value


class StrictJsonParser(BaseParser):
    """JSON in UTF-8, less what two readers could read differently: names given twice, fractions, NaN, NUL, half surrogates."""

    media_type = "application/json"

    def parse(
        self,
        stream: IO[Any],  # Any: Django REST framework's signature; bytes in truth
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the value. Raises BodyTooLarge (413), ParseError and ValidationError (400), which names the field."""
        raw = stream.read(limits().governance.api_body_bytes + 1)
        if len(raw) > limits().governance.api_body_bytes:
            raise BodyTooLarge(f"The body is larger than {limits().governance.api_body_bytes} bytes.")
        try:
            value = json.loads(
                raw.decode(), object_pairs_hook=_read_object, parse_float=_Unsignable, parse_constant=_Unsignable
            )
            _check(value, path="")  # goes less deep than the reader of some Pythons
        except UnicodeDecodeError:
            raise ParseError("The body is not UTF-8.") from None
        except (ValueError, RecursionError) as error:
            reason = (
                str(error) if isinstance(error, json.JSONDecodeError | _NameTwice) else "it goes beyond what JSON readers take"
            )
            raise ParseError(f"The body is not JSON that can be used: {reason}.") from None
        return value


class _NameTwice(ValueError):
    """An object gives a name twice."""


class _Unsignable(str):
    """The text of a number that cannot be signed; kept until it is known where it stands."""

    __slots__ = ()


def _read_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _NameTwice(f"the name {twice[:60]!r} stands twice in one object")
    return members


def _check(value: object, *, path: str) -> None:
    match value:
        case _Unsignable():
            _refuse(path, f"{value[:40]} cannot be signed; give a whole number, or text")
        case str():
            if "\0" in value or not _is_whole(value):
                _refuse(path, "a NUL or half a surrogate pair cannot be signed")
        case int() if abs(value) > MAX_INTEGER:
            _refuse(path, f"whole numbers go to {MAX_INTEGER}, which every JSON reader holds exactly")
        case list():
            for item in value:
                _check(item, path=path)
        case dict():
            for name, item in value.items():
                _check(name, path=path)
                _check(item, path=f"{path}.{name}" if path else name)
        case _:
            return


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(path: str, text: str) -> NoReturn:
    raise ValidationError({path[:200]: [text]} if path else [text])
