"""Signs of life on a stream whose answer is not there yet, so that no proxy or client gives up on it.

A request may wait in the queue and then for its prompt to be read; both can take longer than the idle time-out of what
stands between. A comment is what every reader of event streams skips (WHATWG HTML, section 9.2.6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.request.client import ClientConnection
from gateway.values import Header

COMMENT = b": ping\n\n"
_NO_ANSWER = (b":", b"\n")
"""What writes that belong to no answer begin with: our comments, an engine's, and what stands for nothing written yet."""
_HEAD: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class KeepAlive:
    """Begins the response of one streamed request if nothing else did, and pings whenever nothing was said for a while.

    ``event`` is what is sent within the answer; whoever passes that on sets the one of its dialect. Until something of the
    answer is out it is a comment, since Messages begin with ``message_start``. ``extra``: headers of the response.
    """

    def __init__(self, client: ClientConnection, *, extra: Sequence[Header], every_s: float) -> None:
        self.event = COMMENT
        self._client = client
        self._extra = extra
        self._every_s = every_s
        self._seen = client.tail
        self._has_answer = False
        self._quiet = 0
        """How many looks ago something was said last."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to count; a sign comes after ``every_s`` seconds of silence at most, the first one not before."""
        self._timer = asyncio.get_running_loop().call_later(self._every_s / 2, self._tick)

    def stop(self) -> None:
        """Say nothing more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        client = self._client
        if client.finished or client.is_gone:
            return
        self._quiet = self._quiet + 1 if client.tail is self._seen else 1
        if self._quiet >= 2:
            self._quiet = 0
            self._say(client)
        self._seen = client.tail
        self.start()

    def _say(self, client: ClientConnection) -> None:
        if not client.started:
            client.start(200, [*_HEAD, *self._extra])
            client.write(COMMENT)
        elif client.tail.endswith(b"\n\n") and not client.is_blocked:  # between two events: within one it would tear it apart
            self._has_answer = self._has_answer or not client.tail.startswith(_NO_ANSWER)
            client.write(self.event if self._has_answer else COMMENT)
