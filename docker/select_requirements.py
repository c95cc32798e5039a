"""Print a hash-locked requirements file without the packages named on the command line.

Used while an image is built, before anything is installed: standard library only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==")


def select_requirements(text: str, left_out: set[str]) -> str:
    """Return ``text`` without the pins of ``left_out`` and the hash lines that follow them.

    Raises ValueError when a name is not pinned there, so that a renamed package cannot slip back in.
    """
    kept: list[str] = []
    seen: set[str] = set()
    keeping = True
    for line in text.splitlines():
        pin = _PIN.match(line)
        if pin:
            name = pin.group(1).lower().replace("_", "-")
            keeping = name not in left_out
            seen.add(name)
        elif not line.startswith((" ", "\t")):
            keeping = True
        if keeping:
            kept.append(line)
    missing = left_out - seen
    if missing:
        raise ValueError(f"not in the locked set: {', '.join(sorted(missing))}")
    return "\n".join(kept) + "\n"


if __name__ == "__main__":
    sys.stdout.write(select_requirements(Path(sys.argv[1]).read_text(encoding="utf-8"), set(sys.argv[2:])))
