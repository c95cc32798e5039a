"""Units of systemd as ``muster service install`` writes them: systemd understands them, and they may do little."""

from __future__ import annotations

import os
import plistlib
import re
import subprocess
from pathlib import Path

from controlplane.launcher.services import Scope, write_plist, write_units
from tools.package.checks import Check, Failed, NotHere, Outcome, Passed, Workplace, find_program

MOST_EXPOSURE = 3.0
"""Of 10, by ``systemd-analyze security``."""
_EXPOSURE = re.compile(r"Overall exposure level for (\S+): ([0-9.]+)")


def write_all(folder: Path, user: str) -> list[Path]:
    """Write every unit for the machine, as root has them written, and return their paths."""
    scope = Scope(folder, folder / "settings", Path("/var/lib/muster"), user, ("systemctl",))
    texts = {name: text for what in ("up", "node", "server") for name, text in write_units(what, [], scope).items()}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _verify(place: Workplace) -> Outcome:
    analyze = find_program("systemd-analyze")
    if analyze is None:
        return NotHere("there is no systemd-analyze")
    # The user of the service is made when it is installed; here it must be one that exists.
    units = write_all(place.make_folder("units"), "root")
    ended = subprocess.run(
        [analyze, "verify", *map(str, units)], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    if ended.returncode or ended.stderr.strip():
        return Failed(ended.stderr.strip() or f"systemd-analyze verify ended with status {ended.returncode}")
    found = {}
    for unit in (unit for unit in units if unit.suffix == ".service"):
        printed = place.call(analyze, "security", "--no-pager", "--offline=true", unit)
        if (said := _EXPOSURE.search(printed)) is None:
            return NotHere("this systemd-analyze looks at no unit that is not installed")
        found[unit.name] = float(said[2])
    if wrong := [
        f"{name}: exposure {level}, at most {MOST_EXPOSURE}" for name, level in found.items() if level > MOST_EXPOSURE
    ]:
        return Failed("\n".join(wrong))
    return Passed(f"{len(units)} units; exposure {min(found.values())} to {max(found.values())} of 10")


def _read_plists(place: Workplace) -> Outcome:
    for what in ("up", "node"):
        name, text = write_plist(what, ["--token", "x"], instance="local", logs=place.folder, data=place.folder)
        body = plistlib.loads(text)
        if body["Label"] != name or not Path(body["ProgramArguments"][0]).exists():
            return Failed(f"{name} starts {body['ProgramArguments'][0]}, which is not there")
    return Passed("read by Python's plistlib; launchd itself is on macOS alone")


CHECKS = (
    Check("systemd", "systemd takes the units, and they may do little", _verify),
    Check("launchd", "the property lists can be read, and start what is there", _read_plists),
)
