"""Compiles the C programs in ``native/`` into ``build/`` when they are missing or older than their source."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchmarkError

HERE = Path(__file__).resolve().parent
SOURCE_DIR = HERE / "native"
BUILD_DIR = HERE / "build"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of the compiled programs."""

    mock_upstream: Path
    load: Path


def build_tools(build_dir: Path = BUILD_DIR) -> Tools:
    """Return the compiled programs, compiling what is stale. Raises BenchmarkError without a compiler."""
    return Tools(mock_upstream=_build("mock_upstream", build_dir), load=_build("load", build_dir))


def find_compiler() -> str | None:
    """Return the path of ``$CC``, else of the first of cc, gcc and clang on PATH; None when there is none."""
    names = (os.environ["CC"], *_COMPILERS) if os.environ.get("CC") else _COMPILERS
    return next((path for name in names if (path := shutil.which(name))), None)


def _build(name: str, build_dir: Path) -> Path:
    source, binary = SOURCE_DIR / f"{name}.c", build_dir / name
    if binary.exists() and binary.stat().st_mtime > source.stat().st_mtime:
        return binary
    compiler = find_compiler()
    if compiler is None:
        raise BenchmarkError(
            "no C compiler found: the mock upstream and the load client are C programs. Install gcc or clang, or set CC"
        )
    build_dir.mkdir(parents=True, exist_ok=True)
    # Renamed into place, so that two runs at once never execute half a file.
    draft = build_dir / f"{name}.{os.getpid()}"
    result = subprocess.run(
        [compiler, *_FLAGS, "-o", str(draft), str(source)], capture_output=True, text=True, timeout=120, check=False
    )
    if result.returncode != 0:
        raise BenchmarkError(f"{compiler} could not compile {source}:\n{result.stderr.strip()}")
    draft.replace(binary)
    return binary
