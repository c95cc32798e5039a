"""Rows as CSV (RFC 4180), for files that people open with a program for tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import UTC, datetime
from io import StringIO


def print_line(values: Iterable[object]) -> str:
    """Return a row. Times are printed in ISO 8601 and UTC, truth as ``true`` or ``false``, what is not known as nothing."""
    text = StringIO()
    csv.writer(text).writerow([_print(value) for value in values])
    return text.getvalue()


def _print(value: object) -> object:
    match value:
        case bool():
            return "true" if value else "false"
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        # A program for tables would take a text that begins so for a formula.
        case str() if value[:1] in ("=", "+", "-", "@", "\t", "\r"):
            return f"'{value}"
    return value
