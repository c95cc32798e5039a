"""A request for images in OpenAI's shape, with the few fields of our own that a sampler needs, and the answer to it. Pure."""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from runner.engines.children.web import Refusal
from runner.engines.comfyui.images import image_format
from runner.limits import limits
from wire import clock
from wire.unreadable import UNREADABLE

MIN_SIDE, MAX_SIDE, SIDE_STEP = 64, 4096, 8
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")


class _Body(msgspec.Struct):
    """The fields that mean something here. Others of OpenAI's (quality, style, background, user …) are passed over."""

    prompt: str
    n: int | None = None
    size: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    stream: bool | None = None
    seed: int | None = None
    negative_prompt: str | None = None
    steps: int | None = None
    cfg: float | None = None


_decoder = msgspec.json.Decoder(_Body)
_FIELD_IN_ERROR = re.compile(r"`\$\.([^`]*)`|field `([^`]*)`")


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """A checked request. ``given`` are the fields the client named, so that a workflow can say which it cannot follow."""

    prompt: str
    negative_prompt: str
    count: int
    width: int
    height: int
    seed: int
    steps: int
    cfg: float
    is_streaming: bool
    given: frozenset[str]


def read_image_request(body: bytes, content_type: str) -> ImageRequest:
    """Return the request. Raises Refusal (400) naming the field; prompts are never repeated."""
    if content_type != "application/json":
        raise Refusal("Send the request as application/json; editing images is not offered.", param="content-type")
    try:
        fields = _decoder.decode(body)
    except msgspec.ValidationError as error:
        found = _FIELD_IN_ERROR.search(str(error))
        raise Refusal(f"Invalid request body: {error}.", param=(found[1] or found[2]) if found else None) from None
    except UNREADABLE:
        raise Refusal("The request body is not valid JSON.") from None
    _check_formats(fields)
    most = limits().comfyui
    if not 1 <= len(fields.prompt) <= most.prompt_chars:
        raise Refusal(f"prompt must have 1 to {most.prompt_chars} characters.", param="prompt")
    if len(fields.negative_prompt or "") > most.prompt_chars:
        raise Refusal(f"negative_prompt must have at most {most.prompt_chars} characters.", param="negative_prompt")
    width, height = _read_size(fields.size)
    names = ("size", "seed", "negative_prompt", "steps", "cfg")
    return ImageRequest(
        prompt=fields.prompt,
        negative_prompt=fields.negative_prompt or "",
        count=int(_within("n", fields.n, 1, 1, most.images)),
        width=width,
        height=height,
        seed=int(_within("seed", fields.seed, random.randint(0, most.seed), 0, most.seed)),  # noqa: S311  # not a secret
        steps=int(_within("steps", fields.steps, 20, 1, most.steps)),
        cfg=_within("cfg", fields.cfg, 7.0, 0.0, most.cfg),
        is_streaming=bool(fields.stream),
        given=frozenset(name for name in names if getattr(fields, name) not in {None, "auto"}),
    )


def render_images(request: ImageRequest, images: Sequence[bytes], *, has_size: bool) -> bytes:
    """Return the answer (OpenAI API reference, images response); ``has_size``: the images are as large as was asked."""
    answer: dict[str, object] = {
        "created": int(clock.unix_s()),
        "output_format": image_format(images[0]) if images else "png",
        "data": [{"b64_json": base64.b64encode(image).decode("ascii")} for image in images],
    }
    if has_size:
        answer["size"] = f"{request.width}x{request.height}"
    return msgspec.json.encode(answer)


def render_progress(percent: int, stage: str) -> bytes:
    """Return an event that says how far it is; OpenAI has none, and its clients pass over types they do not know."""
    return _event("image_generation.progress", {"percent": percent, "stage": stage})


def render_image_event(image: bytes, index: int) -> bytes:
    """Return the event that carries a finished image."""
    fields = {
        "b64_json": base64.b64encode(image).decode("ascii"),
        "created_at": int(clock.unix_s()),
        "output_format": image_format(image),
        "index": index,
    }
    return _event("image_generation.completed", fields)


def render_error_event(refusal: Refusal) -> bytes:
    """Return the event that ends a stream which goes wrong."""
    return _event("error", refusal.render())


def _event(kind: str, fields: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def _check_formats(fields: _Body) -> None:
    if fields.response_format not in {None, "b64_json"}:
        raise Refusal(
            "response_format must be b64_json: this box keeps no images that an address could lead to.",
            param="response_format",
        )
    if fields.output_format not in {None, "png"}:
        raise Refusal("output_format must be png.", param="output_format")


def _read_size(size: str | None) -> tuple[int, int]:
    if size in {None, "auto"}:
        return 1024, 1024
    found = _SIZE.fullmatch(size or "")
    sides = (int(found[1]), int(found[2])) if found else (0, 0)
    is_allowed = all(MIN_SIDE <= side <= MAX_SIDE and side % SIDE_STEP == 0 for side in sides)
    if not is_allowed or sides[0] * sides[1] > limits().comfyui.pixels:
        raise Refusal(
            f"size must be auto or WIDTHxHEIGHT, each from {MIN_SIDE} to {MAX_SIDE} in steps of {SIDE_STEP}, and together"
            f" at most {limits().comfyui.pixels} pixels.",
            param="size",
        )
    return sides


def _within(name: str, value: float | None, default: float, minimum: float, maximum: float) -> float:
    if value is None:
        return default
    if not minimum <= value <= maximum:
        raise Refusal(f"{name} must be from {minimum:g} to {maximum:.19g}.", param=name)
    return value
