"""The sdist and the wheel: the same bytes whenever they are built, and nothing in them but what is shipped."""

from __future__ import annotations

import email
import hashlib
import os
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

from tools.package.checks import Check, CheckFailed, Failed, Outcome, Passed, Workplace, format_bytes
from wire import RELEASE

_NOT_SHIPPED = {"tests", "tools", "benchmarks", "docker", "docs", "node_modules", "__pycache__", ".git", ".venv", ".muster"}
_SECRET = re.compile(rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----\s+[A-Za-z0-9+/=]{20}")
_HOMES = b"|".join((b"home", b"Users", b"root", b"work"))
_MACHINE_PATH = re.compile(rb"(?<![\w.])/(?:%b)/[\w.-]+/[\w./-]+" % _HOMES)


def build(place: Workplace) -> Path:
    """Build both archives into a folder of the workplace and return it: the wheel out of the unpacked sdist, as pip does."""
    made = place.make_folder("built")
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made)]
    place.call(*words, place.root, env={**os.environ, "SOURCE_DATE_EPOCH": "1577836800", "PIP_NO_INPUT": "1"})
    return made


def find_wheel(place: Workplace) -> Path:
    """Return the wheel, which the first to ask builds."""
    return _find_one(place.make_once("built", build), "*.whl")


def find_sdist(place: Workplace) -> Path:
    return _find_one(place.make_once("built", build), "*.tar.gz")


def _find_one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise CheckFailed(f"the build made {len(found)} files {pattern}")
    return found[0]


def _build_and_keep(place: Workplace) -> Outcome:
    kept = []
    for built in (find_sdist(place), find_wheel(place)):
        shutil.copy(built, place.out / built.name)
        digest = hashlib.sha256(built.read_bytes()).hexdigest()
        kept.append(f"{format_bytes(built.stat().st_size)} {place.out / built.name} sha256:{digest}")
    return Passed("\n".join(kept))


def _build_twice(place: Workplace) -> Outcome:
    """Build a copy of the tracked files, elsewhere and with other times, and compare."""
    copy = place.make_folder("elsewhere") / "a-copy"
    for name in list_tracked(place):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(place.root / name, target)
        shutil.copymode(place.root / name, target)
        os.utime(target, (1_700_000_000, 1_700_000_000))
    # Not a checkout of git: what is ignored is in no archive only because it is not there.
    again = build(Workplace(root=copy, folder=place.folder, out=place.out))
    wrong = []
    for first, pattern in ((find_sdist(place), "*.tar.gz"), (find_wheel(place), "*.whl")):
        second = _find_one(again, pattern)
        if first.read_bytes() != second.read_bytes():
            one, other = _digests(first), _digests(second)
            differing = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
            wrong.append(f"{first.name} differs in {', '.join(differing[:8]) or 'its order, modes or times'}")
    return Failed("\n".join(wrong)) if wrong else Passed("a build from a copy with other paths and times has the same bytes")


def list_tracked(place: Workplace) -> list[str]:
    """Return the files of the checkout that git knows and that are there."""
    names = place.call("git", "ls-files", "-z").split("\0")
    return [name for name in names if name and (place.root / name).is_file()]


def list_shipped(place: Workplace) -> dict[str, str]:
    """Return what a wheel has to hold: the path in it, and the file of the checkout."""
    config = tomllib.loads((place.root / "pyproject.toml").read_text(encoding="utf-8"))
    packages: list[str] = config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return {
        str(PurePosixPath(name).relative_to(PurePosixPath(package).parent)): name
        for name in list_tracked(place)
        for package in packages
        if name.startswith(f"{package}/")
    }


def _check_contents(place: Workplace) -> Outcome:
    wheel, sdist, shipped = find_wheel(place), find_sdist(place), list_shipped(place)
    inside = _read(wheel)
    about = f"muster-{RELEASE}.dist-info/"
    wrong = [f"{wheel.name} lacks {name}" for name in sorted(shipped.keys() - inside.keys())]
    wrong += [
        f"{wheel.name} holds {name}, which is no file of the repository"
        for name in sorted(inside.keys() - shipped.keys())
        if not name.startswith(about)
    ]
    wrong += [f"{name} is not what the repository has" for name in sorted(shipped.keys() & inside.keys())
              if inside[name] != (place.root / shipped[name]).read_bytes()]  # fmt: skip
    for archive, files in ((wheel, inside), (sdist, _read(sdist))):
        wrong += [f"{archive.name}: {trouble}" for name, content in sorted(files.items()) for trouble in _judge(name, content)]
    wrong += _check_metadata(inside.get(f"{about}METADATA", b""), inside.get(f"{about}entry_points.txt", b""))
    data = sum(1 for name in shipped if not name.endswith(".py"))
    return Failed("\n".join(wrong[:40])) if wrong else Passed(f"{len(shipped)} files, {data} of them no Python")


def _judge(name: str, content: bytes) -> list[str]:
    """Return what is wrong with a file that is shipped."""
    found = [f"{name} is not shipped" for part in PurePosixPath(name).parts if part in _NOT_SHIPPED]
    if _SECRET.search(content):
        found.append(f"{name} holds a private key")
    paths = {match.group().decode() for match in _MACHINE_PATH.finditer(content)}
    return found + [f"{name} names {path}" for path in sorted(paths)]


def _check_metadata(metadata: bytes, entry_points: bytes) -> list[str]:
    told = email.message_from_bytes(metadata)
    wanted = {"Name": "muster", "Version": RELEASE, "Requires-Python": ">=3.11", "License-Expression": "Apache-2.0"}
    wrong = [f"METADATA says {name}: {told[name]}, not {value}" for name, value in wanted.items() if told[name] != value]
    if b"muster = controlplane.launcher.cli:" not in entry_points:
        wrong.append("the wheel has no console script muster")
    return wrong


def _read(archive: Path) -> dict[str, bytes]:
    """Return the files of a wheel, or of an sdist without its first folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(archive) as sdist:
        files = {member.name.partition("/")[2]: sdist.extractfile(member) for member in sdist.getmembers() if member.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


def _digests(archive: Path) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in _read(archive).items()}


CHECKS = (
    Check("build", "sdist and wheel are built, the wheel from the sdist", _build_and_keep),
    Check("reproducible", "a second build elsewhere has the same bytes", _build_twice),
    Check("contents", "the archives hold each shipped file, and no test, secret or path of a machine", _check_contents),
)
