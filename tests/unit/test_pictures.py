"""Pictures of the pages: each one that a page shows is made by the script, and each that the script makes is shown."""

from __future__ import annotations

import re
from pathlib import Path

from tools.pictures import IMAGES, PICTURES

ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_picture_of_the_pages_is_one_that_the_script_makes() -> None:
    shown = {
        Path(found).name
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for found in re.findall(r"!\[[^\]]*\]\(([^)]*images/[^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == {picture.file for picture in PICTURES} == {path.name for path in IMAGES.iterdir()}
    # The head of a PNG (its specification, section 11.2.2) says how large it is: as large as the script takes it, and coloured
    # by a palette.
    for picture in PICTURES:
        head = (IMAGES / picture.file).read_bytes()[:26]
        size = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
        assert (picture.file, size, head[25]) == (picture.file, picture.size, 3)
