"""Makes in ``build/`` what a run needs: the C programs of ``native/``, and environments that hold the wheels of peers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchmarkError

HERE = Path(__file__).resolve().parent
SOURCE_DIR = HERE / "native"
BUILD_DIR = HERE / "build"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


_INSTALL_S = 600.0


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of the compiled programs."""

    mock_upstream: Path
    load: Path


def build_tools(build_dir: Path = BUILD_DIR) -> Tools:
    """Return the compiled programs, compiling what is stale. Raises BenchmarkError without a compiler."""
    return Tools(mock_upstream=_build("mock_upstream", build_dir), load=_build("load", build_dir))


def install_wheels(name: str, requirement: str, *options: str) -> Path:
    """Return the Python of a virtual environment with one requirement, made with pip when there is none.

    Raises BenchmarkError when the wheels cannot be had.
    """
    place = BUILD_DIR / name
    if not place.exists():
        BUILD_DIR.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that what is there is whole. Its Python finds its packages wherever the folder lies.
        draft = BUILD_DIR / f"{name}.{os.getpid()}"
        requirements = BUILD_DIR / f"{draft.name}.txt"
        requirements.write_text(requirement)
        pip = [str(draft / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        try:
            _install(name, [sys.executable, "-m", "venv", str(draft)])
            _install(name, [*pip, *options, "--only-binary", ":all:", "-r", str(requirements)])
            draft.replace(place)
        finally:
            requirements.unlink()
            shutil.rmtree(draft, ignore_errors=True)
    return place / "bin" / "python"


def _install(name: str, argv: Sequence[str]) -> None:
    try:
        subprocess.run(argv, capture_output=True, text=True, timeout=_INSTALL_S, check=True)
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or error.stderr.strip().splitlines()
        raise BenchmarkError(f"{name} cannot be installed: {said[-1][:200] if said else 'pip said nothing'}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchmarkError(f"{name} cannot be installed: {error}") from error


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
