"""Slots of an engine and their owners, workflows and pictures of ComfyUI, and folders of engines."""

from __future__ import annotations

import json
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.definitions.plan import Cluster, LoadPlan, Member
from runner.engines.children.textserver import ChatFields, ChatTemplate, Detokeniser, StopStrings, read_fields, special_tokens
from runner.engines.children.web import Refusal
from runner.engines.comfy import read_image_request
from runner.engines.comfy_server import image_format, read_workflow, strip_texts
from runner.engines.http_engine import set_thinking
from runner.engines.llama_slots import Lease, Owner, SlotTable, cut_prompt, is_object, pin_body
from runner.engines.port import COMPLETIONS, CacheMode, Call, FlushRequest, FlushScope
from runner.engines.process import make_private_folder
from runner.engines.ray import build_environment as ray_environment
from runner.engines.ray import build_head_command, build_member_command, find_ray
from runner.engines.vllm import Salts, seal_body
from runner.engines.vllm_command import StartupLog, build_command, build_environment
from runner.errors import EngineError, InvalidRequest
from runner.limits import MIB, limits
from tests.fakes.examples import examples
from tests.fakes.limits import set_runner_limits

ALPHA = Owner("alpha", "")
BETA = Owner("beta", "")
ALPHA_TAGGED = Owner("alpha", "night")
ALL = FlushRequest(FlushScope.ALL)


def run_call(
    table: SlotTable, owner: Owner, mode: CacheMode = "auto", prompt: bytes = b"", *, was_answered: bool = True
) -> Lease:
    """Run one call from its start to its end."""
    lease = table.take(owner, mode, cut_prompt(prompt))
    assert lease is not None
    table.release(lease, was_answered=was_answered)
    return lease


def test_an_owner_gets_its_own_slot_or_an_empty_one_or_that_unused_for_longest() -> None:
    table = SlotTable(2)
    old, again = run_call(table, ALPHA), run_call(table, ALPHA)
    assert (old.reuses, again.reuses, again.slot) == (False, True, old.slot)
    recent = run_call(table, BETA)
    assert recent.slot != old.slot
    taken = run_call(table, Owner("gamma", ""))
    assert (taken.slot, taken.reuses) == (old.slot, False)
    assert run_call(table, BETA) == Lease(recent.slot, BETA, reuses=True)
    assert not run_call(table, ALPHA).reuses
    both = [table.take(ALPHA, "auto"), table.take(BETA, "auto")]
    assert (table.take(BETA, "auto"), table.take_unpinned()) == (None, None), "all slots are in use"
    for lease in both:
        assert lease is not None
        table.release(lease, was_answered=True)
    assert [run_call(table, ALPHA).reuses, run_call(table, BETA).reuses] == [True, True]


def test_each_conversation_of_an_owner_keeps_its_slot_while_there_are_slots() -> None:
    table, texts = SlotTable(3), [b"%03d" % number * 2000 for number in range(4)]
    first, second = run_call(table, ALPHA, prompt=texts[0]), run_call(table, ALPHA, prompt=texts[1])
    assert (second.reuses, second.slot != first.slot) == (False, True)
    for lease, text in ((first, texts[0]), (second, texts[1]), (first, texts[0])):
        again = run_call(table, ALPHA, prompt=text + b"and more" * 100)
        assert (again.slot, again.reuses) == (lease.slot, True)
    short = run_call(table, ALPHA, prompt=b"{}")
    assert short.slot not in (first.slot, second.slot)
    assert run_call(table, ALPHA, prompt=texts[2]).slot == short.slot, "what is lost there is nothing"
    oldest = run_call(table, ALPHA, prompt=texts[3])
    assert (oldest.slot, oldest.reuses) == (second.slot, True), "no slot is empty, and this one is unused for longest"
    assert run_call(table, ALPHA, prompt=texts[0]).slot == first.slot
    assert not run_call(table, BETA, prompt=texts[0]).reuses, "what another one left is nobody's business"


def test_a_flush_takes_the_slots_of_its_scope() -> None:
    requests = {
        ALL: {0, 1, 2}, FlushRequest(FlushScope.MODEL): {0, 1, 2}, FlushRequest(FlushScope.TENANT, tenant="alpha"): {0, 1},
        FlushRequest(FlushScope.TENANT, tenant="nobody"): set(), FlushRequest(FlushScope.TAG, tag="night"): {1},
        FlushRequest(FlushScope.TAG, tag="night", tenant="beta"): set(),
    }  # fmt: skip
    for request, wanted in requests.items():
        table = SlotTable(3)
        assert [run_call(table, owner).slot for owner in (ALPHA, ALPHA_TAGGED, BETA)] == [0, 1, 2]
        assert {lease.slot for lease in table.seize(request) or ()} == wanted


def test_a_flush_takes_what_is_nobodys_too_and_is_refused_by_a_busy_slot_of_its_scope() -> None:
    table = SlotTable(2)
    private = run_call(table, ALPHA, "none")
    seized = table.seize(FlushRequest(FlushScope.TENANT, tenant="alpha"))
    assert [lease.slot for lease in seized or ()] == [private.slot], "nobody knows what it holds"
    table = SlotTable(2)
    assert table.take(ALPHA, "auto") is not None
    run_call(table, BETA)
    assert table.seize(ALL) is None
    assert table.seize(FlushRequest(FlushScope.TENANT, tenant="alpha")) is None
    assert table.seize(FlushRequest(FlushScope.TENANT, tenant="beta")) is not None
    assert table.take(BETA, "auto") is None  # it is being erased
    table = SlotTable(2)
    assert table.take_unpinned() is not None
    assert table.seize(FlushRequest(FlushScope.TENANT, tenant="beta")) is None
    table = SlotTable(2)
    first, second = run_call(table, ALPHA), run_call(table, BETA)
    seized = table.seize(ALL)
    assert seized is not None
    table.return_seized(seized, erased={first.slot})
    assert run_call(table, BETA) == Lease(second.slot, BETA, reuses=True)
    assert not run_call(table, ALPHA).reuses


@examples(25)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["call", "lost", "private", "unpinned", "end"])), max_size=40))
def test_whatever_happens_a_call_reuses_only_what_its_owner_left(steps: list[tuple[int, str]]) -> None:
    """A model of the engine: a lost call changes nothing, a call of unknown place lands in any slot that is free."""
    table = SlotTable(3)
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
            table.release(lease, was_answered=not is_lost)
        elif step in {"call", "lost", "private", "unpinned"}:
            taken = (
                table.take_unpinned() if step == "unpinned" else table.take(owner, "none" if step == "private" else "prefix")
            )
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


def test_a_template_that_cannot_be_used_says_why() -> None:
    for data, words in (
        (b"not json", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[]", "not a graph"), (b"{}", "1 to 500 nodes"),
        (b'{"1": 5}', "not a graph"), (b'{"1": {"inputs": {}}}', "class_type"),
        (b'{"nodes": [], "links": []}', r"Export \(API\)"),
        (template(a="{{prompt}}", b="{{sampler}} {{size}}"), r"sampler, size; known: \{\{prompt\}\}"),
        (template(a="a cat"), r"no \{\{prompt\}\}"), (b" " * (1024 * 1024 + 1), "more than"),
    ):  # fmt: skip
        with pytest.raises(EngineError, match=words):
            read_workflow(data)


def asked(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "a cat", **fields}).encode()


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


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


DEAD_PID = 2**22 + 1
"""More than Linux ever gives to a process."""


def test_a_private_folder_is_ours_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


SOCKET = Path("/run/s")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(b"\0" * MIB)
    (tmp_path / "model-2.safetensors").write_bytes(b"\0" * MIB)
    return tmp_path


def plan_for(
    model: Path, *, gpu_ids: tuple[int, ...] = (), budget_mb: int | None = None, options: Mapping[str, object] | None = None
) -> LoadPlan:
    return LoadPlan("m", "vllm", model, slots=3, threads=2, gpu_ids=gpu_ids, memory_budget_mb=budget_mb, options=options or {})


def flags(plan: LoadPlan) -> list[str]:
    return build_command("py", plan, SOCKET)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_a_plan_on_the_cpu_gets_a_bounded_cache_and_no_graphs(model: Path) -> None:
    words = flags(plan_for(model))
    assert words[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    assert value(words, "--uds") == "/run/s"
    assert value(words, "--max-num-seqs") == "3"
    assert value(words, "--scheduling-policy") == "priority"
    assert value(words, "--kv-cache-memory-bytes") == str(limits().engines.vllm_cpu_kv_bytes)
    assert "--enforce-eager" in words
    assert {"--enable-prefix-caching", "--allowed-media-domains=none.invalid"} <= set(words)
    assert not {"--port", "--host", "--api-key", "--trust-remote-code", "--enable-sleep-mode"} & set(words)


def test_a_plan_on_gpus_uses_them_all_and_a_budget_becomes_the_cache_that_the_weights_leave(model: Path) -> None:
    words = flags(plan_for(model, gpu_ids=(1, 3)))
    assert value(words, "--tensor-parallel-size") == "2"
    assert not {"--enforce-eager", "--kv-cache-memory-bytes", "--gpu-memory-utilization"} & set(words)
    words = flags(plan_for(model, gpu_ids=(0,), budget_mb=4096))
    assert int(value(words, "--kv-cache-memory-bytes")) == 4096 * MIB - 2 * MIB - limits().engines.vllm_overhead_bytes
    # The share would otherwise be nine tenths of a card that others use as well.
    assert float(value(words, "--gpu-memory-utilization")) < 0.1


def test_an_option_becomes_its_flag(model: Path) -> None:
    for option, setting, flag, expected in (
        ("vllm_kv_cache_memory_bytes", 268435456, "--kv-cache-memory-bytes", "268435456"),
        ("vllm_gpu_memory_utilization", 0.5, "--gpu-memory-utilization", "0.5"), ("vllm_task", "embed", "--runner", "pooling"),
        ("vllm_kv_cache_dtype", "fp8", "--kv-cache-dtype", "fp8"), ("vllm_max_model_len", 512, "--max-model-len", "512"),
        ("vllm_max_pixels", 200704, "--mm-processor-kwargs", '{"max_pixels":200704}'),
        ("vllm_tool_call_parser", "hermes", "--tool-call-parser", "hermes"),
        ("vllm_max_lora_rank", 12, "--max-lora-rank", "16"),
        ("enable_thinking", False, "--default-chat-template-kwargs", '{"enable_thinking":false}'),
    ):  # fmt: skip
        assert value(flags(plan_for(model, gpu_ids=(0,), options={option: setting})), flag) == expected
    options = {"vllm_speculative_method": "ngram", "vllm_num_speculative_tokens": 4, "vllm_enable_prefix_caching": False}
    words = flags(plan_for(model, options=options))
    assert json.loads(value(words, "--speculative-config")) == {"method": "ngram", "num_speculative_tokens": 4}
    assert ("--no-enable-prefix-caching" in words, "--enable-prefix-caching" in words) == (True, False)
    plan = LoadPlan("m", "vllm", model, quantization="awq")
    assert value(flags(plan), "--quantization") == "awq"
    (model / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert "--quantization" not in flags(plan), "the model says it itself"


def test_a_plan_that_cannot_be_started_says_why(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for plan, words in (
        (plan_for(model, gpu_ids=(0,), budget_mb=1000), r"a budget of 1000 MB .* need 1026 MB"),
        (plan_for(model, options={"vllm_max_lora_rank": 600}), "up to rank 512, not 600"),
        (plan_for(model, options={"vllm_lora": {"a": "/nowhere"}}), r"vllm_lora a: /nowhere has no adapter_config.json"),
        (plan_for(tmp_path / "empty"), r"has no config\.json"), (LoadPlan("m", "vllm"), "needs the folder of the model"),
    ):  # fmt: skip
        with pytest.raises(EngineError, match=words):
            flags(plan)


def test_the_environment_carries_no_secret_of_ours_and_opens_no_network(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_TOKEN", "secret")
    monkeypatch.setenv("VLLM_API_KEY", "would lock us out")
    environment = build_environment(plan_for(model))
    assert not [name for name in environment if name.startswith("MUSTER_")]
    assert "VLLM_API_KEY" not in environment
    assert (environment["HF_HUB_OFFLINE"], environment["VLLM_NO_USAGE_STATS"], environment["DO_NOT_TRACK"]) == ("1", "1", "1")
    assert (environment["OMP_NUM_THREADS"], environment["CUDA_VISIBLE_DEVICES"]) == ("2", "")
    of_gpus = build_environment(plan_for(model, gpu_ids=(1, 3)))
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    assert [of_gpus[name] for name in names] == ["1,3", "1,3", "PCI_BUS_ID"], "numbered as the node reports them"


CALL = Call("POST", COMPLETIONS, {}, b"{}", tenant="alpha")


def test_other_tenants_tags_and_processes_have_other_salts() -> None:
    salts = Salts()
    calls = [
        CALL, replace(CALL, tenant="beta"), replace(CALL, cache_tag="t"), replace(CALL, tenant="alphat"),
        replace(CALL, tenant="alph", cache_tag="at"), replace(CALL, tenant='alpha","'),
    ]  # fmt: skip
    found = [salts.salt_for(call) for call in calls] + [Salts().salt_for(CALL)]
    assert all(first != second for first, second in combinations(found, 2))
    assert salts.salt_for(replace(CALL, body=b'{"other":1}')) == found[0], "a tenant and tag keep their own"
    private = replace(CALL, cache_mode="none")
    assert len({salts.salt_for(private), salts.salt_for(private), found[0]}) == 3, "nothing is to be reused"


def test_a_flush_changes_the_salts_it_names_and_no_others() -> None:
    calls = {"alpha": CALL, "alpha t": replace(CALL, cache_tag="t"), "beta t": replace(CALL, tenant="beta", cache_tag="t")}
    for request, changed in (
        (FlushRequest(FlushScope.ALL), {*calls}), (FlushRequest(FlushScope.MODEL), {*calls}),
        (FlushRequest(FlushScope.TENANT, tenant="alpha"), {"alpha", "alpha t"}),
        (FlushRequest(FlushScope.TAG, tag="t"), {"alpha t", "beta t"}),
        (FlushRequest(FlushScope.TAG, tenant="alpha", tag="t"), {"alpha t"}),
    ):  # fmt: skip
        salts = Salts()
        before = {name: salts.salt_for(call) for name, call in calls.items()}
        salts.forget(request)
        assert {name for name, call in calls.items() if salts.salt_for(call) != before[name]} == changed


def test_memory_of_flushes_is_bounded_and_its_end_brings_no_salt_back() -> None:
    set_runner_limits(engines={"vllm_epochs": 3})
    salts, seen = Salts(), set()
    for round_ in range(10):
        seen.add(salts.salt_for(CALL))
        salts.forget(FlushRequest(FlushScope.TENANT, tenant="alpha"))
        salts.forget(FlushRequest(FlushScope.TENANT, tenant=f"t{round_}"))
    assert len(seen) == 10
    assert len(salts._epochs) <= 3


def test_a_field_is_ours_however_it_is_written_and_all_others_stay_as_they_came() -> None:
    body = b'{"model": "m","temperature":0.10, "messages":[ {"content":"\\u00e9 \xc3\xa9"} ],"cache_salt":7,"priority":"x"}'
    sealed = seal_body(body, salt="s", priority="high")
    assert b'"temperature":0.10' in sealed
    assert b'[ {"content":"\\u00e9 \xc3\xa9"} ]' in sealed
    assert (json.loads(sealed)["cache_salt"], json.loads(sealed)["priority"]) == ("s", -10)
    for name in (b"cache_salt", b"cache\\u005fsalt", b"request_id", b"kv_transfer_params"):
        sealed = seal_body(b'{"%b":"theirs","%b":"twice"}' % (name, name), salt="s", priority="normal")
        assert not {b"theirs", b"twice"} & set(sealed.split(b'"'))
    utf16 = '{"cache_salt":"x"}'.encode("utf-16")
    for body in (b"", b"[]", b'"x"', b"{", b'{"a":NaN}', utf16, b"\xef\xbb\xbf{}", b'{"a":' * 5000):
        with pytest.raises(InvalidRequest):
            seal_body(body, salt="s", priority="normal")


GENERIC = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


def test_the_reason_of_a_failure_is_its_cause() -> None:
    invalid = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
    for lines, expected in (
        (["(EngineCore pid=7) ERROR 11-21 19:00:00 [core.py:9] ValueError: the cause", GENERIC], "ValueError: the cause"),
        (["(EngineCore pid=7) torch.OutOfMemoryError: no memory", GENERIC], "torch.OutOfMemoryError: no memory"),
        (["api_server.py: error: unrecognized arguments: --x"], "api_server.py: error: unrecognized arguments: --x"),
        ([invalid, "  Value error, Unknown quantization: x. [type=value_error, input_value=A]"], "Unknown quantization: x."),
        ([GENERIC], GENERIC), (["INFO: nothing wrong", "KeyErrors are counted: 0"], ""),
    ):  # fmt: skip
        log = StartupLog(lambda _progress: None)
        for line in lines:
            log.feed(line)
        assert log.failure() == expected


MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]


def chat_body(**fields: object) -> bytes:
    return json.dumps({"messages": MESSAGES, **fields}).encode()


def refused(body: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read_fields(ChatFields, body)
    return caught.value


def test_a_value_that_does_not_do_is_refused_by_name() -> None:
    bad: dict[str, list[object]] = {
        "temperature": [2.5, "hot"], "top_p": [0, 1.1], "top_k": [-2], "max_tokens": [0], "repetition_penalty": [0],
        "beam_size": [17], "n": [2], "stop": ["", ["x"] * 17], "seed": ["one"], "presence_penalty": [0.5], "logprobs": [True],
        "logit_bias": [{"5": 1}], "response_format": [{"type": "json_object"}], "messages": [[], "Hi"],
        "tool_choice": ["required"], "stream": ["yes"],
    }  # fmt: skip
    for field, value in ((field, value) for field, values in bad.items() for value in values):
        refusal = refused(chat_body(**{field: value}))
        assert (refusal.status, refusal.param) == (400, field)
        assert "hot" not in refusal.message, "values of clients do not come back"


def test_a_message_that_no_text_model_takes_is_refused_by_place_and_what_is_no_json_as_such() -> None:
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    for message, place in (({"role": "user", "content": picture}, "content"), ({"role": "user", "content": 5}, "content"),
                           ({"content": "Hi"}, "role")):  # fmt: skip
        assert refused(chat_body(messages=[message])).param == f"messages[0].{place}"
    assert refused(b"{}").param == "messages"
    for body in (b"", b"{", b"\xff\xfe", b'{"messages": [{"a":' + b"[" * 100_000):
        assert refused(body).code == "invalid_json"


def bytes_as_tokens(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are single bytes."""
    return bytes(ids).decode("utf-8", "replace")


@examples(25)
@given(st.text(max_size=40))
def test_every_text_comes_back_and_no_piece_has_half_a_character(text: str) -> None:
    pieces = Detokeniser(bytes_as_tokens)
    parts = [pieces.add(byte) for byte in text.encode()]
    assert "".join(parts) + pieces.finish() == text.rstrip("\ufffd") or "\ufffd" in text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


def test_a_character_cut_off_at_the_end_is_left_out_and_no_byte_is_held_back_for_ever() -> None:
    pieces = Detokeniser(bytes_as_tokens)
    sent = "".join(pieces.add(byte) for byte in "good €".encode()[:-1])
    assert sent + pieces.finish() == "good "
    pieces = Detokeniser(bytes_as_tokens)
    assert "\ufffd" in "".join(pieces.add(0x80) for _ in range(64))


def run(stops: list[str], parts: list[str]) -> tuple[list[str], bool]:
    watch = StopStrings(stops)
    sent = [watch.add(part) for part in parts]
    return [*sent, watch.finish()], watch.hit


@examples(25)
@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=4), st.integers(1, 5))
def test_a_stop_string_ends_the_text_wherever_its_pieces_are_cut(text: str, stop: str, size: int) -> None:
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    sent, was_hit = run([stop], parts)
    assert ("".join(sent), was_hit) == (text.partition(stop)[0], stop in text)
    assert "".join(run(["two", "one"], ["zero on", "e two"])[0]) == "zero ", "the first in the text"
    assert run(["</end>"], ["text</", "en", "x"])[0] == ["text", "", "</enx", ""], "no longer held back than it may be one"


def chat_asked(text: str = "Hi", **fields: object) -> ChatFields:
    return read_fields(ChatFields, json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode())


def test_messages_specials_and_the_prompt_for_an_answer_reach_the_template() -> None:
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    source = "{{ bos_token }}" + turns + "{% if add_generation_prompt %}>{% endif %}"
    specials = special_tokens({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None})
    assert specials == {"bos_token": "<s>", "eos_token": "</s>"}
    assert ChatTemplate(source, specials).render(chat_asked()) == "<s>[user]Hi>"
    with pytest.raises(Refusal, match="roles must alternate") as caught:
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(chat_asked())
    assert caught.value.param == "messages"
    with pytest.raises(ValueError, match="line 1"):  # a fault of the model
        ChatTemplate("{% for %}", {})


def test_an_answer_that_began_stands_behind_the_prompt_as_it_is_whatever_a_template_does_to_messages() -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}", {}
    )
    turns = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": " One,  two"}]
    goes_on = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    asked = read_fields(ChatFields, json.dumps(goes_on).encode())
    assert template.render(asked) == "[Hi]> One,  two"
    assert asked.sampling(limit=9, scope="").goes_on
    assert not chat_asked().sampling(limit=9, scope="").goes_on
    assert template.render(chat_asked(add_generation_prompt=False)) == "[Hi]"
    for changes, param in (
        ({"add_generation_prompt": True}, "add_generation_prompt"), ({"messages": turns[:1]}, "messages"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "messages"),
    ):  # fmt: skip
        assert refused(json.dumps({**goes_on, **changes}).encode()).param == param


def test_the_first_piece_of_an_answer_that_goes_on_keeps_the_space_that_a_decoder_strips_from_a_beginning() -> None:
    words = {1: " One", 2: " two", 3: " three"}

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[number] for number in ids).removeprefix(" ")

    assert Detokeniser(decode).add(3) == "three"
    assert Detokeniser(decode, [1, 2]).add(3) == " three"


def test_a_template_cannot_leave_the_sandbox_change_what_it_is_given_or_tell_of_the_conversation() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].content + 1 }}",
    ):  # fmt: skip
        with pytest.raises(Refusal) as caught:
            ChatTemplate(source, {}).render(chat_asked("a secret"))
        assert "secret" not in caught.value.message


def test_tools_go_to_a_template_that_takes_them_and_are_refused_by_one_that_does_not() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    taking = ChatTemplate("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}", {})
    assert "look_up" in taking.render(chat_asked(tools=tools))
    assert taking.render(chat_asked(tools=tools, tool_choice="none")) == ""
    with pytest.raises(Refusal) as caught:
        ChatTemplate("{{ messages[0].content }}", {}).render(chat_asked(tools=tools))
    assert caught.value.param == "tools"


def test_thinking_is_as_the_settings_say_unless_the_request_does() -> None:
    source = "{{ enable_thinking if enable_thinking is defined else 'unset' }}"
    cases: list[tuple[bool | None, dict[str, object] | None, str]] = [
        (None, None, "unset"), (False, None, "False"), (True, {"other": 1}, "True"), (False, {"enable_thinking": True}, "True"),
    ]  # fmt: skip
    for default, kwargs, rendered in cases:
        fields = chat_asked()
        fields.chat_template_kwargs = kwargs
        assert ChatTemplate(source, {}, default).render(fields) == rendered


def test_the_settings_hold_where_the_client_says_nothing_and_a_body_that_cannot_be_read_passes() -> None:
    cases: list[tuple[bool | None, dict[str, object], dict[str, object]]] = [
        (None, {}, {}), (False, {}, {"enable_thinking": False}),
        (True, {"chat_template_kwargs": None}, {"enable_thinking": True}),
        (False, {"chat_template_kwargs": {"a": [1]}}, {"a": [1], "enable_thinking": False}),
        (False, {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ]  # fmt: skip
    for wanted, given_, sent in cases:
        plan = LoadPlan("m", "tabbyapi", options={} if wanted is None else {"enable_thinking": wanted})
        changed = json.loads(set_thinking(plan, json.dumps({"model": "m", "temperature": 0.10, **given_}).encode()))
        assert (changed.pop("chat_template_kwargs", None) or {}) == sent
        assert changed == {"model": "m", "temperature": 0.1}
    for body in (b"", b"[]", b"{", b'{"chat_template_kwargs": 7}', b"\xff"):
        assert set_thinking(LoadPlan("m", "tabbyapi", options={"enable_thinking": True}), body) == body


def cluster(own: int) -> Cluster:
    members = tuple(Member(f"gpu{number}#key", f"10.0.0.{number}:8070", (0, 1)) for number in (1, 2, 3))
    return Cluster("op_1.1", "d" * 64, members, members[own], b"", lambda message: message)


def test_a_replica_over_nodes_is_tensor_parallel_within_and_pipeline_parallel_over_them(model: Path) -> None:
    plan = replace(plan_for(model, gpu_ids=(0, 1), budget_mb=8192), cluster=cluster(0))
    words = flags(plan)
    assert (value(words, "--tensor-parallel-size"), value(words, "--pipeline-parallel-size")) == ("2", "3")
    assert value(words, "--distributed-executor-backend") == "ray"
    single = flags(replace(plan, gpu_ids=(0,)))
    assert value(single, "--tensor-parallel-size") == "1"
    assert "--distributed-executor-backend" not in flags(replace(plan, cluster=None))
    # Of the budget of a node its third of the weights goes off, not all of them.
    least = (8192 * MIB - 2 * MIB // 3 - 2 * limits().engines.vllm_overhead_bytes) // 2
    assert int(value(words, "--kv-cache-memory-bytes")) == pytest.approx(least, abs=MIB)
    assert (plan.is_reserved, replace(plan, cluster=cluster(1)).is_reserved, replace(plan, cluster=None).nodes) == (
        False, True, 1,
    )  # fmt: skip


def test_ray_is_started_as_its_command_line_has_it_and_sees_the_gpus_of_the_load_alone() -> None:
    head, member = cluster(0), cluster(2)
    common = ["--num-gpus=2", "--disable-usage-stats", "--block"]
    assert build_head_command("ray", head, 6400) == [
        "ray", "start", "--head", "--port=6400", "--include-dashboard=false", "--node-ip-address=10.0.0.1", *common,
    ]  # fmt: skip
    assert build_member_command("ray", member, "10.0.0.1:6400") == [
        "ray", "start", "--address=10.0.0.1:6400", "--node-ip-address=10.0.0.3", *common,
    ]  # fmt: skip
    environment = ray_environment(member, address="10.0.0.1:6400", token="t")
    names = ("CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    assert [environment[name] for name in names] == ["0,1", "10.0.0.3", "10.0.0.1:6400", "token", "t"]


def test_ray_that_is_not_beside_vllm_is_named_with_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    monkeypatch.setenv("MUSTER_VLLM_PYTHON", str(python))
    with pytest.raises(EngineError, match=f"there is no {tmp_path}/ray; run {python} -m pip install ray"):
        find_ray()
