"""Load overrides: limits of every field, the merge rule, fields that depend on each other, plans and their keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.definitions.definition import Backend, ModelDefinition
from runner.definitions.environment import read_vllm_defaults
from runner.definitions.fields import BACKEND_FIELDS, BACKENDS, KV_TYPES
from runner.definitions.kinds import MAX_INTEGER
from runner.definitions.overrides import (
    check_overrides,
    check_quantization,
    choose_gpus,
    find_conflicts,
    load_constraints,
    load_recommendations,
    make_plan,
    plan_key,
)
from runner.definitions.plan import LoadPlan
from runner.errors import ConfigError, InvalidLoadRequest
from tests.fakes.examples import examples

STEP = 268435456


def model(backend: Backend, **fields: Any) -> ModelDefinition:
    """Return a definition of model ``m``; fields of the backend become its options."""
    options = {name: value for name, value in fields.items() if name in BACKEND_FIELDS[backend]}
    return ModelDefinition(
        model_id="m", backend=backend, options=options, **{name: fields[name] for name in fields.keys() - options.keys()}
    )


def plan_of(definition: ModelDefinition, overrides: dict[str, object] | None = None, **fields: Any) -> LoadPlan:
    """Return the plan of a load with these overrides."""
    checked = check_overrides(definition, overrides or {})
    values = {"path": Path("/models/m"), "threads": 2, "gpu_ids": (), **fields}
    return make_plan(definition, overrides=checked, **values)


LIMITS: list[tuple[Backend, str, list[object], list[object]]] = [
    ("gguf", "replicas", [1, 2], [0, 3, 1.0, True, None, "1"]),
    ("gguf", "target_inflight", [1, 2, 1024], [0, 1025, None]),
    ("gguf", "gguf_n_ctx", [1, 2, 4096, MAX_INTEGER], [0, -1, 1.5, "4096", None, True, MAX_INTEGER + 1]),
    ("gguf", "gguf_flash_attn", ["on", "off", "auto"], ["On", True, None, ""]),
    ("gguf", "gguf_type_k", list(KV_TYPES), ["q3_0", "F16", None, 16]),
    ("gguf", "gguf_type_v", list(KV_TYPES), ["q8_1", None]),
    ("exllamav3", "exllama_cache_size", [256, 512, 16384], [0, 255, 257, 511, 16385, None]),
    ("exllamav3", "exllama_cache_quant", ["2", "8", "8,4", "2,8", None], ["1", "9", "8,", ",8", "8,8,8", "8, 4", "", 8, "a"]),
    ("exllamav3", "exllama_max_rq_tokens", [1, 2, None], [0, -1, "1"]),
    ("vllm", "vllm_max_model_len", [256, 512, 32768], [0, 255, 257, 300, None, 512.0]),
    ("vllm", "vllm_kv_cache_dtype", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"], ["fp16", None]),
    ("vllm", "vllm_kv_cache_memory_bytes", [STEP, 2 * STEP, None], [0, STEP - 1, STEP + 1]),
    ("vllm", "vllm_max_pixels", [200704, 401408, None], [0, 200703, 200705]),
    ("vllm", "vllm_speculative_method", ["ngram", None], ["", 1, "a\nb"]),
    ("vllm", "vllm_speculative_model", ["org/draft", None], ["", []]),
    ("vllm", "vllm_speculative_moe_backend", [None], ["", False]),
    ("vllm", "vllm_speculative_attention_backend", [None], ["", {}]),
    ("vllm", "vllm_num_speculative_tokens", [None], [0, -1, 1.5]),
    ("llama_server", "llama_server_n_ctx", [1, 4096], [0, None]),
    ("llama_server", "llama_server_image_max_tokens", [1, None], [0]),
    ("llama_server", "llama_server_spec_type", ["draft", None], [""]),
    ("llama_server", "llama_server_spec_draft_n_max", [1, 6, None], [0, 7]),
    ("llama_server", "llama_server_spec_draft_p_min", [0, 0.0, 0.5, 1, 1.0, None], [-0.01, 1.01, "0", True]),
    ("tabbyapi", "exllama_cache_size", [256], [255]),
]
ACCEPTED = [(backend, name, value) for backend, name, good, _ in LIMITS for value in good]
REFUSED = [(backend, name, value) for backend, name, _, bad in LIMITS for value in bad]


@pytest.mark.parametrize(("backend", "name", "value"), ACCEPTED)
def test_a_value_at_or_within_its_limits_is_taken(backend: Backend, name: str, value: object) -> None:
    assert check_overrides(model(backend, replica_max=2), {name: value}) == {name: value}


@pytest.mark.parametrize(("backend", "name", "value"), REFUSED)
def test_a_value_beyond_its_limits_is_refused_with_field_value_and_limit(backend: Backend, name: str, value: object) -> None:
    definition = model(backend, replica_max=2)
    with pytest.raises(InvalidLoadRequest) as caught:
        check_overrides(definition, {name: value})
    assert caught.value.param == name
    assert caught.value.message.startswith(f"{name}: {json.dumps(value)} is not allowed; it must be ")
    for limit in ("minimum", "maximum"):
        number = load_constraints(definition)[name].get(limit)
        assert number is None or f"{number:.12g}" in caught.value.message
    with pytest.raises(InvalidLoadRequest) as caught:
        check_overrides(model("gguf"), {"gguf_flash_attn": "x" * 5000})
    assert len(caught.value.message) < 200, "a long value is not repeated whole"


def bits(k: int | None = None, v: int | None = None, **more: object) -> dict[str, object]:
    return {f"exllama_cache_{name}_bits": value for name, value in (("k", k), ("v", v)) if value is not None} | more


SETTABLE = "; a load of this model may set replicas, target_inflight, gguf_n_ctx, gguf_flash_attn, gguf_type_k, gguf_type_v."
RUNNING = {"server_url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("definition", "overrides", "param", "words"),
    [
        (model("exllamav3"), bits(1, 8), "exllama_cache_k_bits", "from 2 to 8"),
        (model("exllamav3"), bits(8, 9), "exllama_cache_v_bits", "from 2 to 8"),
        (model("exllamav3"), bits(8), "exllama_cache_v_bits", "is needed too"),
        (model("exllamav3"), bits(None, 8), "exllama_cache_k_bits", "is needed too"),
        (model("exllamav3"), bits(8, 8, exllama_cache_quant="8"), "exllama_cache_quant", "set one of the two ways to null"),
        (model("exllamav3", exllama_cache_quant="8,8"), bits(8, 8), "exllama_cache_quant", "cannot go together"),
        (model("exllamav3", **bits(8, 8)), {"exllama_cache_v_bits": None}, "exllama_cache_v_bits", "is needed too"),
        (model("gguf", gguf_type_v="q8_0"), {"gguf_flash_attn": "off"}, "gguf_type_v", "cannot be q8_0 with gguf_flash_attn"),
        (model("vllm"), {"vllm_num_speculative_tokens": 3}, "vllm_num_speculative_tokens", ""),
        (model("gguf"), {"vllm_max_model_len": 1}, "vllm_max_model_len", "is a field of vllm, and m runs on gguf" + SETTABLE),
        (model("gguf"), {"exllama_cache_size": 1}, "exllama_cache_size", "is a field of exllamav3, tabbyapi, and m runs on"),
        (model("gguf"), {"gguf_n_gpu_layers": 1}, "gguf_n_gpu_layers", "is set in the settings and not by a load" + SETTABLE),
        (model("gguf"), {"enabled": 1}, "enabled", "is set in the settings and not by a load" + SETTABLE),
        (model("gguf"), {"trust_remote_code": 1}, "trust_remote_code", "is not a field of any backend" + SETTABLE),
        (model("attached"), {"target_inflight": 2}, "target_inflight", "a load of this model may set nothing"),
        (model("llama_server", **RUNNING), {"llama_server_n_ctx": 4}, "llama_server_n_ctx", ""),
        (model("llama_server", **RUNNING), {"maxContextLength": 4}, "maxContextLength", ""),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_set_or_not_with_the_others_is_refused_by_name(
    definition: ModelDefinition, overrides: dict[str, object], param: str, words: str
) -> None:
    with pytest.raises(InvalidLoadRequest) as caught:
        check_overrides(definition, overrides)
    assert caught.value.param == param
    assert words in caught.value.message
    assert load_constraints(model("attached")) == {}
    assert load_constraints(model("llama_server", **RUNNING)).keys() == {"replicas", "target_inflight"}


def test_fields_that_go_together_are_taken_and_null_takes_back_what_the_definition_says() -> None:
    for pair in ((2, 2), (8, 8), (2, 8)):
        assert check_overrides(model("exllamav3"), bits(*pair)) == bits(*pair)
    quantised = model("gguf", gguf_type_v="q8_0")
    assert check_overrides(quantised, {"gguf_flash_attn": "on"})
    assert check_overrides(quantised, {"gguf_flash_attn": "off", "gguf_type_v": "f16"})
    assert check_overrides(model("vllm"), {"vllm_num_speculative_tokens": 3, "vllm_speculative_method": "ngram"})
    assert check_overrides(model("vllm", vllm_speculative_model="org/draft"), {"vllm_num_speculative_tokens": 3})
    definition, wanted = model("exllamav3", exllama_cache_quant="8,8"), bits(6, 5, exllama_cache_quant=None)
    assert check_overrides(definition, wanted) == wanted
    assert plan_of(definition, wanted).options == bits(6, 5)


OVERRIDE_VALUES = {
    "gguf_n_ctx": st.integers(1, 9999), "gguf_flash_attn": st.sampled_from(["on", "auto"]),
    "gguf_type_k": st.sampled_from(KV_TYPES), "gguf_type_v": st.sampled_from(KV_TYPES), "target_inflight": st.integers(1, 9),
}  # fmt: skip
_VLLM_VALUES = {
    "vllm_speculative_method": st.none() | st.just("ngram"),
    "vllm_kv_cache_memory_bytes": st.none() | st.integers(1, 9).map(lambda count: count * STEP),
    "vllm_max_pixels": st.none() | st.just(200704),
}


@examples(25)
@given(
    backend=st.sampled_from(["gguf", "vllm"]), defined=st.fixed_dictionaries({}, optional=OVERRIDE_VALUES | _VLLM_VALUES),
    wanted=st.fixed_dictionaries({}, optional=OVERRIDE_VALUES | _VLLM_VALUES),
)  # fmt: skip
def test_a_key_in_the_override_even_null_beats_the_definition_and_others_stay(
    backend: Backend, defined: dict[str, object], wanted: dict[str, object]
) -> None:
    defined, wanted = (
        {name: value for name, value in each.items() if name.startswith((backend, "target"))} for each in (defined, wanted)
    )
    checked = check_overrides(model(backend), wanted)
    assert check_overrides(model(backend), checked) == checked == wanted
    plan, merged = plan_of(model(backend, **defined), wanted), {**defined, **wanted}
    assert plan.slots == merged.pop("target_inflight", 1)
    assert plan.context_tokens == merged.get("gguf_n_ctx")
    assert {name: plan.options.get(name) for name in merged} == merged
    assert {name for name, value in plan.options.items() if value is not None} <= merged.keys()


@pytest.mark.parametrize("backend", BACKENDS)
def test_constraints_of_every_backend_agree_with_the_check(backend: Backend) -> None:
    definition = model(backend, replica_max=2)
    constraints = load_constraints(definition)
    assert json.loads(json.dumps(constraints)) == constraints
    assert {"replicas", "target_inflight"} <= constraints.keys()
    for name, limits in constraints.items():
        if limits["kind"] not in {"integer", "integer_or_null"} or name.endswith(("_bits", "speculative_tokens")):
            continue
        minimum, step = limits["minimum"], limits["step"]
        assert isinstance(minimum, int)
        assert isinstance(step, int)
        assert check_overrides(definition, {name: minimum})
        for bad in (minimum - 1, minimum + step - 1 if step > 1 else minimum - step):
            with pytest.raises(InvalidLoadRequest):
                check_overrides(definition, {name: bad})


@pytest.mark.parametrize("backend", ["gguf", "exllamav3", "tabbyapi"])
def test_recommended_pairs_can_be_loaded(backend: Backend) -> None:
    assert load_recommendations(model("vllm")) == [], "it has no types of cache"
    [recommendation] = load_recommendations(model(backend))
    fields, presets = recommendation["fields"], recommendation["presets"]
    assert isinstance(fields, list)
    assert isinstance(presets, list)
    assert (recommendation["kind"], len(presets) >= 3) == ("pair_presets", True)
    for preset in presets:
        check_overrides(model(backend), dict(zip(fields, preset["values"], strict=True)))


def test_the_fields_of_the_model_runner_request_become_those_of_the_backend() -> None:
    wanted: dict[str, object] = {"quantization": "awq-4bit", "maxContextLength": 32768, "gpuMemoryBudgetMB": 40000}
    plan = plan_of(model("vllm", vllm_max_model_len=256, target_inflight=4), wanted, gpu_ids=(0, 1))
    assert (plan.quantization, plan.context_tokens, plan.memory_budget_mb) == ("awq-4bit", 32768, 40000)
    assert (plan.options["vllm_max_model_len"], plan.slots, plan.gpu_ids) == (32768, 4, (0, 1))
    assert check_overrides(model("tgi"), dict.fromkeys(wanted)) == {}, "null means not given"
    assert [plan_of(model(name), {"maxContextLength": 77}).context_tokens for name in ("gguf", "ct2")] == [77, 77]
    assert plan_of(model("ct2"), {"quantization": "bf16"}).options == {"compute_type": "bfloat16"}
    common = {"device": "cpu", "compute_type": "int8", "revision": "abc", "enable_thinking": False, "prompt_format": "x"}
    assert plan_of(model("ct2", **common)).options == common
    plan = plan_of(model("exllamav3", target_inflight=3), {"maxContextLength": 1000})
    assert (plan.context_tokens, plan.options["exllama_cache_size"]) == (1000, 3072), "the context of every slot"
    shared = plan_of(model("exllamav3", target_inflight=4, exllama_cache_size=16384))
    assert (shared.context_tokens, shared.options["exllama_cache_size"]) == (4096, 16384)


@pytest.mark.parametrize(
    ("backend", "overrides", "param", "words"),
    [
        ("vllm", {"quantization": "int3"}, "quantization", 'quantization: "int3" is not allowed; it must be one of awq-4bit'),
        ("gguf", {"quantization": "awq-4bit"}, "quantization", "it must be one of fp16, bf16"),
        ("exllamav3", {"quantization": "fp16"}, "quantization", "exllamav3 loads files as they are"),
        ("vllm", {"maxContextLength": 0}, "maxContextLength", "of at least 256 in steps of 256"),
        ("vllm", {"maxContextLength": 300}, "maxContextLength", "in steps of 256"),
        ("gguf", {"maxContextLength": 0}, "maxContextLength", "of at least 1"),
        ("ct2", {"maxContextLength": 0}, "maxContextLength", "of at least 1"),
        ("tgi", {"maxContextLength": 4096}, "maxContextLength", "the context of a tgi model is its own"),
        ("gguf", {"maxContextLength": 1, "gguf_n_ctx": 1}, "maxContextLength", "give one of them"),
        ("exllamav3", {"maxContextLength": 1, "exllama_cache_size": 256}, "maxContextLength", "give one of them"),
        ("gguf", {"gpuMemoryBudgetMB": 0}, "gpuMemoryBudgetMB", "of at least 1"),
        ("gguf", {"gpuMemoryBudgetMB": 1.5}, "gpuMemoryBudgetMB", "1.5 is not allowed"),
        ("openai_compatible", {"gpuMemoryBudgetMB": 1}, "gpuMemoryBudgetMB", "takes no memory of this box"),
        ("gguf", {"quantization": "q8 0; rm"}, "quantization", "quantization"),
    ],
)
def test_fields_of_the_model_runner_request_have_limits_too(
    backend: Backend, overrides: dict[str, object], param: str, words: str
) -> None:
    with pytest.raises(InvalidLoadRequest) as caught:
        check_overrides(model(backend), overrides)
    assert caught.value.param == param
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("backend", "wanted", "files", "fits"),
    [
        ("vllm", "awq-4bit", "awq-4bit", True), ("vllm", "awq-4bit", None, True), ("vllm", "fp16", "bf16", True),
        ("vllm", "awq-4bit", "bf16", False), ("vllm", "gptq-4bit", "awq-4bit", False), ("vllm", "fp16", "gptq-4bit", False),
        ("ct2", "bf16", "int8", True), ("vllm", "bf16", "fp32", True), ("vllm", "bf16", "fp8", False),
        ("vllm", "awq-4bit", "awq", True), ("gguf", "fp16", "F16", True), ("gguf", "fp16", "fp16", True),
        ("gguf", "fp16", "bf16", False), ("gguf", "fp16", "q4_k_m", False), ("gguf", None, "q4_k_m", True),
        ("gguf", "q8_0", "q8_0", True), ("gguf", "q8_0", "q4_k_m", False),
    ],
)  # fmt: skip
def test_a_quantisation_must_be_what_the_files_are_or_can_become(
    backend: Backend, wanted: str | None, files: str | None, *, fits: bool
) -> None:
    plan = plan_of(model(backend), {"quantization": wanted})
    if fits:
        check_quantization(plan, files)
        return
    with pytest.raises(InvalidLoadRequest, match=f"the files of m are {files}") as caught:
        check_quantization(plan, files)
    assert caught.value.param == "quantization"


def test_vllm_variables_hold_where_nobody_says_otherwise_and_are_named_when_they_cannot_be_used() -> None:
    env = {
        "VLLM_MAX_MODEL_LEN": "1000", "VLLM_GPU_MEMORY_UTILIZATION": "0.5", "VLLM_ENABLE_PREFIX_CACHING": "False", "HOME": "/",
    }  # fmt: skip
    plan = plan_of(model("vllm"), defaults=env)
    assert (plan.context_tokens, plan.options["vllm_gpu_memory_utilization"]) == (1000, 0.5)
    assert plan.options["vllm_enable_prefix_caching"] is False
    assert plan_of(model("vllm", vllm_max_model_len=512), defaults=env).context_tokens == 512
    assert plan_of(model("vllm", vllm_max_model_len=512), {"vllm_max_model_len": 256}, defaults=env).context_tokens == 256
    assert plan_of(model("gguf"), defaults=env).options == read_vllm_defaults({"VLLM_MAX_MODEL_LEN": " "}) == {}
    bad = (("MAX_MODEL_LEN", "0 4k"), ("GPU_MEMORY_UTILIZATION", "0 1.1 nan"), ("ENABLE_PREFIX_CACHING", "maybe"))
    for name, text in ((name, text) for name, texts in bad for text in texts.split()):
        with pytest.raises(ConfigError, match=f"VLLM_{name} must be .*, not '{text}'"):
            read_vllm_defaults({f"VLLM_{name}": text})


def test_the_key_of_a_plan_tells_memory_apart_and_nothing_else() -> None:
    definition = model("gguf", gguf_n_ctx=4096, gguf_type_k="f16", enable_thinking=True)
    base = plan_key(plan_of(definition))
    same = [
        plan_of(definition, threads=7, path=Path("/elsewhere/m")),
        plan_of(msgspec.structs.replace(definition, enable_thinking=False, replicas=2, enabled=True)),
        plan_of(definition, {"gguf_n_ctx": 4096}),
        plan_of(definition, {"gguf_type_v": "f16", "gguf_flash_attn": "auto"}),
    ]
    others = [
        plan_of(definition, {"gguf_n_ctx": 4097}), plan_of(definition, {"gguf_type_k": "q8_0"}),
        plan_of(definition, {"target_inflight": 2}), plan_of(definition, {"gpuMemoryBudgetMB": 100}),
        plan_of(definition, {"quantization": "fp16"}), plan_of(definition, gpu_ids=(0,)),
        plan_of(model("ct2"), {"maxContextLength": 4096}),
    ]  # fmt: skip
    assert len(base) == 16
    assert {plan_key(plan) for plan in same} == {base}
    assert len({base, *(plan_key(plan) for plan in others)}) == len(others) + 1
    options = {"gguf_type_v": "q8_0", "gguf_type_k": "q4_0"}
    for name, order in (("m", options), ("x", dict(reversed(options.items())))):
        plan = LoadPlan(model_id=name, backend="gguf", context_tokens=4096, slots=2, options=order)
        assert plan_key(plan) == "8efabddc264af34d", "it stays the same over releases"


IN_FORCE: list[tuple[Backend, dict[str, object], dict[str, object], set[str]]] = [
    ("gguf", {}, {}, set()),
    ("gguf", {}, {"maxContextLength": 4096}, set()),
    ("gguf", {}, {"maxContextLength": 2048}, {"gguf_n_ctx"}),
    ("gguf", {"maxContextLength": 2048}, {"gguf_n_ctx": 2048}, set()),
    ("gguf", {}, {"gguf_type_k": "f16", "gguf_flash_attn": "auto", "replicas": 1}, set()),
    ("gguf", {}, {"quantization": "q8_0"}, set()),
    ("gguf", {}, {"quantization": "fp16"}, {"quantization"}),
    ("gguf", {"gpuMemoryBudgetMB": 100}, {"gpuMemoryBudgetMB": 100}, set()),
    ("gguf", {"gpuMemoryBudgetMB": 100}, {"gpuMemoryBudgetMB": 200, "replicas": 2}, {"gpuMemoryBudgetMB", "replicas"}),
    ("vllm", {"vllm_max_pixels": 200704}, {"vllm_max_pixels": None}, {"vllm_max_pixels"}),
    ("vllm", {"vllm_max_pixels": None}, {"vllm_max_pixels": None}, set()),
    ("exllamav3", {"maxContextLength": 512}, {"maxContextLength": 512}, set()),
    ("exllamav3", {"maxContextLength": 512}, {"maxContextLength": 1024}, {"maxContextLength"}),
    ("ct2", {"quantization": "fp16"}, {"quantization": "bf16"}, {"quantization"}),
]


@pytest.mark.parametrize(("backend", "loaded", "asked", "differing"), IN_FORCE)
def test_a_second_load_differs_in_what_it_names_and_what_is_otherwise_in_force(
    backend: Backend, loaded: dict[str, object], asked: dict[str, object], differing: set[str]
) -> None:
    definition = model(backend, replica_max=2)
    wanted = check_overrides(definition, asked)
    found = find_conflicts(plan_of(definition, loaded), wanted, replicas=1, context_tokens=4096, files="Q8_0")
    assert found.keys() == differing


@pytest.mark.parametrize(
    ("device", "given", "found", "chosen"),
    [
        (None, (2, 3), (0, 1, 2, 3), (2, 3)), ("auto", (), (0,), ()), ("cpu", (2, 3), (0, 1), ()),
        ("cuda", (2, 3), (0, 1, 2, 3), (2, 3)), ("cuda", (), (0, 1), (0, 1)), ("cuda:3", (2, 3), (0, 1, 2, 3), (3,)),
        ("cuda:1", (), (0, 1), (1,)), ("cuda", (), (), "this node has no GPU"),
        ("cuda:0", (2, 3), (0, 1, 2, 3), "this node has the GPUs 2, 3"), ("cuda:5", (), (0, 1), "this node has the GPUs 0, 1"),
    ],
)  # fmt: skip
def test_a_device_is_made_into_gpus_of_the_node_or_refused(
    device: str | None, given: tuple[int, ...], found: tuple[int, ...], chosen: tuple[int, ...] | str
) -> None:
    definition = model("vllm", device=device)
    if isinstance(chosen, tuple):
        assert choose_gpus(definition, given=given, found=found) == chosen
        return
    with pytest.raises(InvalidLoadRequest, match=chosen) as caught:
        choose_gpus(definition, given=given, found=found)
    assert caught.value.param == "device"
