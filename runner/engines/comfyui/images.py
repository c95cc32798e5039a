"""Image files as ComfyUI makes them: which format, and without the workflow that it writes into them. Pure."""

from __future__ import annotations

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TEXT_CHUNKS = frozenset({b"tEXt", b"zTXt", b"iTXt"})


def image_format(image: bytes) -> str:
    """Return png, jpeg, webp or unknown, by the first bytes."""
    if image.startswith(PNG_SIGNATURE):
        return "png"
    if image.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    return "webp" if image[:4] == b"RIFF" and image[8:12] == b"WEBP" else "unknown"


def strip_texts(image: bytes) -> bytes:
    """Return a PNG without its text chunks, in which ComfyUI puts the whole graph; anything else as it is.

    The graph is the box owner's: it names files and may hold keys of nodes.
    """
    if not image.startswith(PNG_SIGNATURE):
        return image
    kept = [PNG_SIGNATURE]
    at = len(PNG_SIGNATURE)
    while at < len(image):
        # Length, type and checksum take four bytes each (PNG specification, section 5.3).
        end = at + int.from_bytes(image[at : at + 4], "big") + 12
        if end > len(image):  # cut short: what is left cannot be told from text
            break
        if image[at + 4 : at + 8] not in _TEXT_CHUNKS:
            kept.append(image[at:end])
        at = end
    return b"".join(kept)
