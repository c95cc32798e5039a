"""Options: flags over environment over defaults, and one clear line for every value that cannot be used."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from runner.config import ApiConfig, BackendConfig, LlamaConfig, normalise_gateway, read_config, settle_api
from runner.errors import ConfigError
from runner.limits import Limits
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
        (ALONE, {"LLM_POOL_SETTINGS_PATH": "/does/not/exist.json"}, "LLM_POOL_SETTINGS_PATH"),
        (ALONE, {"MUSTER_LOG_LEVEL": "verbose"}, "MUSTER_LOG_LEVEL.* must be one of trace, debug, .*, not 'verbose'"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_used_are_named(options: list[str], env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(options, env)


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
    assert (config.log_level, config.log_json) == ("debug", True)


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
