"""Workflow templates of ComfyUI, requests for images, and image files: the parts without a server."""

from __future__ import annotations

import json
import struct
import zlib

import pytest

from runner.engines.children.web import Refusal
from runner.engines.comfyui.images import image_format, strip_texts
from runner.engines.comfyui.request import read_image_request
from runner.engines.comfyui.workflow import make_text_to_image, make_warm_up, read_workflow
from runner.errors import EngineError

VALUES: dict[str, str | int | float] = {
    "prompt": "a cat", "negative_prompt": "", "width": 512, "height": 256, "seed": 7, "steps": 20, "cfg": 6.5,
    "batch_size": 2, "checkpoint": "sd15.safetensors",
}  # fmt: skip


def template(**inputs: object) -> bytes:
    return json.dumps({"1": {"class_type": "Node", "inputs": inputs, "_meta": {"title": "kept"}}}).encode()


# ---- templates ----


def test_a_value_that_is_a_placeholder_keeps_its_type_and_one_within_a_text_is_text() -> None:
    workflow = read_workflow(
        template(a="{{prompt}}", b="{{ seed }}", c="{{cfg}}", d="style of {{prompt}}, {{seed}}", e=[["x", 0]])
    )
    assert workflow.fill(VALUES) == {
        "1": {
            "class_type": "Node",
            "inputs": {"a": "a cat", "b": 7, "c": 6.5, "d": "style of a cat, 7", "e": [["x", 0]]},
            "_meta": {"title": "kept"},
        }
    }
    assert workflow.placeholders == {"prompt", "seed", "cfg"}


@pytest.mark.parametrize("prompt", ["{{seed}}", 'say "{{checkpoint}}"', "\\", '"}, "x": {"', "\\g<0>"])
def test_a_prompt_is_never_read_as_a_template(prompt: str) -> None:
    workflow = read_workflow(template(a="{{prompt}}", b="({{prompt}})"))
    filled = workflow.fill({**VALUES, "prompt": prompt})
    assert filled["1"] == {"class_type": "Node", "inputs": {"a": prompt, "b": f"({prompt})"}, "_meta": {"title": "kept"}}


def test_a_template_is_not_changed_by_being_filled() -> None:
    workflow = read_workflow(template(a="{{prompt}}"))
    assert workflow.fill(VALUES) != workflow.fill({**VALUES, "prompt": "a dog"})


def test_which_inputs_get_the_checkpoint_is_known() -> None:
    data = json.dumps(
        {"1": {"class_type": "UNETLoader", "inputs": {"unet_name": "{{checkpoint}}", "text": "{{prompt}}"}}}
    ).encode()
    assert read_workflow(data).checkpoint_inputs == (("UNETLoader", "unet_name"),)
    assert make_text_to_image().checkpoint_inputs == (("CheckpointLoaderSimple", "ckpt_name"),)


def test_our_own_template_uses_every_placeholder_and_links_only_nodes_it_has() -> None:
    workflow = make_text_to_image()
    assert workflow.placeholders == VALUES.keys()
    text = json.dumps(workflow.fill(VALUES))
    assert "{{" not in text
    graph = json.loads(text)
    links = [value for node in graph.values() for value in node["inputs"].values() if isinstance(value, list)]
    assert links
    assert all(link[0] in graph for link in links)
    assert make_warm_up("x", has_preview=False).keys() == {"checkpoint"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not a graph"),
        (b"{}", "1 to 500 nodes"),
        (b'{"1": 5}', "not a graph"),
        (b'{"1": {"inputs": {}}}', "class_type"),
        (b'{"nodes": [], "links": []}', r"Export \(API\)"),
        (template(a="{{prompt}}", b="{{sampler}} {{size}}"), r"sampler, size; known: \{\{prompt\}\}"),
        (template(a="a cat"), r"no \{\{prompt\}\}"),
        (b" " * (1024 * 1024 + 1), "more than"),
    ],
)
def test_a_template_that_cannot_be_used_says_why(data: bytes, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        read_workflow(data)


# ---- requests ----


def asked(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "a cat", **fields}).encode()


def test_what_a_request_leaves_open_has_a_default_and_a_seed_of_its_own() -> None:
    requests = [read_image_request(asked(quality="high", user="u", style=None), "application/json") for _ in range(8)]
    first = requests[0]
    assert (first.count, first.width, first.height, first.steps, first.cfg) == (1, 1024, 1024, 20, 7.0)
    assert (first.negative_prompt, first.is_streaming, first.given) == ("", False, frozenset())
    assert len({request.seed for request in requests}) == 8


def test_what_a_request_names_is_taken() -> None:
    request = read_image_request(
        asked(n=3, size="512x768", seed=9, steps=5, cfg=1, negative_prompt="rain", stream=True, response_format="b64_json"),
        "application/json",
    )
    assert (request.count, request.width, request.height, request.seed, request.steps) == (3, 512, 768, 9, 5)
    assert (request.cfg, request.negative_prompt, request.is_streaming) == (1.0, "rain", True)
    assert request.given == {"size", "seed", "steps", "cfg", "negative_prompt"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x" * 32_001}, "prompt"),
        ({"negative_prompt": "x" * 32_001}, "negative_prompt"),
        ({"n": 0}, "n"),
        ({"n": 11}, "n"),
        ({"n": "2"}, "n"),
        ({"size": "big"}, "size"),
        ({"size": "500x500"}, "size"),
        ({"size": "56x512"}, "size"),
        ({"size": "4096x4096"}, "size"),
        ({"size": "99999x8"}, "size"),
        ({"size": ""}, "size"),
        ({"steps": 0}, "steps"),
        ({"steps": 151}, "steps"),
        ({"cfg": -0.1}, "cfg"),
        ({"cfg": 101}, "cfg"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"response_format": "url"}, "response_format"),
        ({"output_format": "webp"}, "output_format"),
    ],
)
def test_a_field_out_of_its_limits_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_image_request(asked(**fields), "application/json")
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "xxxx" not in caught.value.message


@pytest.mark.parametrize(
    ("body", "content_type"),
    [(b"{}", "application/json"), (b"[", "application/json"), (b"\xff", "application/json"), (asked(), "multipart/form-data")],
)
def test_a_body_that_is_no_request_is_refused(body: bytes, content_type: str) -> None:
    with pytest.raises(Refusal):
        read_image_request(body, content_type)


# ---- image files ----


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


START = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", b"h" * 13)
END = chunk(b"IDAT", b"tEXt inside the data") + chunk(b"IEND", b"")


def test_a_png_loses_its_texts_and_nothing_else() -> None:
    texts = chunk(b"tEXt", b"prompt\0{}") + chunk(b"zTXt", b"a") + chunk(b"iTXt", b"b")
    assert strip_texts(START + texts + END) == START + END
    assert strip_texts(START + END) == START + END
    assert strip_texts(b"\xff\xd8\xff other") == b"\xff\xd8\xff other"


def test_a_png_that_is_cut_short_keeps_no_half_text() -> None:
    whole = START + chunk(b"tEXt", b"workflow\0secret") + END
    for length in range(len(whole)):
        assert b"secret" not in strip_texts(whole[:length])


def test_formats_are_told_by_their_first_bytes() -> None:
    given = (START, b"\xff\xd8\xff\xe0", b"RIFF\0\0\0\0WEBP", b"GIF89a", b"")
    assert [image_format(image) for image in given] == ["png", "jpeg", "webp", "unknown", "unknown"]
