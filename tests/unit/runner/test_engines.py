"""Slots of an engine and their owners, workflows and pictures of ComfyUI, and folders of engines."""

from __future__ import annotations

import json
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engines.children.web import Refusal
from runner.engines.comfyui.images import image_format, strip_texts
from runner.engines.comfyui.request import read_image_request
from runner.engines.comfyui.workflow import make_text_to_image, make_warm_up, read_workflow
from runner.engines.llama_slots import is_object, pin_body
from runner.engines.port import CacheMode, FlushRequest, FlushScope
from runner.engines.private_folders import make_private_folder
from runner.engines.slots import Lease, Owner, SlotBook
from runner.errors import EngineError
from tests.fakes.examples import examples

ALPHA = Owner("alpha", "")
BETA = Owner("beta", "")
ALPHA_TAGGED = Owner("alpha", "night")
ALL = FlushRequest(FlushScope.ALL)


def run_call(book: SlotBook, owner: Owner, mode: CacheMode = "auto", *, was_answered: bool = True) -> Lease:
    """Run one call from its start to its end."""
    lease = book.take(owner, mode)
    assert lease is not None
    book.release(lease, was_answered=was_answered)
    return lease


def test_an_owner_gets_its_own_slot_or_an_empty_one_or_that_unused_for_longest() -> None:
    book = SlotBook(2)
    old, again = run_call(book, ALPHA), run_call(book, ALPHA)
    assert (old.reuses, again.reuses, again.slot) == (False, True, old.slot)
    recent = run_call(book, BETA)
    assert recent.slot != old.slot
    taken = run_call(book, Owner("gamma", ""))
    assert (taken.slot, taken.reuses) == (old.slot, False)
    assert run_call(book, BETA) == Lease(recent.slot, BETA, reuses=True)
    assert not run_call(book, ALPHA).reuses
    both = [book.take(ALPHA, "auto"), book.take(BETA, "auto")]
    assert (book.take(BETA, "auto"), book.take_unpinned()) == (None, None), "all slots are in use"
    for lease in both:
        assert lease is not None
        book.release(lease, was_answered=True)
    assert [run_call(book, ALPHA).reuses, run_call(book, BETA).reuses] == [True, True]


def test_a_tag_is_an_owner_of_its_own_and_a_private_or_lost_call_leaves_nothing() -> None:
    book = SlotBook(3)
    kept = run_call(book, ALPHA)
    assert [run_call(book, ALPHA_TAGGED).reuses for _ in range(2)] == [False, True]
    private = run_call(book, ALPHA, "none")
    assert (private.slot != kept.slot, private.reuses) == (True, False)
    assert run_call(book, BETA) == Lease(private.slot, BETA, reuses=False)
    assert run_call(book, ALPHA).reuses
    for owner in (ALPHA, BETA):
        single = SlotBook(1)
        run_call(single, ALPHA)
        run_call(single, owner, was_answered=False)
        assert run_call(single, owner).reuses is (owner is ALPHA)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (ALL, {0, 1, 2}),
        (FlushRequest(FlushScope.MODEL), {0, 1, 2}),
        (FlushRequest(FlushScope.TENANT, tenant="alpha"), {0, 1}),
        (FlushRequest(FlushScope.TENANT, tenant="nobody"), set()),
        (FlushRequest(FlushScope.TAG, tag="night"), {1}),
        (FlushRequest(FlushScope.TAG, tag="night", tenant="beta"), set()),
    ],
)
def test_a_flush_takes_the_slots_of_its_scope(request_: FlushRequest, wanted: set[int]) -> None:
    book = SlotBook(3)
    slots = [run_call(book, owner).slot for owner in (ALPHA, ALPHA_TAGGED, BETA)]
    assert slots == [0, 1, 2]
    seized = book.seize(request_)
    assert seized is not None
    assert {lease.slot for lease in seized} == wanted


def test_a_flush_takes_what_is_nobodys_too_and_is_refused_by_a_busy_slot_of_its_scope() -> None:
    book = SlotBook(2)
    private = run_call(book, ALPHA, "none")
    seized = book.seize(FlushRequest(FlushScope.TENANT, tenant="alpha"))
    assert [lease.slot for lease in seized or ()] == [private.slot], "nobody knows what it holds"
    book = SlotBook(2)
    assert book.take(ALPHA, "auto") is not None
    run_call(book, BETA)
    assert book.seize(ALL) is None
    assert book.seize(FlushRequest(FlushScope.TENANT, tenant="alpha")) is None
    assert book.seize(FlushRequest(FlushScope.TENANT, tenant="beta")) is not None
    assert book.take(BETA, "auto") is None  # it is being erased
    book = SlotBook(2)
    assert book.take_unpinned() is not None
    assert book.seize(FlushRequest(FlushScope.TENANT, tenant="beta")) is None
    book = SlotBook(2)
    first, second = run_call(book, ALPHA), run_call(book, BETA)
    seized = book.seize(ALL)
    assert seized is not None
    book.return_seized(seized, erased={first.slot})
    assert run_call(book, BETA) == Lease(second.slot, BETA, reuses=True)
    assert not run_call(book, ALPHA).reuses


@examples(25)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["call", "lost", "private", "unpinned", "end"])), max_size=40))
def test_whatever_happens_a_call_reuses_only_what_its_owner_left(steps: list[tuple[int, str]]) -> None:
    """A model of the engine: a lost call changes nothing, a call of unknown place lands in any slot that is free."""
    book = SlotBook(3)
    content: dict[int, object] = {}
    running: list[tuple[Lease, Owner, bool]] = []
    for number, step in steps:
        owner = Owner(f"tenant {number % 3}", "")
        if step == "end" and running:
            lease, whose, is_lost = running.pop(number % len(running))
            if not is_lost and lease.is_pinned:
                content[lease.slot] = whose
            if not lease.is_pinned:  # wherever it was: the worst is that it was in every slot that is free now
                busy = {other.slot for other, _, _ in running if other.is_pinned}
                content.update(dict.fromkeys({0, 1, 2} - busy, whose))
            book.release(lease, was_answered=not is_lost)
        elif step in {"call", "lost", "private", "unpinned"}:
            taken = book.take_unpinned() if step == "unpinned" else book.take(owner, "none" if step == "private" else "prefix")
            if taken is None:
                continue
            assert not taken.reuses or content.get(taken.slot) == owner
            running.append((taken, Owner("private", "") if step == "private" else owner, step == "lost"))


def test_the_slot_comes_last_in_the_body_of_an_object_and_the_rest_stays_as_it_is() -> None:
    for body, sent in (
        (b"{}", b'{"id_slot":1,"cache_prompt":false}'),
        (b' { "a" : "}" } \n', b' { "a" : "}" ,"id_slot":1,"cache_prompt":false}'),
        (b'{"id_slot":7,"cache_prompt":true}', b'{"id_slot":7,"cache_prompt":true,"id_slot":1,"cache_prompt":false}'),
    ):
        assert pin_body(body, Lease(1, ALPHA)) == sent
    for body in (b"", b"[]", b'"}"', b'{"a":1}}', b'{"a":"b}', b"\xef\xbb\xbf{}", b"null", b"{" * 5000):
        assert not is_object(body)


VALUES: dict[str, str | int | float] = {
    "prompt": "a cat", "negative_prompt": "", "width": 512, "height": 256, "seed": 7, "steps": 20, "cfg": 6.5,
    "batch_size": 2, "checkpoint": "sd15.safetensors",
}  # fmt: skip


def template(**inputs: object) -> bytes:
    return json.dumps({"1": {"class_type": "Node", "inputs": inputs, "_meta": {"title": "kept"}}}).encode()


def test_a_template_is_filled_with_values_and_a_prompt_is_never_read_as_one() -> None:
    workflow = read_workflow(template(a="{{prompt}}", b="{{ seed }}", c="{{cfg}}", d="of {{prompt}}, {{seed}}", e=[["x", 0]]))
    assert workflow.placeholders == {"prompt", "seed", "cfg"}
    for prompt in ("a cat", "{{seed}}", 'say "{{checkpoint}}"', "\\", '"}, "x": {"', "\\g<0>"):
        inputs = {"a": prompt, "b": 7, "c": 6.5, "d": f"of {prompt}, 7", "e": [["x", 0]]}
        filled = workflow.fill({**VALUES, "prompt": prompt})
        assert filled == {"1": {"class_type": "Node", "inputs": inputs, "_meta": {"title": "kept"}}}


def test_our_own_template_uses_every_placeholder_and_links_only_nodes_it_has() -> None:
    workflow = make_text_to_image()
    assert workflow.placeholders == VALUES.keys()
    assert workflow.checkpoint_inputs == (("CheckpointLoaderSimple", "ckpt_name"),)
    graph = workflow.fill(VALUES)
    assert "{{" not in json.dumps(graph)
    links = [value for node in graph.values() for value in node["inputs"].values() if isinstance(value, list)]
    assert links
    assert all(link[0] in graph for link in links)
    assert make_warm_up("x", has_preview=False).keys() == {"checkpoint"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not json", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[]", "not a graph"), (b"{}", "1 to 500 nodes"),
        (b'{"1": 5}', "not a graph"), (b'{"1": {"inputs": {}}}', "class_type"),
        (b'{"nodes": [], "links": []}', r"Export \(API\)"),
        (template(a="{{prompt}}", b="{{sampler}} {{size}}"), r"sampler, size; known: \{\{prompt\}\}"),
        (template(a="a cat"), r"no \{\{prompt\}\}"), (b" " * (1024 * 1024 + 1), "more than"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_says_why(data: bytes, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        read_workflow(data)


def asked(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "a cat", **fields}).encode()


def test_what_a_request_names_is_taken_and_the_rest_has_a_default_and_a_seed_of_its_own() -> None:
    requests = [read_image_request(asked(quality="high", user="u", style=None), "application/json") for _ in range(8)]
    first = requests[0]
    assert (first.count, first.width, first.height, first.steps, first.cfg) == (1, 1024, 1024, 20, 7.0)
    assert (first.negative_prompt, first.is_streaming, first.given) == ("", False, frozenset())
    assert len({request.seed for request in requests}) == 8
    named: dict[str, object] = {"size": "512x768", "seed": 9, "steps": 5, "cfg": 1, "negative_prompt": "rain"}
    request = read_image_request(asked(n=3, stream=True, response_format="b64_json", **named), "application/json")
    assert (request.count, request.width, request.height, request.seed, request.steps) == (3, 512, 768, 9, 5)
    assert (request.cfg, request.negative_prompt, request.is_streaming) == (1.0, "rain", True)
    assert request.given == named.keys()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"), ({"prompt": 5}, "prompt"), ({"prompt": "x" * 32_001}, "prompt"),
        ({"negative_prompt": "x" * 32_001}, "negative_prompt"), ({"n": 0}, "n"), ({"n": 11}, "n"), ({"n": "2"}, "n"),
        ({"size": "big"}, "size"), ({"size": "500x500"}, "size"), ({"size": "56x512"}, "size"), ({"size": "4096x4096"}, "size"),
        ({"size": "99999x8"}, "size"), ({"steps": 0}, "steps"), ({"steps": 151}, "steps"), ({"cfg": -0.1}, "cfg"),
        ({"cfg": 101}, "cfg"), ({"seed": -1}, "seed"), ({"seed": 2**63}, "seed"),
        ({"response_format": "url"}, "response_format"), ({"output_format": "webp"}, "output_format"),
    ],
)  # fmt: skip
def test_a_field_out_of_its_limits_is_named_and_what_is_no_request_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_image_request(asked(**fields), "application/json")
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "xxxx" not in caught.value.message
    for body, kind in (
        (b"{}", "application/json"),
        (b"[", "application/json"),
        (b"\xff", "application/json"),
        (asked(), "text/x"),
    ):
        with pytest.raises(Refusal):
            read_image_request(body, kind)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


START = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", b"h" * 13)
END = chunk(b"IDAT", b"tEXt inside the data") + chunk(b"IEND", b"")


def test_a_png_loses_its_texts_and_nothing_else_also_when_it_is_cut_short() -> None:
    texts = chunk(b"tEXt", b"prompt\0secret") + chunk(b"zTXt", b"a") + chunk(b"iTXt", b"b")
    assert strip_texts(START + texts + END) == strip_texts(START + END) == START + END
    assert strip_texts(b"\xff\xd8\xff other") == b"\xff\xd8\xff other"
    whole = START + texts + END
    assert not any(b"secret" in strip_texts(whole[:length]) for length in range(len(whole)))
    given = (START, b"\xff\xd8\xff\xe0", b"RIFF\0\0\0\0WEBP", b"GIF89a", b"")
    assert [image_format(image) for image in given] == ["png", "jpeg", "webp", "unknown", "unknown"]


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


DEAD_PID = 2**22 + 1
"""More than Linux ever gives to a process."""


def test_a_private_folder_is_ours_alone_and_replaces_what_a_killed_runner_left_and_nothing_else(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, other = base / f"muster-x-{DEAD_PID}-abc", base / f"muster-y-{DEAD_PID}-abc"
    kept = [other, base / "muster-x-abc", base / f"muster-x-{os.getppid()}-abc", base / "elsewhere"]
    for folder in (left, *kept):
        folder.mkdir()
    link = base / f"muster-x-{DEAD_PID}-link"
    link.symlink_to(base / "elsewhere")
    mine = make_private_folder("x")
    assert (stat.S_IMODE(mine.stat().st_mode), left.exists(), link.is_symlink()) == (0o700, False, True)
    assert all(folder.is_dir() for folder in (*kept, mine))
    long = base / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = make_private_folder("x")  # a socket's path has less than 108 bytes
    made.rmdir()
    assert len(str(made / "socket")) < 100
