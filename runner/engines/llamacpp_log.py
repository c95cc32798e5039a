"""What llama.cpp tells about a load only in its log: how far it is, the size of its KV cache, why it failed. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from runner.definitions.plan import Progress, Report
from runner.limits import limits

_KV_BUFFER = re.compile(r"(?:KV|RS) buffer size =\s*([0-9.]+) MiB")
_ERROR = re.compile(r"^[0-9.]+ E (.*)")
_FOLLOWS_FROM_ANOTHER = ("failed to load model", "failed to create", "exiting due to")


class LoadLog:
    """Reads the lines of one load; progress goes to ``report``. Deaf once ``close`` was called: then it is about requests.

    ``on_loaded`` is called when it says that the model is loaded, the last of what is read here.
    """

    def __init__(self, report: Report, *, on_loaded: Callable[[], None]) -> None:
        self._report = report
        self._on_loaded = on_loaded
        self._is_open = True
        self._errors: list[str] = []
        self._kv_mib = 0.0
        self.is_reading = True
        """Whether the weights are being read, as far as is known."""

    @property
    def kv_bytes(self) -> int | None:
        """Size of the buffers for keys and values (and recurrent states), None when none was named."""
        return int(self._kv_mib * 1024 * 1024) or None

    @property
    def reason(self) -> str:
        """Why it failed, in llama.cpp's words; empty when it did not say."""
        causes = [text for text in self._errors if not any(words in text for words in _FOLLOWS_FROM_ANOTHER)]
        return "; ".join(dict.fromkeys(causes or self._errors[:1]))

    def read(self, line: str) -> None:
        """Take one line."""
        if not self._is_open:
            return
        if found := _KV_BUFFER.search(line):
            self._kv_mib += float(found[1])
            self.is_reading = False
        elif "warming up the model" in line:
            self._report(Progress("warming up"))
        elif line.endswith("model loaded"):
            self._on_loaded()
        elif (found := _ERROR.match(line)) and len(self._errors) < limits().engines.llama_log_errors:
            text = re.sub(r"\s{2,}", " ", found[1])
            self._errors.append(text.partition("error loading model: ")[2] or text)

    def close(self) -> None:
        """Read no more."""
        self._is_open = False
