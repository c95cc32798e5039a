"""Settings files: what is read, what is merged, what is refused and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.definitions.decoding import DECODING_FIELDS, Decoding
from runner.definitions.definition import ModelDefinition
from runner.definitions.fields import BACKEND_FIELDS, BACKENDS, COMMON_FIELDS
from runner.definitions.overrides import describe
from runner.definitions.sections import Fairness, Remote, Service
from runner.definitions.settings import Settings, diff_settings, merge_settings, parse_settings, read_settings
from runner.errors import InvalidSettings, SettingsConflict
from tests.fakes.examples import examples

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


def test_no_files_at_all_give_the_defaults() -> None:
    settings = read_settings(None, None)

    assert settings == Settings()
    assert settings.decoding == Decoding(
        beam_size=1, top_k=1, top_p=1.0, temperature=0.1, repetition_penalty=1.0, max_tokens=256, stop=()
    )
    assert settings.fairness == Fairness(weights={}, soft_inflight_per_key=1, pending_per_key=32, pending_per_executor=128)
    assert settings.remote.cap_for("anyone") is None


def test_the_shipped_example_can_be_used_and_shows_every_backend() -> None:
    settings = read_settings(EXAMPLE, None)

    assert {model.backend for model in settings.models.values()} == set(BACKENDS)
    assert settings.service == Service(host="127.0.0.1", port=8090, log_level="info")
    assert settings.fairness.weights == {"community-x": 2.0, "community-y": 1.0}
    assert settings.remote.cap_for("community-x") == 50.0
    assert settings.remote.cap_for("someone else") == 10.0
    assert settings.remote.prices["frontier-large"].output_per_million == 10.0
    assert settings.models["gemma-3-12b-it-q4"] == ModelDefinition(
        model_id="gemma-3-12b-it-q4",
        backend="gguf",
        model_path="gemma-3-12b-it/gemma-3-12b-it-Q4_K_M.gguf",
        enabled=True,
        replicas=1,
        replica_max=2,
        target_inflight=4,
        options={
            "gguf_n_gpu_layers": -1,
            "gguf_n_ctx": 8192,
            "gguf_flash_attn": "auto",
            "gguf_type_k": "q8_0",
            "gguf_type_v": "q8_0",
        },
    )


def test_the_local_file_wins_key_by_key_and_leaves_the_rest(tmp_path: Path) -> None:
    base, local = tmp_path / "settings.json", tmp_path / "local.json"
    base.write_text(
        json.dumps(
            {
                "service": {"host": "0.0.0.0", "port": 1},
                "engine": {
                    "backend": "gguf",
                    "decoding": {"top_k": 5, "stop": ["a", "b"]},
                    "models": {"m": {"gguf_n_ctx": 4096, "replicas": 1}, "other": {}},
                },
            }
        )
    )
    local.write_text(
        json.dumps(
            {
                "service": {"port": 2},
                "engine": {"decoding": {"stop": []}, "models": {"m": {"gguf_n_ctx": 1}, "new": {"backend": "ct2"}}},
            }
        )
    )

    settings = read_settings(base, local)

    assert settings.service == Service(host="0.0.0.0", port=2)
    assert (settings.decoding.top_k, settings.decoding.stop) == (5, ())
    assert settings.models["m"].options == {"gguf_n_ctx": 1}
    assert {name: model.backend for name, model in settings.models.items()} == {"m": "gguf", "other": "gguf", "new": "ct2"}


def test_a_local_file_that_is_not_there_counts_as_empty_but_a_missing_base_does_not(tmp_path: Path) -> None:
    base = tmp_path / "settings.json"
    base.write_text("{}")

    assert read_settings(base, tmp_path / "local.json") == Settings()
    with pytest.raises(InvalidSettings, match=r"cannot read the settings file .*nowhere\.json: No such file"):
        read_settings(tmp_path / "nowhere.json", None)


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
        ('{"service": {', "line 1, column"),
        ('{"service": {"port": 1, "port": 2}}', "'port' is given twice"),
        ('{"engine": {"decoding": {"top_p": NaN}}}', "NaN is not a number of JSON"),
        ("[1]", "must be an object with service and engine, not a list"),
        (f'{{"service": {{"port": {"9" * 5000}}}}}', "cannot be read as JSON"),
        ('{"a":' * 100_000, "cannot be read as JSON"),
        ("\udcff", "cannot be read as JSON"),
    ],
)
def test_a_file_that_is_not_plain_json_is_refused_with_its_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(InvalidSettings, match=r"settings\.json") as caught:
        read_settings(path, None)

    assert words in caught.value.message


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(b" " * (4 * 1024 * 1024 + 1))

    with pytest.raises(InvalidSettings, match="larger than 4 MiB"):
        read_settings(path, None)


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"engin": {}}, "engin is unknown; allowed here: engine, service"),
        ({"service": {"prt": 1}}, "service.prt is unknown; allowed here: host, log_level, port"),
        ({"service": []}, "service must be an object, not a list"),
        ({"service": {"port": "80"}}, "service.port must be a whole number from 1 to 65535, or null, not a string"),
        ({"service": {"port": 70000}}, "service.port must be a whole number from 1 to 65535, or null, not a number (70000)"),
        ({"service": {"log_level": "loud"}}, "service.log_level must be one of debug, info, warning, error"),
        ({"engine": None}, "engine must be an object, not null"),
        ({"engine": {"backend": "sglang"}}, "engine.backend must be one of gguf, llama_server"),
        ({"engine": {"backend": "attached"}}, "engine.backend must be one of gguf, llama_server"),
        ({"engine": {"backend": None}}, "engine.backend must be one of"),
        ({"engine": {"decoding": {"top_q": 1}}}, "engine.decoding.top_q is unknown; allowed here: beam_size"),
        ({"engine": {"decoding": {"stop": "x"}}}, "engine.decoding.stop must be a list of at most 16 items"),
        ({"engine": {"models": {"../m": {}}}}, "engine.models: '../m' cannot be used, a name must be a model id"),
        ({"engine": {"models": {"m": 3}}}, "engine.models.m must be an object, not a number (3)"),
        ({"engine": {"models": {"m": {}}}}, "engine.models.m.backend is missing; it must be one of"),
        ({"engine": {"fairness": {"weight": {}}}}, "engine.fairness.weight is unknown"),
        (
            {"engine": {"fairness": {"weights": {"t": 0}}}},
            "engine.fairness.weights.t must be a number above 0, not a number (0)",
        ),
        ({"engine": {"fairness": {"weights": {" t": 1}}}}, "engine.fairness.weights: a tenant is named by 1 to 128"),
        ({"engine": {"fairness": {"pending_per_key": 0}}}, "engine.fairness.pending_per_key must be a whole number from 1"),
        ({"engine": {"remote": {"currency": "euro"}}}, "engine.remote.currency must be three letters such as EUR"),
        ({"engine": {"remote": {"monthly_cap": 5}}}, "engine.remote.monthly_cap must be an object"),
        ({"engine": {"remote": {"monthly_cap": {"default": -1}}}}, "engine.remote.monthly_cap.default must be a number of at"),
        ({"engine": {"remote": {"prices": {"m": {}}}}}, "engine.remote.prices.m is not the id of an openai_compatible model"),
        (
            {"engine": {"models": {"m": REMOTE}, "remote": {"prices": {"m": {"input_per_million": 1}}}}},
            "engine.remote.prices.m.output_per_million is missing",
        ),
    ],
)
def test_a_refusal_names_the_path_what_it_got_and_what_is_allowed(settings: dict[str, Any], start: str) -> None:
    assert refusal(settings).startswith(start)


def test_replicas_beyond_replica_max_are_refused_and_replica_max_follows_replicas() -> None:
    assert one({"backend": "gguf", "replicas": 3}).replica_max == 3
    assert one({"backend": "gguf"}).replica_max == 1
    assert one({"backend": "gguf", "replicas": 3, "replica_max": 3}).replicas == 3
    assert "replicas is 4, more than replica_max, which is 3" in model_refusal({
        "backend": "gguf", "replicas": 4, "replica_max": 3,
    })  # fmt: skip


def test_a_model_without_a_backend_takes_that_of_the_engine() -> None:
    assert one({}, backend="vllm").backend == "vllm"
    assert one({"backend": "ct2"}, backend="vllm").backend == "ct2"


OWN_FIELDS = [(backend, name) for backend, fields in BACKEND_FIELDS.items() for name in fields if backend != "attached"]


@pytest.mark.parametrize(("owner", "name"), OWN_FIELDS)
def test_a_field_of_another_backend_is_refused_by_naming_its_owner(owner: str, name: str) -> None:
    stranger = next(other for other in ("ct2", "gguf") if name not in BACKEND_FIELDS[other])

    words = model_refusal({"backend": stranger, name: None})

    assert words.startswith(f"engine.models.m.{name} is a field of ")
    assert owner in words
    assert f"the model's backend is {stranger}" in words


def test_an_unknown_field_is_refused_with_those_the_backend_has() -> None:
    words = model_refusal({"backend": "gguf", "gguf_ctx": 1})

    assert words.startswith("engine.models.m.gguf_ctx is unknown; a gguf model may have ")
    assert "gguf_n_ctx" in words
    assert "vllm" not in words


@pytest.mark.parametrize("backend", ["llama_server", "tabbyapi", "comfyui"])
def test_a_server_of_somebody_elses_must_have_an_address(backend: str) -> None:
    assert model_refusal({"backend": backend}).startswith("engine.models.m.server_url is missing")
    assert one({"backend": backend, "server_url": "http://127.0.0.1:1"}).options == {"server_url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("remote_base_url", "http://h:1/v1", "ftp://h/v1"), ("remote_base_url", "https://h", "https://user:pw@h/v1"),
        ("remote_base_url", "https://h/v1", "https://h/v1?key=x"), ("remote_base_url", "https://[::1]:8/v1", "https://:8/v1"),
        ("remote_base_url", "https://h/v1", "https://h:99999/v1"), ("remote_base_url", "https://h/v1", ""),
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


def test_no_text_of_a_value_is_repeated_for_it_may_be_secret() -> None:
    for fields in (
        {**REMOTE, "remote_api_key_env": SECRET},
        {**REMOTE, "remote_base_url": f"https://{SECRET}@h"},
        {**REMOTE, "remote_thinking": SECRET},
        {**REMOTE, "enabled": [SECRET]},
    ):
        words = model_refusal(fields)
        assert SECRET not in words
        assert "not a string" in words or "not a list" in words


def test_tidy_is_the_engines_own_unless_the_owner_says_it() -> None:
    assert [one({"backend": "vllm", **said}).tidy for said in ({}, {"tidy": True}, {"tidy": False}, {"tidy": None})] == [
        None,
        True,
        False,
        None,
    ]
    assert "tidy" in model_refusal({"backend": "vllm", "tidy": "yes"})


def test_surfaces_to_be_translated_are_named_by_their_words() -> None:
    assert one({"backend": "vllm", "translate": ["responses"]}).translate == ("responses",)
    assert one({"backend": "vllm"}).translate == ()
    for bad in (["chat"], ["/v1/messages"], "messages"):
        assert "messages or responses" in model_refusal({"backend": "vllm", "translate": bad})


def test_a_description_has_the_fields_of_the_settings_and_of_keys_the_variables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_API_KEY", SECRET)

    described = describe(one({**REMOTE, "remote_api_key_env": "EXAMPLE_API_KEY"}))

    assert described["model_id"] == "m"
    assert described["remote_api_key_env"] == "EXAMPLE_API_KEY"
    assert COMMON_FIELDS.keys() <= described.keys()
    assert SECRET not in json.dumps(described)


@pytest.mark.parametrize("name", list(DECODING_FIELDS))
def test_every_decoding_default_can_be_set(name: str) -> None:
    value: object = ["\n\n"] if name == "stop" else 2 if name != "top_p" else 0.5

    settings = parse_settings({"engine": {"decoding": {name: value}}})

    assert getattr(settings.decoding, name) == (("\n\n",) if name == "stop" else value)


def _settings(**models: dict[str, Any]) -> Settings:
    return parse_settings({"engine": {"backend": "gguf", "models": models}})


def test_new_settings_are_told_apart_into_added_removed_updated_and_unchanged() -> None:
    old = _settings(a={}, b={"gguf_n_ctx": 1}, c={}, d={})
    new = _settings(a={}, b={"gguf_n_ctx": 2}, e={}, d={"enabled": True})

    change = diff_settings(old, new, loaded=["a"])

    assert (change.added, change.removed, change.updated, change.unchanged) == (("e",), ("c",), ("b", "d"), ("a",))
    assert not change.service_restart_required


def test_a_change_or_removal_of_a_loaded_model_is_a_conflict_that_names_them() -> None:
    old = _settings(a={}, b={"gguf_n_ctx": 1}, c={})
    new = _settings(b={"gguf_n_ctx": 2}, c={})

    with pytest.raises(SettingsConflict) as caught:
        diff_settings(old, new, loaded=["c", "b", "a", "elsewhere"])

    assert caught.value.details == {"conflicts": ["engine.models.a", "engine.models.b"]}
    assert caught.value.code == "settings_reload_conflict"
    assert diff_settings(old, new, loaded=["c"]).updated == ("b",)


def test_another_port_asks_for_a_restart_of_the_service() -> None:
    old, new = parse_settings({"service": {"port": 1}}), parse_settings({"service": {"port": 2}})

    assert diff_settings(old, new, loaded=()).service_restart_required
    assert not diff_settings(old, old, loaded=()).service_restart_required


def test_caps_of_nothing_differ_from_no_caps() -> None:
    remote = Remote(monthly_cap=None, caps={"t": 0.0})

    assert remote.cap_for("t") == 0.0
    assert remote.cap_for("u") is None


MISPLACED: list[tuple[dict[str, object], str, str]] = [
    ({"backend": "gguf", "device": "tpu"}, "device", "must be cpu, cuda, cuda:N"),
    ({"backend": "gguf", "device": "cuda:x"}, "device", "must be cpu, cuda, cuda:N"),
    ({"backend": "gguf", "device": "cpu", "gguf_n_gpu_layers": -1}, "gguf_n_gpu_layers", "cannot be -1 with device cpu"),
    ({"backend": "exllamav3", "device": "cpu"}, "device", "runs on GPUs alone"),
    ({"backend": "tabbyapi", "server_url": "http://127.0.0.1:1", "device": "cuda"}, "device", "decided by the server"),
    ({"backend": "tgi", "tgi_launcher": "/bin/tgi", "device": "cuda:0"}, "device", "CUDA_VISIBLE_DEVICES"),
    ({"backend": "openai_compatible", "remote_base_url": "https://a.example/v1", "device": "cpu"}, "device", "decided by"),
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


@pytest.mark.parametrize("backend", ["gguf", "vllm", "ct2", "whisper"])
@pytest.mark.parametrize("device", [None, "auto", "cpu", "cuda", "cuda:0", "cuda:7"])
def test_a_device_that_acts_is_taken(backend: str, device: str | None) -> None:
    models = parse_settings({"engine": {"models": {"m": {"backend": backend, "device": device}}}}).models
    assert models["m"].device == device
