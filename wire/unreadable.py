"""What decoding a JSON text of somebody else raises."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""It is wrong in itself or for its type, not UTF-8, or nested without end."""
