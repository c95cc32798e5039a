"""Programs that run as child processes, one engine each, and what they share: settings in, JSON lines out, a certain end.

None of them imports the rest of the runner's code. What is here needs the standard library, the clock and the limits alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from runner.limits import limits
from wire import clock

Model = TypeVar("Model")
Settings = dict[str, Any]  # JSON

SCOPE_HEADER = "x-prefix-scope"
"""Names what a prompt may share cached prefixes with; the adapter makes it of tenant and tag."""
PR_SET_PDEATHSIG = 1
_COUNTERS = Path("/proc/self/io")


def ask_linux(option: int, value: int) -> None:
    """Call ``prctl``, where there is one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


class Parent:
    """The runner at the other end of the pipes. Standard output is kept for our lines; what the engine prints goes to
    standard error.
    """

    def __init__(self) -> None:
        # A Ctrl-C in the terminal reaches the whole process group; when to stop is the parent's decision.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ask_linux(PR_SET_PDEATHSIG, signal.SIGKILL)  # elsewhere the closed standard input must do
        if os.getppid() != int(sys.argv[1]):  # it died before we asked
            sys.exit(1)
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def read_settings(self) -> Settings:
        settings: Settings = json.loads(sys.stdin.readline())
        return settings

    def say(self, **fields: object) -> None:
        """Send one line: ``stage`` and ``fraction``, or ``url`` (and ``info``), or ``error``."""
        with self._lock:
            self._out.write(json.dumps(fields) + "\n")
            self._out.flush()

    def wait_until_told(self) -> None:
        """Return when the runner closes standard input: unload and exit."""
        sys.stdin.read()


def run_child(
    load: Callable[[Settings, Parent], Model], serve: Callable[[Model, Settings, Parent], None],
    unload: Callable[[Model], object],
) -> int:  # fmt: skip
    """Serve one model until the runner closes standard input; return the exit status.

    What ``load`` and ``serve`` raise as RuntimeError, ValueError, OSError or AssertionError is a reason for the node's owner.
    """
    parent = Parent()
    settings = parent.read_settings()
    try:
        model = load(settings, parent)
        serve(model, settings, parent)
    except (RuntimeError, ValueError, OSError, AssertionError) as error:
        parent.say(error=str(error) or type(error).__name__)
        return 1
    unload(model)
    return 0


def import_engine(module: str, extra: str) -> Any:  # Any: an untyped library
    """Return a library that the ``extra`` of our package brings. Raises RuntimeError."""
    try:
        return import_module(module)
    except ImportError as error:
        raise RuntimeError(f"the engine cannot be imported ({error}): pip install 'muster[{extra}]'") from error


@contextmanager
def load_ctranslate2(parent: Parent, folder: Path) -> Iterator[None]:
    """Report how a model of CTranslate2 is read within. Raises RuntimeError, ValueError or OSError naming the folder."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder.name} has no tokenizer.json: convert it with --copy_files tokenizer.json")
    try:
        with report_reading(parent, (folder / "model.bin").stat().st_size):
            yield
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"{folder.name} cannot be loaded: {error}") from None


def unload_ctranslate2(model: Any) -> None:  # Any: untyped library
    """Return when a model of CTranslate2 is unloaded. Raises RuntimeError when it does not come to that."""
    give_up_at = clock.monotonic() + limits().children.unload_s
    while model.model_is_loaded:
        if clock.monotonic() > give_up_at:
            raise RuntimeError("the model is still loaded")
        model.unload_model()  # ignored without a word while a generation runs and for a moment after: it is asked again
        clock.sleep(0.02)


@contextmanager
def report_reading(parent: Parent, weights_bytes: int) -> Iterator[None]:
    """Report the share of ``weights_bytes`` that this process has read since entering: some libraries say nothing of it."""
    stage = "reading weights"
    parent.say(stage=stage)
    done = threading.Event()
    start = _bytes_read()

    def watch() -> None:
        while start is not None and not done.wait(limits().children.reading_poll_s):
            now = _bytes_read()
            # Below 1.0: when all is read, the library still has to convert and place it.
            if now is not None and weights_bytes > 0:
                parent.say(stage=stage, fraction=round(min((now - start) / weights_bytes, 0.99), 3))

    watcher = threading.Thread(target=watch, name="reading", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _bytes_read() -> int | None:
    try:
        return int(_COUNTERS.read_text(encoding="ascii").partition("rchar: ")[2].split("\n", 1)[0])
    except (OSError, ValueError):
        return None
