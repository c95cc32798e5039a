"""Makes the pictures of the pages anew, from a demo: ``python -m tools.pictures [NAME ...] [--data DIR] [--out DIR]``.

Every picture has the same size, language, time zone and scene each time, and as few colours as a PNG with a palette holds.
"""

from __future__ import annotations

import argparse
import base64
import struct
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page

from controlplane.launcher.console import LauncherError, complain, progress
from controlplane.launcher.environment import ROOT
from tools.demo_browser import DESK, PHONE, Demo, open_browser, open_demo, open_page

IMAGES = ROOT / "docs" / "images"
_SETTLE_MS = 1_500


@dataclass(frozen=True, slots=True)
class Picture:
    """One file in ``docs/images``. ``clicks``: links or buttons that lead on from ``path``, by their text or ``css:…``."""

    name: str
    path: str
    clicks: tuple[str, ...] = ()
    size: tuple[int, int] = DESK
    is_dark: bool = False

    @property
    def file(self) -> str:
        return f"{self.name}.png"


_NODES, _REQUESTS = "/admin/nodes/node/", "/admin/gateway/requestrecord/"
_FAILED = "phi-4-14b&state=wrong"
_FIRST_ROW = "css:main table tbody a[href*='/requestrecord/']"
PICTURES = (
    Picture("overview", "/admin/"),
    Picture("overview-dark", "/admin/", is_dark=True),
    Picture("overview-phone", "/admin/", size=PHONE),
    Picture("nodes", _NODES),
    Picture("node", _NODES, ("atlas",)),
    Picture("models", "/admin/gateway/model/"),
    Picture("catalogue", "/admin/gateway/model/catalogue/"),
    Picture("requests", _REQUESTS),
    Picture("request", f"{_REQUESTS}?q={_FAILED}", (_FIRST_ROW,)),
    Picture("usage", "/admin/usage/?range=7d"),
    Picture("playground", "/admin/playground/"),
    Picture("approvals", "/approvals/"),
    Picture("approval", "/approvals/", ("Load qwen3-32b on ceres",)),
    Picture("approval-phone", "/approvals/", ("Load qwen3-32b on ceres",), size=PHONE),
    Picture("access", "/admin/gateway/apikey/"),
    Picture("system", "/admin/system/"),
)

# Counts colours to five bits a channel, keeps those that most points have, and gives every point the nearest of them.
_REDUCE = """async ([data, most]) => {
    const image = new Image();
    image.src = "data:image/png;base64," + data;
    await image.decode();
    const canvas = new OffscreenCanvas(image.width, image.height);
    const pen = canvas.getContext("2d");
    pen.drawImage(image, 0, 0);
    const points = pen.getImageData(0, 0, image.width, image.height).data;
    const found = new Map();
    for (let at = 0; at < points.length; at += 4) {
        const key = (points[at] >> 3) << 10 | (points[at + 1] >> 3) << 5 | points[at + 2] >> 3;
        const sums = found.get(key) || [0, new Map()];
        sums[0] += 1;
        const exact = points[at] << 16 | points[at + 1] << 8 | points[at + 2];
        sums[1].set(exact, (sums[1].get(exact) || 0) + 1);
        found.set(key, sums);
    }
    const usual = (counts) => [...counts].reduce((best, one) => one[1] > best[1] ? one : best)[0];
    const palette = [...found.values()].sort((one, other) => other[0] - one[0]).slice(0, most).map((one) => usual(one[1]));
    const nearest = new Map();
    const find = (red, green, blue) => {
        let best = 0, least = Infinity;
        palette.forEach((colour, place) => {
            const far = (red - (colour >> 16)) ** 2 + (green - (colour >> 8 & 255)) ** 2 + (blue - (colour & 255)) ** 2;
            if (far < least) { least = far; best = place; }
        });
        return best;
    };
    const places = new Uint8Array(points.length / 4);
    for (let at = 0; at < points.length; at += 4) {
        const exact = points[at] << 16 | points[at + 1] << 8 | points[at + 2];
        if (!nearest.has(exact)) nearest.set(exact, find(points[at], points[at + 1], points[at + 2]));
        places[at / 4] = nearest.get(exact);
    }
    let text = "";
    for (let at = 0; at < places.length; at += 32768) text += String.fromCharCode(...places.subarray(at, at + 32768));
    return {width: image.width, height: image.height, palette, places: btoa(text)};
}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these pictures (default: all, and others are deleted)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a demo that plays (default: one is started)")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="DIR", help="where they go (default: docs/images)")
    options = parser.parse_args(arguments)
    known = {picture.name: picture for picture in PICTURES}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no picture {unknown[0]}; there are {', '.join(known)}")
    wanted = [known[name] for name in options.names] or list(PICTURES)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="muster-pictures-") as folder,
            open_demo(options.data or Path(folder) / "data") as demo,
            open_browser() as browser,
        ):
            failed = take_all(browser, demo, wanted, options.out)
    except LauncherError as error:
        complain(str(error))
        return 1
    if not options.names and not failed:
        for path in options.out.glob("*.png"):
            if path.name not in {picture.file for picture in PICTURES}:
                path.unlink()
    return 1 if failed else 0


def take_all(browser: Browser, demo: Demo, pictures: Sequence[Picture], folder: Path) -> list[str]:
    """Take pictures into a folder; return the names of those whose page could not be had."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for size, is_dark in dict.fromkeys((picture.size, picture.is_dark) for picture in pictures):
        page = open_page(browser, demo, size=size, is_dark=is_dark)
        for picture in pictures:
            if (picture.size, picture.is_dark) != (size, is_dark):
                continue
            try:
                data = reduce_colours(page, _take(page, picture))
            except Exception as error:  # noqa: BLE001  # one page that fails, in whatever way, leaves the other pictures
                complain(f"{picture.name}: {str(error).splitlines()[0]}")
                failed.append(picture.name)
                continue
            (folder / picture.file).write_bytes(data)
            progress(f"{picture.file}  {len(data) / 1024:.0f} KiB")
        page.context.close()
    return failed


def _take(page: Page, picture: Picture) -> bytes:
    page.goto(picture.path)
    for words in picture.clicks:
        is_selector = words.startswith("css:")
        found = page.locator(words[4:]) if is_selector else page.locator("a, button").filter(has_text=words)
        found.first.click()
        page.wait_for_load_state()
    page.evaluate("document.fonts.ready")
    page.wait_for_timeout(_SETTLE_MS)
    page.mouse.move(0, 0)
    return page.screenshot(animations="disabled", caret="hide")


def reduce_colours(page: Page, png: bytes) -> bytes:
    """Return a picture as a PNG with a palette of at most 256 colours. The page's browser counts them."""
    worker = page.context.new_page()
    try:
        found = worker.evaluate(_REDUCE, [base64.b64encode(png).decode(), 256])
    finally:
        worker.close()
    width, height, places = found["width"], found["height"], base64.b64decode(found["places"])
    rows = b"".join(b"\0" + places[at : at + width] for at in range(0, width * height, width))
    palette = b"".join(colour.to_bytes(3, "big") for colour in found["palette"])
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", head), (b"PLTE", palette), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in parts)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


if __name__ == "__main__":
    sys.exit(main())
