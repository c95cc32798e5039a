"""An event loop on the virtual clock: whoever waits is woken in order of their deadlines, and no real time passes."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

from tests.fakes.clock import VirtualClock
from tests.fakes.waiting import takes
from wire import clock

Result = TypeVar("Result")


class _Selector(selectors.BaseSelector):
    """Lets the time pass where another one would wait; ``rest`` is asked then and says whether it may."""

    def __init__(self, turned: VirtualClock | None) -> None:
        self._clock = turned
        self._real = selectors.DefaultSelector()
        self.rest: Callable[[], bool] = lambda: True

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:  # Any: as the base has it
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:  # Any: as the base has it
        return self._real.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready and timeout != 0 and self.rest():
            assert timeout is not None, "everybody waits, and nothing can wake them"
            assert self._clock is not None, "everybody waits for time, which only the test lets pass"
            self._clock.advance(timeout)
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Not for sockets and processes: they need real time. What is given to a thread is done by the loop itself, a turn later.

    ``turned``: the clock that the loop lets run, None = it only reads ``wire.clock``. ``problems``: what nobody handled.
    """

    def __init__(self, turned: VirtualClock | None = None) -> None:
        self._selector_of_time = _Selector(turned)
        super().__init__(self._selector_of_time)
        self.problems: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self.problems.append(context))

    def time(self) -> float:
        return clock.monotonic()

    def run_in_executor(  # type: ignore[override]  # the base promises less in its stubs than in its words
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Call ``func`` in a turn of its own."""
        del executor
        done: asyncio.Future[Result] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001  # it is the caller's
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        self.call_soon(work)
        return done

    def settle(self) -> None:
        def stop() -> bool:
            self.stop()
            return False

        self._selector_of_time.rest = stop
        try:
            self.run_forever()
        finally:
            self._selector_of_time.rest = lambda: True

    def advance(self, seconds: float) -> None:
        self.run_until_complete(takes(seconds))
        self.settle()
