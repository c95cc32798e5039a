"""How many values a JSON text may hold, found out before a single one of them is built.

Each value costs a parser some hundred bytes and a moment of the event loop, and takes two bytes to ask for: a body of the
permitted size could stop everybody else for seconds. Long texts and pictures are another matter; they are one value each.
"""

from __future__ import annotations

import re

from wire.limits import WIRE

_STEP_OF_MARKS = re.compile(rb'(?:[^"\[{,]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[{,]*+)*+[\[{,]){1000}+', re.DOTALL)


def is_crowded(data: bytes) -> bool:
    """Return whether a JSON text holds more values than anybody needs. Texts shorter than ``body_marks`` bytes cannot.

    Marks are counted wherever they stand first, which is quick; only a text with too many is looked at for its strings.
    """
    if len(data) <= WIRE.body_marks or data.count(b",") + data.count(b"[") + data.count(b"{") <= WIRE.body_marks:
        return False
    at = 0
    for _ in range(WIRE.body_marks // 1000):
        found = _STEP_OF_MARKS.match(data, at)
        if found is None:
            return False
        at = found.end()
    return True
