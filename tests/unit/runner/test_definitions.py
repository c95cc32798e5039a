"""Settings files: what is read, what is merged, what is refused and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.definitions.decoding import DECODING_FIELDS
from runner.definitions.definition import ModelDefinition
from runner.definitions.fields import BACKEND_FIELDS, BACKENDS, COMMON_FIELDS
from runner.definitions.overrides import describe
from runner.definitions.sections import Remote, Service
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
    for owner, fields in BACKEND_FIELDS.items():
        for name in fields if owner != "attached" else ():
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
