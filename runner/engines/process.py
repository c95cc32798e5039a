"""Child processes that hold engines: how one starts, what it says, its certain end, and its private folder.

Two kinds share this: programs of ours (``runner.engines.children.*``), which read one JSON line of settings from standard
input and answer in JSON lines on standard output, and servers of others, whose output is only read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from runner.definitions.plan import Progress, Report
from runner.errors import EngineError
from runner.limits import limits
from wire import clock
from wire.unreadable import UNREADABLE

log = logging.getLogger(__name__)

_SOURCE_ROOT = Path(__file__).resolve().parents[2]


class _Line(msgspec.Struct):
    """One line of a child of ours: progress, or the address it serves on, or why it cannot."""

    url: str = ""
    error: str = ""
    stage: str = ""
    fraction: float | None = None
    info: dict[str, object] = {}


class Child:
    """One process at a time, in a session of its own so that its whole tree can be killed. ``label`` is for the log."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._tail: deque[str] = deque(maxlen=50)
        self.info: dict[str, object] = {}
        """What a child of ours said about itself beside its address."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def pids(self) -> tuple[int, ...]:
        return () if self._process is None else (self._process.pid,)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start_ours(
        self,
        module: str,
        settings: Mapping[str, object],
        report: Report,
        *,
        limit_s: float,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> str:
        """Start ``python -m MODULE PARENT_PID``, hand it its settings; return the URL it serves on.

        ``environment`` comes on top of ours (see ``gpu_environment``); each line the engine logs goes to ``on_line``.
        Raises EngineError with its last words; whatever goes wrong, cancellation included, no process is left.
        """
        command = [sys.executable, "-m", module, str(os.getpid())]
        process = await self._spawn(command, {**child_environment(), **(environment or {})}, stdin=asyncio.subprocess.PIPE)
        self._readers.append(asyncio.create_task(self._read_log(process.stderr, on_line)))
        try:
            answer = await asyncio.wait_for(self._exchange(process, settings, report), limit_s)
        except TimeoutError:
            await self.kill()
            raise EngineError(f"the engine did not load within {limit_s:.0f} s") from None
        except BaseException:
            await self.kill()
            raise
        if not answer.url:
            with contextlib.suppress(TimeoutError):  # its log says why, and is written by another thread of it
                await asyncio.wait_for(process.wait(), limits().engines.last_words_s)
            ended = _describe_exit(process.returncode)
            await self.kill()
            raise EngineError(self.last_lines(answer.error, ended=ended))
        self.info = answer.info
        return answer.url

    async def start_foreign(
        self, command: Sequence[str], environment: Mapping[str, str], on_line: Callable[[str], None] | None = None
    ) -> None:
        """Start a program of others; each line it prints goes to ``on_line``. It and all its workers die with us.

        Raises EngineError when it cannot be started.
        """
        # The workers of such a server would live on, with the GPU's memory, when it is killed: the subreaper ends them with it.
        held = [sys.executable, "-m", "runner.engines.children.subreaper", str(os.getpid()), *command]
        env = {**environment, "PYTHONPATH": child_environment()["PYTHONPATH"]}
        process = await self._spawn(held, env, stdin=asyncio.subprocess.DEVNULL)
        self._readers.append(asyncio.create_task(self._read_log(process.stderr, on_line)))
        self._readers.append(asyncio.create_task(self._read_log(process.stdout, on_line)))

    async def stop(self, *, gently: bool, limit_s: float | None = None) -> None:
        """Have it end (ours: standard input closes; others: SIGTERM), kill its tree when that takes too long, or at once.

        ``limit_s`` is how long it has; None: ``stop_s`` of the limits.
        """
        process = self._process
        if process is None:
            return
        if gently and process.returncode is None:
            if process.stdin is not None:
                process.stdin.close()
            else:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), limits().engines.stop_s if limit_s is None else limit_s)
        await self.kill()

    async def kill(self) -> None:
        """Kill what is left of the process and everything in its session; return when it is gone."""
        process = self._process
        if process is None:
            return
        # Also after it exited by itself: a worker it started may have outlived it, and the group is theirs alone.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._process is process:
            self._process = None
        readers, self._readers = self._readers, []
        for reader in readers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader, 1.0)

    async def wait_gone(self) -> None:
        """Return when the process has exited; at once when there is none."""
        if self._process is not None and self._process.stdin is not None:  # one of ours
            await self._process.wait()
        # Not so for others: asyncio waits until their pipes close, which orphaned workers hold open.
        while self.is_running:  # noqa: ASYNC110  # a process sets no event
            await asyncio.sleep(limits().engines.server_look_s)

    def last_lines(self, error: str = "", *, ended: str = "") -> str:
        """Return ``error`` and the last lines the process printed; of one that left neither, how it ``ended``."""
        lines = [line for line in self._tail if line.strip()][-limits().engines.last_words_lines :]
        silent = f"the engine process died without a word{f' ({ended})' if ended else ''}"
        return " | ".join(filter(None, [error, *lines])) or silent

    async def _spawn(self, command: Sequence[str], environment: Mapping[str, str], *, stdin: int) -> asyncio.subprocess.Process:
        await self.kill()
        self._tail.clear()
        self.info = {}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env=dict(environment), start_new_session=True, limit=limits().engines.line_bytes,
            )  # fmt: skip
        except OSError as error:
            raise EngineError(f"cannot start {command[0]}: {error.strerror}") from None
        return self._process

    async def _exchange(self, process: asyncio.subprocess.Process, settings: Mapping[str, object], report: Report) -> _Line:
        if process.stdin is None or process.stdout is None:
            raise EngineError("the engine process has no pipes")
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            await process.stdin.drain()
        while line := await self._read_line(process.stdout):
            try:
                answer = msgspec.json.decode(line, type=_Line)
            except UNREADABLE:
                raise EngineError("the engine process printed something else than its answer") from None
            if answer.url or answer.error:
                return answer
            report(Progress(answer.stage, answer.fraction))
        return _Line()  # it died without a word

    async def _read_line(self, stream: asyncio.StreamReader) -> bytes:
        try:
            return await stream.readline()
        except ValueError:
            raise EngineError(f"the engine process printed a line of more than {limits().engines.line_bytes} bytes") from None

    async def _read_log(self, stream: asyncio.StreamReader | None, on_line: Callable[[str], None] | None) -> None:
        if stream is None:
            return
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than ``line_bytes``: asyncio has dropped it
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._tail.append(text)
            log.debug("%s: %s", self._label, text)
            if on_line is not None:
                on_line(text)


def _describe_exit(status: int | None) -> str:
    if status is None or status == 0:
        return ""
    if status > 0:
        return f"exit status {status}"
    return f"killed by {signal.Signals(-status).name}"


def child_environment() -> dict[str, str]:
    """Return our environment without our secrets, and with the folder that ``runner`` is imported from."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SOURCE_ROOT), kept.get("PYTHONPATH")]))
    return kept


def gpu_environment(gpu_ids: Sequence[int], *, is_cpu: bool = False) -> dict[str, str]:
    """Return what makes a child see these GPUs alone, numbered as the driver numbers them; nothing set when none is named.

    ``is_cpu``: it sees none, since some engines use a GPU for a part of their work whatever they are told.
    """
    if not gpu_ids and not is_cpu:
        return {}
    visible = ",".join(str(gpu_id) for gpu_id in gpu_ids)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible, "HIP_VISIBLE_DEVICES": visible}


# ---- process trees: that nothing of one is left, and which connections it has not let go of ----


def list_tree(pid: int | None) -> list[psutil.Process]:
    if pid is None:
        return []
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def list_left(pids: Iterable[int]) -> set[int]:
    """Return the ports of clients that have closed a connection which a server in these trees still holds open. Blocks."""
    found = []
    for pid in pids:
        for process in list_tree(pid):
            with contextlib.suppress(psutil.Error):
                found += process.net_connections(kind="tcp")
    # Connections of the server to others do not count: it may keep those as long as it likes.
    served = {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}
    return {
        connection.raddr.port
        for connection in found
        if connection.status == psutil.CONN_CLOSE_WAIT and connection.laddr.port in served
    }


async def kill_rest(tree: list[psutil.Process]) -> list[int]:
    """Kill what still runs of ``tree``; return the process ids of what has not gone within ``gone_s``."""
    give_up_at = clock.monotonic() + limits().engines.gone_s
    while True:
        left = [process for process in tree if _is_alive(process)]
        if not left or clock.monotonic() >= give_up_at:
            return [process.pid for process in left]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        await asyncio.sleep(limits().engines.gone_poll_s)


def _is_alive(process: psutil.Process) -> bool:
    try:
        # psutil compares start times: a process id that another program has got meanwhile does not count.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- folders for the sockets of servers we start: ours alone, short enough for a socket's path ----


def make_private_folder(name: str) -> Path:
    """Return a new folder that only we may enter; remove those of runners that were killed before they could. Blocks."""
    usual = Path(tempfile.gettempdir())
    # A socket's path has room for some hundred characters, and our names take up to 40.
    base = usual if len(str(usual)) <= limits().engines.folder_chars else Path("/tmp")  # noqa: S108  # mkdtemp makes it private
    prefix = f"muster-{name}-"
    for folder in base.glob(f"{prefix}*-*"):
        owner = folder.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)) and _is_our_folder(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base))


def _is_our_folder(path: Path) -> bool:
    try:
        # No link to one either: anybody may write to the place where it lies.
        return path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink()
    except OSError:
        return False


# ---- why a Python server failed, among the lines that it printed ----

# Servers of several processes put a process name before their lines, and loggers a date and a place.
_PREFIX = re.compile(
    r"^(?:\([^()]*\) ?)?(?:[\d:.TZ-]+\s+)?(?:(?:ERROR|CRITICAL) (?:[\d-]+ [\d:.]+ \[[^\]]*\] ?)?(?:[a-z_-]+: )*)?"
)
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)(?:: |$)")
_INDIRECT = re.compile(r"initialization failed|See root cause above|[Ss]ee stack trace|cancelled|ShardCannotStart")
_USAGE_ERROR = re.compile(r"^(?:\S+: )?error: ")
_VALIDATION = re.compile(r"^\s*(?:Value|Assertion) error, (.+?)(?: \[type=.*)?$")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class StageLog:
    """Fed with the lines of one start: reports the stages that some mark, and keeps why it failed.

    ``stages``: what a line has in it, the stage that it begins, and the share of the load that is done by then.
    """

    def __init__(self, report: Report, stages: Sequence[tuple[str, str, float]]) -> None:
        self._report = report
        self._stages = stages
        self._reached = 0.0
        self._causes: deque[str] = deque(maxlen=5)
        self._consequences: deque[str] = deque(maxlen=5)
        """Reasons that only followed from others."""

    def feed(self, line: str) -> None:
        text = _COLOUR.sub("", line)
        # "error:" of a command line has no prefix, and its words must not be taken for one.
        said = text if _USAGE_ERROR.match(text) else _PREFIX.sub("", text, count=1)
        if match := _VALIDATION.match(text):
            self._causes.append(match[1])
        elif _USAGE_ERROR.match(said) or _RAISED.match(said):
            (self._consequences if _INDIRECT.search(said) else self._causes).append(said)
        for marker, stage, fraction in self._stages:
            if marker in line:
                self.tell(stage, fraction)

    def tell(self, stage: str, fraction: float) -> None:
        if fraction > self._reached:  # a later process of the server repeats stages of an earlier one
            self._reached = fraction
            self._report(Progress(stage, round(fraction, 3)))

    def failure(self, last_lines: str = "") -> str:
        """Return the last cause, else the last consequence, else ``last_lines``."""
        reasons = self._causes or self._consequences
        return reasons[-1][: limits().engines.logged_chars] if reasons else last_lines
