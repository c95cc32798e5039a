"""Log lines that the runner keeps for the control plane: its own last ones, without prompts and credentials."""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.limits import limits
from wire import clock
from wire.bridge import LogLine, LogTail
from wire.logs import CUT_OUT, cut_secrets

_OWN = ("runner", "wire")


class LogRing(logging.Handler):
    """Keeps the last lines of our own loggers, apart for those from WARNING on: a chatty hour pushes out no error.

    Lines of engines' programs are logged at DEBUG and stay out, as do the words of exceptions: either may repeat a request.
    ``secrets``: texts that are cut out wherever they stand.
    """

    def __init__(self, *, secrets: Collection[str] = ()) -> None:
        super().__init__(logging.INFO)
        self._limits = limits().connection
        self._secrets = tuple(secret for secret in secrets if secret)
        self._infos: deque[LogLine] = deque(maxlen=self._limits.log_infos)
        self._warnings: deque[LogLine] = deque(maxlen=self._limits.log_warnings)
        self._left_out = 0
        self._answered_at = float("-inf")

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Take lines while the block runs."""
        logging.getLogger().addHandler(self)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] not in _OWN:
            return
        try:
            text = self._clean(record)
        except (TypeError, ValueError, KeyError):  # its values do not fit its text: ``logging`` itself says so on stderr
            return
        line = LogLine(at_ms=int(record.created * 1000), level=record.levelname.lower(), text=text)
        if record.levelno < logging.WARNING:
            self._infos.append(line)
            return
        self._left_out += len(self._warnings) == self._warnings.maxlen
        self._warnings.append(line)

    def answer(self, query_id: str) -> LogTail | None:
        """Return the kept lines, the oldest first; None when somebody asked a moment ago."""
        now = clock.monotonic()
        if now - self._answered_at < self._limits.log_pause_s:
            return None
        self._answered_at = now
        lines = sorted([*self._infos, *self._warnings], key=lambda line: line.at_ms)
        room, first = self._limits.log_tail_chars, len(lines)
        while first and (room := room - len(lines[first - 1].text)) >= 0:
            first -= 1
        return LogTail(query_id=query_id, lines=lines[first:], left_out=self._left_out)

    def _clean(self, record: logging.LogRecord) -> str:
        text = f"{record.name}: {record.getMessage()}"
        if record.exc_info and record.exc_info[0] is not None:
            frames = traceback.extract_tb(record.exc_info[2])
            where = f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            text += f" ({record.exc_info[0].__name__}{where})"
        for secret in self._secrets:
            text = text.replace(secret, CUT_OUT)
        text = cut_secrets(" | ".join(text.splitlines()))
        return "".join(c if c.isprintable() else " " for c in text[: self._limits.log_line_chars])
