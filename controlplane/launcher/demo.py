"""``./muster demo``: what the launcher does for it. The rest are commands: ``demo_governance`` and ``demo_fleet``.

``governance`` needs a second model for the local node. ``fleet`` starts the installation when none runs on the directory.
"""

from __future__ import annotations

import math
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from controlplane.launcher.console import LauncherError, StopRequested
from controlplane.launcher.environment import ROOT
from controlplane.launcher.files import read_holder, read_json, replace_file
from controlplane.launcher.installation import installation_path, lock_path, read_variables, run_manage
from controlplane.launcher.parts import TINY_MODEL
from controlplane.launcher.processes import send
from wire import clock

MODEL = "muster-tiny-f16"
_LOOK_S = 0.1


def run_fleet(data: Path, *, ports: Sequence[str], words: Sequence[str]) -> int:
    """Write the demo's fleet into the installation on ``data`` and play it until Ctrl-C; returns the exit status.

    An installation that does not run is started, with ``ports`` as options of ``up``, and stopped at the end. ``words``: of the
    command ``demo_fleet``. Raises LauncherError.
    """
    data = data.resolve()
    if read_holder(lock_path(data)) is not None:
        read_variables(data)
        run_manage(data, ["demo_fleet", "--data", str(data), *words])
    with _hold(data, ports):
        environment = {**os.environ, **read_variables(data)}
        command = [sys.executable, "-m", "controlplane.manage", "demo_fleet", "--data", str(data), *words]
        return _await(subprocess.Popen(command, cwd=ROOT, env=environment))


@contextmanager
def _hold(data: Path, ports: Sequence[str]) -> Iterator[None]:
    """Run ``up`` on ``data`` until the block ends. Raises LauncherError when it does not get ready."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    command = [sys.executable, "-m", "controlplane.launcher", "up", "--data", str(data), "--no-node", *ports]
    # In a group of its own: Ctrl-C reaches it when the demo has ended, not before.
    up = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        while not installation_path(data).exists():
            if up.poll() is not None:
                raise LauncherError(f"the installation on {data} did not start; what it said stands above")
            clock.sleep(_LOOK_S)
        yield
    except StopRequested:
        pass
    finally:
        if up.poll() is None:
            up.terminate()
        up.wait()


def _await(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except StopRequested:
            process.terminate()


def _stop(number: int, frame: object) -> None:
    del number, frame
    raise StopRequested


def run_demo(data: Path, *, as_json: bool) -> NoReturn:
    """Set the demo up on the installation that runs on ``data``; safe to do again. Raises LauncherError."""
    data = data.resolve()
    read_variables(data)  # says what to do when nothing runs there
    make_second_model(data / "models")
    wake_node(data)
    run_manage(data, ["demo_governance", "--model", MODEL, "--data", str(data), *(["--json"] if as_json else [])])


def make_second_model(folder: Path) -> Path:
    """Return the second model in the folder of the local node, written unless it is there. Raises LauncherError."""
    target = folder / f"{MODEL}.gguf"
    try:
        if not target.exists():
            replace_file(target, _unpack(TINY_MODEL.read_bytes()), mode=0o644)
    except (OSError, ValueError) as error:
        raise LauncherError(f"cannot make {target}: {error}. Is an installation there? Name it with --data DIR") from None
    return target


def wake_node(data: Path) -> None:
    pids = read_json(installation_path(data)).get("pids")
    pid = pids.get("node") if isinstance(pids, dict) else None
    if isinstance(pid, int) and pid != os.getpid():
        # The node then looks through its models again, and can be seen to have another one.
        send(pid, signal.SIGHUP)


_ALIGNMENT = 32
_MAGIC, _VERSION = b"GGUF", 3
_F32, _F16, _Q8_0 = 0, 1, 8
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_BLOCK, _BLOCK_BYTES = 32, 34
_FILE_TYPE = b"general.file_type"
_MOSTLY_F16 = 1


def _unpack(data: bytes) -> bytes:
    """Return a GGUF file with f32 and q8_0 tensors, of at most a few MB, with f16 in the place of q8_0. Raises ValueError."""
    if data[:4] != _MAGIC or struct.unpack_from("<I", data, 4) != (_VERSION,):
        raise ValueError("not a GGUF file of version 3")
    tensors, pairs = struct.unpack_from("<QQ", data, 8)
    head, at = bytearray(data[:24]), 24
    for _ in range(pairs):
        key, value = _read_text(data, at)
        end = _skip_value(data, value + 4, *struct.unpack_from("<I", data, value))
        head += data[at:end] if key != _FILE_TYPE else data[at : value + 4] + struct.pack("<I", _MOSTLY_F16)
        at = end
    table: list[tuple[bytes, int, int, int]] = []
    for _ in range(tensors):
        _, shape_at = _read_text(data, at)
        (dimensions,) = struct.unpack_from("<I", data, shape_at)
        kind_at = shape_at + 4 + 8 * dimensions
        shape = struct.unpack_from(f"<{dimensions}Q", data, shape_at + 4)
        kind, offset = struct.unpack_from("<IQ", data, kind_at)
        table.append((data[at:kind_at], kind, offset, math.prod(shape)))
        at = kind_at + 12
    start, body = -(-at // _ALIGNMENT) * _ALIGNMENT, bytearray()
    for name, kind, offset, count in table:
        head += name + struct.pack("<IQ", _F16 if kind == _Q8_0 else kind, len(body))
        body += _read_tensor(data, start + offset, kind, count)
        body += bytes(-len(body) % _ALIGNMENT)
    return bytes(head) + bytes(-len(head) % _ALIGNMENT) + bytes(body)


def _read_tensor(data: bytes, at: int, kind: int, count: int) -> bytes:
    if kind == _F32:
        return data[at : at + 4 * count]
    if kind != _Q8_0:
        raise ValueError(f"tensors of type {kind} are not read here")
    packed = bytearray()
    for block in range(at, at + count // _BLOCK * _BLOCK_BYTES, _BLOCK_BYTES):
        scale, *weights = struct.unpack_from(f"<e{_BLOCK}b", data, block)
        packed += struct.pack(f"<{_BLOCK}e", *(scale * weight for weight in weights))
    return bytes(packed)


def _read_text(data: bytes, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length], at + 8 + length


def _skip_value(data: bytes, at: int, kind: int) -> int:
    if kind == _STRING:
        return _read_text(data, at)[1]
    if kind != _ARRAY:
        return at + _SIZES[kind]
    inner, length = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner not in {_STRING, _ARRAY}:
        return int(at + length * _SIZES[inner])
    for _ in range(length):
        at = _skip_value(data, at, inner)
    return at
