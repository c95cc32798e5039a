"""Finding, among the lines that a Python server printed, the one that says why it failed. Pure."""

from __future__ import annotations

import re
from collections import deque

from runner.limits import limits

# Servers of several processes put a process name before their lines, and loggers a date and a place.
_PREFIX = re.compile(
    r"^(?:\([^()]*\) ?)?(?:[\d:.TZ-]+\s+)?(?:(?:ERROR|CRITICAL) (?:[\d-]+ [\d:.]+ \[[^\]]*\] ?)?(?:[a-z_-]+: )*)?"
)
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)(?:: |$)")
_INDIRECT = re.compile(r"initialization failed|See root cause above|[Ss]ee stack trace|cancelled|ShardCannotStart")
_USAGE_ERROR = re.compile(r"^(?:\S+: )?error: ")
_VALIDATION = re.compile(r"^\s*(?:Value|Assertion) error, (.+?)(?: \[type=.*)?$")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class FailureWords:
    """Fed with lines; keeps those that are reasons, causes apart from what only followed from them."""

    def __init__(self) -> None:
        self._causes: deque[str] = deque(maxlen=5)
        self._consequences: deque[str] = deque(maxlen=5)

    def feed(self, line: str) -> None:
        """Take one line."""
        text = _COLOUR.sub("", line)
        if match := _VALIDATION.match(text):
            self._causes.append(match[1])
            return
        # "error:" of a command line has no prefix, and its words must not be taken for one.
        said = text if _USAGE_ERROR.match(text) else _PREFIX.sub("", text, count=1)
        if _USAGE_ERROR.match(said) or _RAISED.match(said):
            (self._consequences if _INDIRECT.search(said) else self._causes).append(said)

    def best(self) -> str:
        """Return the last cause, else the last consequence, else an empty text."""
        words = self._causes or self._consequences
        return words[-1][: limits().engines.logged_chars] if words else ""
