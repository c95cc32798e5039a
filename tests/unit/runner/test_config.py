"""Options, settings and load overrides: what wins, limits of every field, one clear line for what cannot be used."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.config import ApiConfig, BackendConfig, LlamaConfig, normalise_gateway, read_config, read_options, settle_api
from runner.definitions.fields import (
    BACKEND_FIELDS,
    BACKENDS,
    COMMON_FIELDS,
    DECODING_FIELDS,
    KV_TYPES,
    MAX_INTEGER,
    Backend,
    ModelDefinition,
)
from runner.definitions.plan import (
    LoadPlan,
    check_overrides,
    check_quantization,
    choose_gpus,
    describe,
    find_conflicts,
    load_constraints,
    load_recommendations,
    make_plan,
    plan_key,
    read_vllm_defaults,
)
from runner.definitions.settings import Remote, Service, Settings, diff_settings, merge_settings, parse_settings, read_settings
from runner.errors import ConfigError, InvalidLoadRequest, InvalidSettings, SettingsConflict
from runner.limits import Limits
from tests.fakes.examples import examples
from wire.limits import Bound, list_bounds

MINIMAL = ["--gateway", "http://127.0.0.1:8080", "--token", "msw_x"]


def test_flags_win_over_the_environment() -> None:
    env = {"MUSTER_GATEWAY": "https://a,wss://b/", "MUSTER_TOKEN": "msw_env", "MUSTER_MAX_CONCURRENT": "7", "MUSTER_NAME": "n"}
    config = read_config([], env)
    assert config.gateways == ("wss://a", "wss://b")
    assert (config.token, config.max_concurrent, config.name) == ("msw_env", 7, "n")
    config = read_config([*MINIMAL, "--max-concurrent", "2"], env)
    assert (config.gateways, config.token, config.max_concurrent) == (("ws://127.0.0.1:8080",), "msw_x", 2)


def test_secrets_may_come_from_files_and_never_show_in_a_printed_configuration(tmp_path: Path) -> None:
    token, key = tmp_path / "token", tmp_path / "key"
    token.write_text("msw_filed\n", encoding="utf-8")
    key.write_text("sk-backend\n", encoding="utf-8")
    env = {"MUSTER_GATEWAY": "http://a", "MUSTER_TOKEN_FILE": str(token), "MUSTER_BACKEND_KEY_FILE": str(key)}
    config = read_config(["--backend", "http://b:1"], env)
    assert config.token == "msw_filed"
    assert isinstance(config.engine, BackendConfig)
    assert config.engine.key == "sk-backend"
    assert "msw_filed" not in repr(config)
    assert "sk-backend" not in repr(config)


def test_addresses_lists_and_files_are_read_into_one_form(tmp_path: Path) -> None:
    for url, normal in (
        ("http://h:1", "ws://h:1"), ("https://h/prefix/", "wss://h/prefix"), ("ws://h", "ws://h"), (" wss://[::1]:9 ", "wss://[::1]:9"),
    ):  # fmt: skip
        assert normalise_gateway(url) == normal
    backend = [*MINIMAL, "--backend", "http://127.0.0.1:11434/v1/", "--models", "a, b", "--models", "b,*"]
    wanted = BackendConfig(url="http://127.0.0.1:11434", models=("a", "b"))
    assert read_config(backend, {}).engine == wanted
    for options, env in ((["--tidy"], {}), ([], {"MUSTER_TIDY": "true"})):
        assert read_config([*backend, *options], env).engine == replace(wanted, tidies=True)
    model = tmp_path / "small-q4.gguf"
    model.write_bytes(b"GGUF")
    config = read_config([*MINIMAL, "--model-path", str(model), "--context", "4096", "--threads", "3"], {})
    assert config.engine == LlamaConfig(model_path=model, model_name="small-q4", context_tokens=4096, threads=3)


NAMELESS, ALONE = ["--gateway", "http://h"], ["--standalone"]


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        (["--token", "x"], {}, "no gateway"), ([], {}, "--standalone"), (NAMELESS, {}, "no credential"),
        (["--gateway", "127.0.0.1:8080", "--token", "x"], {}, "--gateway must look like"),
        (["--gateway", "http://h:99999", "--token", "x"], {}, "--gateway must look like"),
        (["--gateway", "http://u:p@h", "--token", "x"], {}, "user name or password"),
        ([*NAMELESS, "--token", "bad token"], {}, "--token holds characters"),
        ([*NAMELESS, "--token-file", "/nowhere"], {}, "cannot read the token"),
        ([*MINIMAL, "--max-concurrent", "0"], {}, "--max-concurrent must be a whole number from 1"),
        ([*MINIMAL, "--max-concurrent", "many"], {}, "not 'many'"), ([*MINIMAL, "--engine", "vllm"], {}, "must be llamacpp"),
        ([*MINIMAL, "--model-path", "/nowhere.gguf"], {}, "there is no file /nowhere.gguf"),
        ([*MINIMAL, "--backend", "ftp://h"], {}, "--backend must look like"),
        ([*ALONE, "--api-key", "short"], {}, "16 characters"),
        (ALONE, {"OP_TOKEN_SIGNERS": "ann,bob"}, "OP_TOKEN_SIGNERS counts below level 2 only"),
        (ALONE, {"MODEL_BASE_PATH": "/does/not/exist"}, "MODEL_BASE_PATH"),
        (ALONE, {"VERIFIED_OP_TOKEN_KEY_PATH": "/etc/key"}, "--data"), (ALONE, {"OP_TOKEN_LEVEL": "3"}, "OP_TOKEN_LEVEL"),
        (ALONE, {"MUSTER_RECONNECT_MAX_S": "soon"}, "must be a number of seconds"),
        (ALONE, {"MUSTER_OPS_PER_HOUR": "0"}, "MUSTER_OPS_PER_HOUR"), (ALONE, {"OP_TOKEN_MIN_SIGNERS": "0"}, "MIN_SIGNERS"),
        (ALONE, {"QUEUE_TIMEOUT_MS": "0"}, "QUEUE_TIMEOUT_MS"), (ALONE, {"METRICS_PORT": "70000"}, "METRICS_PORT"),
        (ALONE, {"ENABLE_METRICS": "perhaps"}, "ENABLE_METRICS"), (ALONE, {"LOG_FORMAT": "xml"}, "LOG_FORMAT"),
        (ALONE, {"MUSTER_LOG_FORMAT": "yaml"}, "MUSTER_LOG_FORMAT.* one of auto, json, console, not 'yaml'"),
        (ALONE, {"LLM_POOL_SETTINGS_PATH": "/does/not/exist.json"}, "LLM_POOL_SETTINGS_PATH"),
        (ALONE, {"MUSTER_LOG_LEVEL": "verbose"}, "MUSTER_LOG_LEVEL.* must be one of trace, debug, .*, not 'verbose'"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_used_are_named(options: list[str], env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(options, env)


def test_a_worker_of_modelrelay_keeps_its_command_line_and_its_environment() -> None:
    env = {
        "PROXY_URL": "http://proxy:8080", "WORKER_SECRET": "a-secret-of-theirs", "WORKER_NAME": "gpu-box-4",
        "PROVIDER_NAME": "lab", "BACKEND_URL": "http://localhost:8000", "MODELS": "llama3-8b,b", "MAX_CONCURRENCY": "2",
        "LOG_LEVEL": "warn",
    }  # fmt: skip
    words = {
        "--proxy-url": "PROXY_URL", "--worker-secret": "WORKER_SECRET", "--worker-name": "WORKER_NAME",
        "--provider": "PROVIDER_NAME", "--backend-url": "BACKEND_URL", "--models": "MODELS",
        "--max-concurrency": "MAX_CONCURRENCY", "--log-level": "LOG_LEVEL",
    }  # fmt: skip
    by_env, by_words = (
        read_config([], env),
        read_config([part for word, name in words.items() for part in (word, env[name])], {}),
    )
    assert replace(by_env, environment={}) == replace(by_words, environment={})
    assert (by_env.gateways, by_env.token, by_env.name, by_env.provider) == (
        ("ws://proxy:8080",), "a-secret-of-theirs", "gpu-box-4", "lab",
    )  # fmt: skip
    assert by_env.engine == BackendConfig(url="http://localhost:8000", models=("llama3-8b", "b"))
    assert (by_env.max_concurrent, by_env.log_level) == (2, "warning")
    assert read_config(["--name", "mine"], {**env, "MUSTER_PROVIDER": "ours"}).provider == "ours"


def test_everything_that_cannot_be_used_is_named_at_once_by_what_was_given() -> None:
    env = {"BACKEND_URL": "ftp://x", "LOG_LEVEL": "loud", "MUSTER_API_PORT": "x", "MAX_CONCURRENCY": "0", "METRICS_PORT": "x"}
    with pytest.raises(ConfigError) as refused:
        read_config(["--gateway", "h:1"], {**env, "MODEL_BASE_PATH": "/does/not/exist"})
    assert str(refused.value).splitlines()[0] == "8 settings cannot be used:"
    for words in (
        "--gateway must look like", "no credential", "MUSTER_API_PORT (--api-port) must be a port", "METRICS_PORT must be",
        "BACKEND_URL (read as MUSTER_BACKEND_URL) must look like", "LOG_LEVEL (read as MUSTER_LOG_LEVEL) must be one of",
        "MAX_CONCURRENCY (read as MUSTER_MAX_CONCURRENT) must be a whole number", "MODEL_BASE_PATH: there is no folder",
    ):  # fmt: skip
        assert words in str(refused.value)
    config, options = read_options(
        ["--gateway", "http://h", "--max-concurrent", "3"], {"WORKER_SECRET": "s", "MUSTER_TIDY": "1"}
    )
    assert (config.max_concurrent, options.problems) == (3, [])
    found = {name: (one.text, one.origin, one.source) for name, one in options.read.items()}
    assert found["MUSTER_TOKEN"] == ("s", "alias", "WORKER_SECRET")
    assert found["MUSTER_MAX_CONCURRENT"] == ("3", "option", "--max-concurrent")
    assert found["MUSTER_PROVIDER"] == ("local", "default", "")


def test_a_box_may_serve_alone_and_an_address_that_others_can_reach_needs_a_key() -> None:
    def settle(*options: str, port: int | None = 9999, **env: str) -> ApiConfig:
        config = read_config(["--standalone", *options], env)
        assert (config.gateways, config.token) == ((), "")
        assert config.api is not None
        return settle_api(config.api, host=None, port=port)

    settled = settle(port=None)
    assert (settled.host, settled.port, settled.has_metrics, settled.metrics_port) == ("127.0.0.1", 8090, True, None)
    assert settle("--api-port", "0").port == 0
    settled = settle(METRICS_PORT="9090", ENABLE_METRICS="false")
    assert (settled.port, settled.metrics_port, settled.has_metrics) == (9999, 9090, False)
    with pytest.raises(ConfigError, match="--api-key-file"):
        settle("--api-host", "0.0.0.0")
    keyed = settle("--api-host", "0.0.0.0", MUSTER_API_KEY="k" * 16)
    assert (keyed.host, "kkkk" in repr(keyed)) == ("0.0.0.0", False)


def test_the_variables_of_the_model_runner_specification_are_read(tmp_path: Path) -> None:
    env = {
        "MODEL_BASE_PATH": str(tmp_path), "HF_HOME": "/models/cache", "VERIFIED_OP_TOKEN_KEY_PATH": "/etc/key",
        "OP_TOKEN_LEVEL": "1", "OP_TOKEN_MIN_SIGNERS": "3", "MAX_QUEUE_DEPTH": "4", "QUEUE_TIMEOUT_MS": "1500",
        "CUDA_VISIBLE_DEVICES": "0,2", "LOG_LEVEL": "debug", "LOG_FORMAT": "json", "MUSTER_RUNNER_ID": "box-7",
    }  # fmt: skip
    config = read_config(["--standalone", "--data", str(tmp_path / "data")], env)
    assert config.engine is None, "with a folder of models nothing is loaded by itself"
    assert (config.files.model_base, config.files.hf_home) == (tmp_path.resolve(), Path("/models/cache"))
    wanted = config.operations
    assert (wanted.key_path, wanted.level, wanted.min_signers, wanted.runner_id) == (Path("/etc/key"), 1, 3, "box-7")
    assert (config.max_queue_depth, config.limits.admission.timeout_s, config.gpu_ids) == (4, 1.5, (0, 2))
    assert (config.log_level, config.log_format) == ("debug", "json")


@pytest.mark.parametrize(
    ("env", "level", "is_given", "takes_shared"),
    [
        ({}, 2, False, False), ({"OP_TOKEN_LEVEL": "0"}, 0, True, True), ({"OP_TOKEN_LEVEL": "1"}, 1, True, False),
        ({"VERIFIED_OP_TOKEN_KEY_PATH": "/etc/key"}, 0, False, False),
        ({"VERIFIED_OP_TOKEN_KEY_PATH": "/etc/key", "OP_TOKEN_LEVEL": "0"}, 0, True, False),
        ({"VERIFIED_OP_TOKEN_KEY_PATH": "/etc/key", "OP_TOKEN_LEVEL": "2"}, 2, True, False),
    ],
)  # fmt: skip
def test_the_level_is_the_strongest_unless_its_owner_hands_out_a_key(
    tmp_path: Path, env: dict[str, str], level: int, *, is_given: bool, takes_shared: bool
) -> None:
    shared, flags = tmp_path / "model-api.key", ["--standalone", "--data", str(tmp_path / "data")]
    own = Path(env["VERIFIED_OP_TOKEN_KEY_PATH"]) if "VERIFIED_OP_TOKEN_KEY_PATH" in env else None
    assert read_config(flags, env, shared_key=shared).operations.key_path == own, "the shared one is not there"
    shared.touch()
    wanted = read_config(flags, env, shared_key=shared).operations
    assert (wanted.level, wanted.is_level_given, wanted.ops_per_hour) == (level, is_given, 60)
    assert wanted.key_path == (shared if takes_shared else own)


def test_the_names_of_signers_that_count_are_read(tmp_path: Path) -> None:
    env = {"VERIFIED_OP_TOKEN_KEY_PATH": "/etc/key", "OP_TOKEN_SIGNERS": " ann, bob ,,ann"}
    flags = ["--standalone", "--data", str(tmp_path / "data")]
    assert read_config(flags, env).operations.counted_signers == frozenset({"ann", "bob"})
    assert read_config(flags, {}).operations.counted_signers is None
    with pytest.raises(ConfigError, match="has 1 names and OP_TOKEN_MIN_SIGNERS asks for 2"):
        read_config(flags, {**env, "OP_TOKEN_SIGNERS": "ann"})


SETTINGS = [
    (section.name, bound)
    for section in fields(Limits())
    for bound in list_bounds(getattr(Limits(), section.name))
    if bound.setting
]


@pytest.mark.parametrize(("section", "bound"), SETTINGS, ids=[bound.setting for _, bound in SETTINGS])
def test_the_environment_sets_each_limit_that_names_a_variable_and_leaves_the_others(section: str, bound: Bound) -> None:
    config = read_config(MINIMAL, {bound.setting: "7000" if bound.setting.endswith("_MS") else "7"})
    expected = replace(Limits(), **{section: replace(getattr(Limits(), section), **{bound.name: 7.0})})
    assert config.limits == expected
    assert read_config(MINIMAL, {}).limits == Limits()


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
    ("gguf", "replicas", [1, 2], [0, 3, 1.0, True, None, "1"]), ("gguf", "target_inflight", [1, 2, 1024], [0, 1025, None]),
    ("gguf", "gguf_n_ctx", [1, 2, 4096, MAX_INTEGER], [0, -1, 1.5, "4096", None, True, MAX_INTEGER + 1]),
    ("gguf", "gguf_flash_attn", ["on", "off", "auto"], ["On", True, None, ""]),
    ("gguf", "gguf_type_k", list(KV_TYPES), ["q3_0", "F16", None, 16]), ("gguf", "gguf_type_v", list(KV_TYPES), ["q8_1", None]),
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
    ("vllm", "vllm_num_speculative_tokens", [None], [0, -1, 1.5]), ("llama_server", "llama_server_n_ctx", [1, 4096], [0, None]),
    ("llama_server", "llama_server_image_max_tokens", [1, None], [0]),
    ("llama_server", "llama_server_spec_type", ["draft", None], [""]),
    ("llama_server", "llama_server_spec_draft_n_max", [1, 6, None], [0, 7]),
    ("llama_server", "llama_server_spec_draft_p_min", [0, 0.0, 0.5, 1, 1.0, None], [-0.01, 1.01, "0", True]),
    ("tabbyapi", "exllama_cache_size", [256], [255]),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "name", "good", "bad"), LIMITS)
def test_a_value_beyond_its_limits_is_refused_by_name(
    backend: Backend, name: str, good: list[object], bad: list[object]
) -> None:
    definition = model(backend, replica_max=2)
    for value in good:
        assert check_overrides(definition, {name: value}) == {name: value}
    numbers = [load_constraints(definition)[name].get(limit) for limit in ("minimum", "maximum")]
    for value in bad:
        with pytest.raises(InvalidLoadRequest) as caught:
            check_overrides(definition, {name: value})
        assert caught.value.param == name
        assert caught.value.message.startswith(f"{name}: {json.dumps(value)} is not allowed; it must be ")
        assert all(number is None or f"{number:.12g}" in caught.value.message for number in numbers)
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
def test_what_cannot_be_set_is_said(definition: ModelDefinition, overrides: dict[str, object], param: str, words: str) -> None:
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
def test_an_override_even_null_beats_the_definition(
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


@pytest.mark.parametrize("backend", ["gguf", "exllamav3", "tabbyapi"])
def test_recommended_pairs_can_be_loaded(backend: Backend) -> None:
    assert load_recommendations(model("vllm")) == {}, "it has no types of cache"
    [(name, recommendation)] = load_recommendations(model(backend)).items()
    assert isinstance(recommendation, dict)
    pairs = recommendation["recommended_pairs"]
    assert (name, recommendation["kind"], len(pairs) >= 3) == ("kv_cache", "pair_presets", True)
    for pair in pairs:
        assert pair.keys() == {"label", *recommendation["fields"]}
        check_overrides(model(backend), {name: pair[name] for name in recommendation["fields"]})


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


def test_fields_of_the_model_runner_request_have_limits_too() -> None:
    cases: list[tuple[Backend, dict[str, object], str]] = [
        ("vllm", {"quantization": "int3"}, 'quantization: "int3" is not allowed; it must be one of awq-4bit'),
        ("gguf", {"quantization": "awq-4bit"}, "it must be one of fp16, bf16"), ("gguf", {"quantization": "q8 0; rm"}, ""),
        ("exllamav3", {"quantization": "fp16"}, "exllamav3 loads files as they are"),
        ("vllm", {"maxContextLength": 0}, "of at least 256 in steps of 256"),
        ("vllm", {"maxContextLength": 300}, "in steps of 256"), ("gguf", {"maxContextLength": 0}, "of at least 1"),
        ("ct2", {"maxContextLength": 0}, "of at least 1"), ("tgi", {"maxContextLength": 4096}, "of a tgi model is its own"),
        ("gguf", {"maxContextLength": 1, "gguf_n_ctx": 1}, "give one of them"),
        ("exllamav3", {"maxContextLength": 1, "exllama_cache_size": 256}, "give one of them"),
        ("gguf", {"gpuMemoryBudgetMB": 0}, "of at least 1"), ("gguf", {"gpuMemoryBudgetMB": 1.5}, "1.5 is not allowed"),
        ("openai_compatible", {"gpuMemoryBudgetMB": 1}, "takes no memory of this node"),
        ("whisper", {"gpus": [0]}, "are not chosen by a load"), ("vllm", {"gpus": []}, "each once"),
        ("vllm", {"gpus": [0, 0]}, "each once"), ("vllm", {"gpus": [64]}, "each once"), ("vllm", {"gpus": [True]}, "each once"),
    ]  # fmt: skip
    for backend, overrides, words in cases:
        with pytest.raises(InvalidLoadRequest) as caught:
            check_overrides(model(backend), overrides)
        assert (caught.value.param, words in caught.value.message) == (next(iter(overrides)), True)


def test_a_quantisation_must_be_what_the_files_are_or_can_become() -> None:
    cases: list[tuple[Backend, str | None, str | None, bool]] = [
        ("vllm", "awq-4bit", "awq-4bit", True), ("vllm", "awq-4bit", None, True), ("vllm", "fp16", "bf16", True),
        ("vllm", "awq-4bit", "bf16", False), ("vllm", "gptq-4bit", "awq-4bit", False), ("vllm", "fp16", "gptq-4bit", False),
        ("ct2", "bf16", "int8", True), ("vllm", "bf16", "fp32", True), ("vllm", "bf16", "fp8", False),
        ("vllm", "awq-4bit", "awq", True), ("gguf", "fp16", "F16", True), ("gguf", "fp16", "bf16", False),
        ("gguf", "fp16", "q4_k_m", False), ("gguf", None, "q4_k_m", True), ("gguf", "q8_0", "q8_0", True),
        ("gguf", "q8_0", "q4_k_m", False),
    ]  # fmt: skip
    for backend, wanted, files, fits in cases:
        plan = plan_of(model(backend), {"quantization": wanted})
        if fits:
            check_quantization(plan, files)
            continue
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
    ("gguf", {}, {}, set()), ("gguf", {}, {"maxContextLength": 4096}, set()),
    ("gguf", {}, {"maxContextLength": 2048}, {"gguf_n_ctx"}), ("gguf", {"maxContextLength": 2048}, {"gguf_n_ctx": 2048}, set()),
    ("gguf", {}, {"gguf_type_k": "f16", "gguf_flash_attn": "auto", "replicas": 1}, set()),
    ("gguf", {}, {"quantization": "q8_0"}, set()), ("gguf", {}, {"quantization": "fp16"}, {"quantization"}),
    ("gguf", {"gpuMemoryBudgetMB": 100}, {"gpuMemoryBudgetMB": 100}, set()),
    ("gguf", {"gpuMemoryBudgetMB": 100}, {"gpuMemoryBudgetMB": 200, "replicas": 2}, {"gpuMemoryBudgetMB", "replicas"}),
    ("vllm", {"vllm_max_pixels": 200704}, {"vllm_max_pixels": None}, {"vllm_max_pixels"}),
    ("vllm", {"vllm_max_pixels": None}, {"vllm_max_pixels": None}, set()),
    ("exllamav3", {"maxContextLength": 512}, {"maxContextLength": 512}, set()),
    ("exllamav3", {"maxContextLength": 512}, {"maxContextLength": 1024}, {"maxContextLength"}),
    ("ct2", {"quantization": "fp16"}, {"quantization": "bf16"}, {"quantization"}),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "loaded", "asked", "differing"), IN_FORCE)
def test_a_second_load_differs_in_what_it_names_and_what_is_otherwise_in_force(
    backend: Backend, loaded: dict[str, object], asked: dict[str, object], differing: set[str]
) -> None:
    definition = model(backend, replica_max=2)
    wanted = check_overrides(definition, asked)
    found = find_conflicts(plan_of(definition, loaded), wanted, replicas=1, context_tokens=4096, files="Q8_0")
    assert found.keys() == differing


def test_a_device_is_made_into_gpus_of_the_node_or_refused() -> None:
    cases: list[tuple[str | None, tuple[int, ...], tuple[int, ...], tuple[int, ...] | str]] = [
        (None, (2, 3), (0, 1, 2, 3), (2, 3)), ("auto", (), (0,), (0,)), (None, (), (0, 1), (0, 1)), (None, (), (), ()),
        ("cpu", (2, 3), (0, 1), ()),
        ("cuda", (2, 3), (0, 1, 2, 3), (2, 3)), ("cuda", (), (0, 1), (0, 1)), ("cuda:3", (2, 3), (0, 1, 2, 3), (3,)),
        ("cuda:1", (), (0, 1), (1,)), ("cuda", (), (), "this node has no GPU"),
        ("cuda:0", (2, 3), (0, 1, 2, 3), "this node has the GPUs 2, 3"), ("cuda:5", (), (0, 1), "this node has the GPUs 0, 1"),
    ]  # fmt: skip
    for device, given_, found, chosen in cases:
        if isinstance(chosen, tuple):
            assert choose_gpus(model("vllm", device=device), given=given_, found=found) == chosen
            continue
        with pytest.raises(InvalidLoadRequest, match=chosen) as caught:
            choose_gpus(model("vllm", device=device), given=given_, found=found)
        assert caught.value.param == "device"
    two = model("vllm", gpu_count=2)
    free = {0: 100, 1: 900, 2: None, 3: 500}
    assert choose_gpus(two, given=(), found=(0, 1, 2, 3), free_mb=free) == (1, 3), "those with the most free memory"
    assert choose_gpus(two, given=(0, 2), found=(0, 1, 2, 3), free_mb=free) == (0, 2)
    assert choose_gpus(two, given=(), found=(0, 1, 2), asked=(2, 0)) == (2, 0), "a load that names them has these"
    for asked, there, words, param in (
        ((1, 5), (0, 1), "on GPU 5, and this node has the GPUs 0, 1", "gpus"),
        ((), (0,), "say 2 GPUs, and this node has the GPUs 0", "gpu_count"),
    ):
        with pytest.raises(InvalidLoadRequest, match=words) as caught:
            choose_gpus(two, given=(), found=there, asked=asked)
        assert caught.value.param == param
    for backend in ("gguf", "ct2", "whisper", "exllamav3"):  # these find a GPU by themselves, or run without one
        assert choose_gpus(model(backend), given=(), found=(0, 1)) == ()


EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "runner-settings.json"
REMOTE: dict[str, object] = {"backend": "openai_compatible", "remote_base_url": "https://api.example.com/v1"}
SECRET = "sk-Secret123"


def one(fields: dict[str, Any], **engine: Any) -> ModelDefinition:
    """Return the definition that settings with only model ``m`` have."""
    return parse_settings({"engine": {**engine, "models": {"m": fields}}}).models["m"]


def refusal(settings: dict[str, Any]) -> str:
    """Return the words settings are refused with."""
    with pytest.raises(InvalidSettings) as caught:
        parse_settings(settings)
    return caught.value.message


def model_refusal(fields: dict[str, Any]) -> str:
    """Return the words a model is refused with."""
    return refusal({"engine": {"models": {"m": fields}}})


def of_engine(**fields: object) -> dict[str, object]:
    return {"engine": fields}


PRICED = {"models": {"m": REMOTE}, "remote": {"prices": {"m": {"input_per_million": 1}}}}


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"engin": {}}, "engin is unknown; allowed here: engine, service"),
        ({"service": {"prt": 1}}, "service.prt is unknown; allowed here: host, log_level, port"),
        ({"service": []}, "service must be an object, not a list"), ({"engine": None}, "engine must be an object, not null"),
        ({"service": {"port": "80"}}, "service.port must be a whole number from 1 to 65535, or null, not a string"),
        ({"service": {"port": 70000}}, "service.port must be a whole number from 1 to 65535, or null, not a number (70000)"),
        ({"service": {"log_level": "loud"}}, "service.log_level must be one of debug, info, warning, error"),
        (of_engine(backend="attached"), "engine.backend must be one of gguf, llama_server"),
        (of_engine(backend=None), "engine.backend must be one of"),
        (of_engine(decoding={"top_q": 1}), "engine.decoding.top_q is unknown; allowed here: beam_size"),
        (of_engine(decoding={"stop": "x"}), "engine.decoding.stop must be a list of at most 16 items"),
        (of_engine(models={"../m": {}}), "engine.models: '../m' cannot be used, a name must be a model id"),
        (of_engine(models={"m": 3}), "engine.models.m must be an object, not a number (3)"),
        (of_engine(models={"m": {}}), "engine.models.m.backend is missing; it must be one of"),
        (of_engine(fairness={"weight": {}}), "engine.fairness.weight is unknown"),
        (of_engine(fairness={"weights": {"t": 0}}), "engine.fairness.weights.t must be a number above 0, not a number (0)"),
        (of_engine(fairness={"weights": {" t": 1}}), "engine.fairness.weights: a tenant is named by 1 to 128"),
        (of_engine(fairness={"pending_per_key": 0}), "engine.fairness.pending_per_key must be a whole number from 1"),
        (of_engine(remote={"currency": "euro"}), "engine.remote.currency must be three letters such as EUR"),
        (of_engine(remote={"monthly_cap": 5}), "engine.remote.monthly_cap must be an object"),
        (of_engine(remote={"monthly_cap": {"default": -1}}), "engine.remote.monthly_cap.default must be a number of at"),
        (of_engine(remote={"prices": {"m": {}}}), "engine.remote.prices.m is not the id of an openai_compatible model"),
        (of_engine(**PRICED), "engine.remote.prices.m.output_per_million is missing"),
        (of_engine(models={"m": {"backend": "gguf", "gguf_ctx": 1}}), "engine.models.m.gguf_ctx is unknown; a gguf model"),
        (of_engine(models={"m": {"backend": "comfyui"}}), "engine.models.m.server_url is missing"),
        (of_engine(models={"m": {"backend": "gguf", "replicas": 4, "replica_max": 3}}), "engine.models.m.replicas is 4, more"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_path_what_it_got_and_what_is_allowed(settings: dict[str, Any], start: str) -> None:
    assert refusal(settings).startswith(start)


def test_what_a_model_leaves_out_follows_from_the_rest() -> None:
    assert [one({"backend": "gguf", **said}).replica_max for said in ({"replicas": 3}, {}, {"replica_max": 2})] == [3, 1, 2]
    assert [one(fields, backend="vllm").backend for fields in ({}, {"backend": "ct2"})] == ["vllm", "ct2"]
    for backend in ("llama_server", "tabbyapi", "comfyui"):
        assert one({"backend": backend, "server_url": "http://127.0.0.1:1"}).options == {"server_url": "http://127.0.0.1:1"}
    tidies = [one({"backend": "vllm", **said}).tidy for said in ({}, {"tidy": True}, {"tidy": False}, {"tidy": None})]
    assert tidies == [None, True, False, None]
    assert "tidy" in model_refusal({"backend": "vllm", "tidy": "yes"})
    assert one({"backend": "vllm", "translate": ["responses"]}).translate == ("responses",)
    for bad in (["chat"], ["/v1/messages"], "messages"):
        assert "messages or responses" in model_refusal({"backend": "vllm", "translate": bad})
    values = {name: ["\n\n"] if name == "stop" else 0.5 if name == "top_p" else 2 for name in DECODING_FIELDS}
    decoding = parse_settings({"engine": {"decoding": values}}).decoding
    assert {name: getattr(decoding, name) for name in values} == {**values, "stop": ("\n\n",)}


def test_a_field_of_another_backend_is_refused_by_naming_its_owner() -> None:
    for owner, known in BACKEND_FIELDS.items():
        for name in known if owner != "attached" else ():
            stranger = next(other for other in ("ct2", "gguf") if name not in BACKEND_FIELDS[other])
            words = model_refusal({"backend": stranger, name: None})
            assert words.startswith(f"engine.models.m.{name} is a field of ")
            assert owner in words
            assert f"the model's backend is {stranger}" in words


def test_the_shipped_example_can_be_used_and_shows_every_backend() -> None:
    settings = read_settings(EXAMPLE, None)
    assert {model.backend for model in settings.models.values()} == set(BACKENDS)
    assert settings.service == Service(host="127.0.0.1", port=8090, log_level="info")
    assert settings.fairness.weights == {"community-x": 2.0, "community-y": 1.0}
    assert [settings.remote.cap_for(tenant) for tenant in ("community-x", "someone else")] == [50.0, 10.0]
    assert settings.remote.prices["frontier-large"].output_per_million == 10.0
    free = Remote(monthly_cap=None, caps={"t": 0.0})
    assert (free.cap_for("t"), free.cap_for("u")) == (0.0, None), "a cap of nothing differs from no cap"


def test_the_local_file_wins_and_may_be_absent_but_the_base_may_not(tmp_path: Path) -> None:
    base, local = tmp_path / "settings.json", tmp_path / "local.json"
    base.write_text("{}")
    assert read_settings(base, local) == read_settings(None, None) == Settings()
    with pytest.raises(InvalidSettings, match=r"cannot read the settings file .*nowhere\.json: No such file"):
        read_settings(tmp_path / "nowhere.json", None)
    models = {"m": {"gguf_n_ctx": 4096, "replicas": 1}, "other": {}}
    base.write_text(json.dumps({"service": {"host": "0.0.0.0", "port": 1}, "engine": {"backend": "gguf", "models": models}}))
    local.write_text(
        json.dumps({"service": {"port": 2}, "engine": {"models": {"m": {"gguf_n_ctx": 1}, "new": {"backend": "ct2"}}}})
    )
    settings = read_settings(base, local)
    assert settings.service == Service(host="0.0.0.0", port=2)
    assert settings.models["m"].options == {"gguf_n_ctx": 1}
    assert {name: model.backend for name, model in settings.models.items()} == {"m": "gguf", "other": "gguf", "new": "ct2"}


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
_objects = st.dictionaries(st.sampled_from("abcd"), _values, max_size=4)


def _expected(base: object, local: object) -> object:
    """The merge rule, written down a second time: per key, the override wins, except where both sides are objects."""
    if not (isinstance(base, dict) and isinstance(local, dict)):
        return local
    merged = {}
    for name in [*base, *(name for name in local if name not in base)]:
        merged[name] = _expected(base[name], local[name]) if name in base and name in local else {**local, **base}[name]
    return merged


@examples(25)
@given(base=_objects, local=_objects)
def test_merging_follows_the_rule_and_changes_neither_side(base: dict[str, object], local: dict[str, object]) -> None:
    before = json.dumps([base, local])
    merged = merge_settings(base, local)
    assert merged == _expected(base, local)
    assert json.dumps([base, local]) == before
    assert merge_settings(merged, local) == merged
    assert merge_settings({}, local) == local
    assert merge_settings(base, {}) == base


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"service": {', "line 1, column"), ('{"service": {"port": 1, "port": 2}}', "'port' is given twice"),
        ('{"engine": {"decoding": {"top_p": NaN}}}', "NaN is not a number of JSON"),
        ("[1]", "must be an object with service and engine, not a list"),
        (f'{{"service": {{"port": {"9" * 5000}}}}}', "cannot be read as JSON"), ('{"a":' * 100_000, "cannot be read as JSON"),
        ("\udcff", "cannot be read as JSON"), (" " * (4 * 1024 * 1024 + 1), "larger than 4 MiB"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_plain_json_is_refused_with_its_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidSettings, match=r"settings\.json") as caught:
        read_settings(path, None)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("remote_base_url", "http://h:1/v1", "ftp://h/v1"), ("remote_base_url", "https://h", "https://user:pw@h/v1"),
        ("remote_base_url", "https://h/v1", "https://h/v1?key=x"), ("remote_base_url", "https://[::1]:8/v1", "https://:8/v1"),
        ("remote_base_url", "https://h/v1", "https://h:99999/v1"), ("remote_base_url", "https://h/v1", ""),
        ("remote_base_url", "https://h/v1", f"https://{SECRET}@h"), ("remote_thinking", None, SECRET),
        ("remote_api_key_env", "EXAMPLE_API_KEY", SECRET), ("remote_api_key_env", "_K", "1K"), ("remote_api_key_env", None, ""),
        ("remote_thinking", None, "on"), ("remote_thinking", "enabled", True), ("remote_thinking", "disabled", "Disabled"),
        ("remote_health_check", "config_only", None), ("remote_health_check", "models", "ping"),
        ("remote_health_check", "completion", ""), ("remote_max_retries", 0, -1), ("remote_max_retries", 5, 6),
        ("remote_max_retries", 3, 3.0), ("remote_max_retries", 1, True), ("remote_timeout_s", 1, 0.99),
        ("remote_timeout_s", 3600, 3600.1), ("remote_timeout_s", 1.5, "1.5"), ("remote_timeout_s", 60, 10**400),
        ("remote_api_kind", "chat_completions", "responses"), ("enabled", True, 1), ("enabled", False, None),
        ("enable_thinking", None, "false"), ("compute_type", None, "int4"), ("target_inflight", 1, 0),
    ],
)  # fmt: skip
def test_limits_of_a_remote_model(field: str, good: object, bad: object) -> None:
    definition = one({**REMOTE, field: good})
    assert {**definition.options, **describe(definition)}[field] == good
    words = model_refusal({**REMOTE, field: bad})
    assert words.startswith(f"engine.models.m.{field} ")
    assert SECRET not in words


def test_a_description_has_the_fields_of_the_settings_and_of_keys_the_variables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_API_KEY", SECRET)
    described = describe(one({**REMOTE, "remote_api_key_env": "EXAMPLE_API_KEY"}))
    assert described["model_id"] == "m"
    assert described["remote_api_key_env"] == "EXAMPLE_API_KEY"
    assert COMMON_FIELDS.keys() <= described.keys()
    assert SECRET not in json.dumps(described)


def _settings(**models: dict[str, Any]) -> Settings:
    return parse_settings({"engine": {"backend": "gguf", "models": models}})


def test_new_settings_are_told_apart_and_a_change_of_a_loaded_model_is_a_conflict_that_names_it() -> None:
    old = _settings(a={}, b={"gguf_n_ctx": 1}, c={}, d={})
    change = diff_settings(old, _settings(a={}, b={"gguf_n_ctx": 2}, e={}, d={"enabled": True}), loaded=["a"])
    assert (change.added, change.removed, change.updated, change.unchanged) == (("e",), ("c",), ("b", "d"), ("a",))
    assert not change.service_restart_required
    with pytest.raises(SettingsConflict) as caught:
        diff_settings(old, _settings(b={"gguf_n_ctx": 2}, c={}, d={}), loaded=["c", "b", "a", "elsewhere"])
    assert caught.value.details == {"conflicts": ["engine.models.a", "engine.models.b"]}
    assert caught.value.code == "settings_reload_conflict"
    ports = [parse_settings({"service": {"port": port}}) for port in (1, 2)]
    assert [diff_settings(ports[0], new, loaded=()).service_restart_required for new in ports] == [False, True]


MISPLACED: list[tuple[dict[str, object], str, str]] = [
    ({"backend": "gguf", "device": "tpu"}, "device", "must be cpu, cuda, cuda:N"),
    ({"backend": "gguf", "device": "cuda:x"}, "device", "must be cpu, cuda, cuda:N"),
    ({"backend": "gguf", "device": "cpu", "gguf_n_gpu_layers": -1}, "gguf_n_gpu_layers", "cannot be -1 with device cpu"),
    ({"backend": "exllamav3", "device": "cpu"}, "device", "runs on GPUs alone"),
    ({"backend": "tabbyapi", "server_url": "http://127.0.0.1:1", "device": "cuda"}, "device", "decided by the server"),
    ({"backend": "tgi", "tgi_launcher": "/bin/tgi", "device": "cuda:0"}, "device", "CUDA_VISIBLE_DEVICES"),
    ({"backend": "openai_compatible", "remote_base_url": "https://a.example/v1", "device": "cpu"}, "device", "decided by"),
    ({"backend": "whisper", "gpu_count": 2}, "gpu_count", "does nothing for whisper"),
    ({"backend": "vllm", "gpu_count": 2, "device": "cpu"}, "gpu_count", "cannot go together with device cpu"),
    ({"backend": "gguf", "prompt_format": "llama9_template"}, "prompt_format", "gemma4_template, translategemma_template"),
    ({"backend": "whisper", "prompt_format": "gemma4_template"}, "prompt_format", "does nothing for whisper"),
    ({"backend": "tgi", "tgi_launcher": "/bin/tgi", "enable_thinking": True}, "enable_thinking", "does nothing for tgi"),
    (
        {"backend": "openai_compatible", "remote_base_url": "https://a.example/v1", "enable_thinking": False},
        "enable_thinking", "does nothing for openai_compatible",
    ),
    (
        {"backend": "gguf", "prompt_format": "translategemma_template", "enable_thinking": False},
        "enable_thinking", "has no such switch",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name", "words"), MISPLACED)
def test_a_field_that_would_do_nothing_is_refused(fields: dict[str, object], name: str, words: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        parse_settings({"engine": {"models": {"m": fields}}})
    assert caught.value.param == f"engine.models.m.{name}"
    assert words in caught.value.message
    for backend in ("gguf", "vllm", "ct2", "whisper"):
        for device in (None, "auto", "cpu", "cuda", "cuda:7"):
            assert one({"backend": backend, "device": device}).device == device


@pytest.mark.parametrize(
    "text", ["10.0.0.1", "gpu1.lan:8070", "0.0.0.0:8070", "[::]:8070", "10.0.0.1:0", "10.0.0.1:x", ":8070"]
)
def test_an_address_that_other_nodes_cannot_use_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--cluster-address must be an IP address of this node and a port"):
        read_config(["--standalone", "--cluster-address", text], {})


def test_the_cluster_address_is_given_by_flag_or_variable() -> None:
    for argv, env, address in (
        (["--cluster-address", "10.0.0.1:8070"], {}, "10.0.0.1:8070"), ([], {}, ""),
        ([], {"MUSTER_CLUSTER_ADDRESS": "[fd00::1]:1"}, "[fd00::1]:1"),
    ):  # fmt: skip
        assert read_config(["--standalone", *argv], env).operations.cluster_address == address
