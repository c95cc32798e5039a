"""Options: flags over environment over defaults, and one clear line for every value that cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.config import TINY_MODEL_PATH, BackendConfig, LlamaConfig, normalise_gateway, read_config
from runner.errors import ConfigError

MINIMAL = ["--gateway", "http://127.0.0.1:8080", "--token", "msw_x"]


def test_the_default_is_the_shipped_tiny_model() -> None:
    config = read_config(MINIMAL, {})
    assert isinstance(config.engine, LlamaConfig)
    assert (config.engine.model_path, config.engine.model_name) == (TINY_MODEL_PATH.resolve(), "muster-tiny")
    assert (config.provider, config.max_concurrent, config.log_level) == ("local", 4, "info")
    assert TINY_MODEL_PATH.stat().st_size <= 1_100_000


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


def test_a_backend_url_may_end_in_v1() -> None:
    config = read_config([*MINIMAL, "--backend", "http://127.0.0.1:11434/v1/", "--models", "a, b", "--models", "b,*"], {})
    assert config.engine == BackendConfig(url="http://127.0.0.1:11434", models=("a", "b"))


def test_a_model_file_of_ones_own_is_named_after_itself(tmp_path: Path) -> None:
    model = tmp_path / "small-q4.gguf"
    model.write_bytes(b"GGUF")
    config = read_config([*MINIMAL, "--model-path", str(model), "--context", "4096", "--threads", "3"], {})
    assert config.engine == LlamaConfig(model_path=model, model_name="small-q4", context_tokens=4096, threads=3)


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://h:1", "ws://h:1"),
        ("https://h/prefix/", "wss://h/prefix"),
        ("ws://h", "ws://h"),
        (" wss://[::1]:9 ", "wss://[::1]:9"),
    ],
)
def test_gateway_addresses_are_normalised(url: str, normal: str) -> None:
    assert normalise_gateway(url) == normal


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--token", "x"], "no gateway"),
        (["--gateway", "http://h"], "no credential"),
        (["--gateway", "127.0.0.1:8080", "--token", "x"], "--gateway must look like"),
        (["--gateway", "http://h:99999", "--token", "x"], "--gateway must look like"),
        (["--gateway", "http://u:p@h", "--token", "x"], "user name or password"),
        (["--gateway", "http://h", "--token", "bad token"], "--token holds characters"),
        ([*MINIMAL, "--max-concurrent", "0"], "--max-concurrent must be a whole number from 1"),
        ([*MINIMAL, "--max-concurrent", "many"], "not 'many'"),
        ([*MINIMAL, "--log-level", "loud"], "--log-level must be one of"),
        ([*MINIMAL, "--engine", "vllm"], "--engine must be llamacpp"),
        ([*MINIMAL, "--model-path", "/nowhere.gguf"], "there is no file /nowhere.gguf"),
        ([*MINIMAL, "--backend", "ftp://h"], "--backend must look like"),
        (["--gateway", "http://h", "--token-file", "/nowhere"], "cannot read the token"),
    ],
)
def test_values_that_cannot_be_used_are_named(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(options, {})


def test_seconds_in_the_environment_are_checked() -> None:
    with pytest.raises(ConfigError, match="MUSTER_RECONNECT_MAX_S must be a number of seconds"):
        read_config(MINIMAL, {"MUSTER_RECONNECT_MAX_S": "soon"})


def test_the_program_prints_one_line_and_exits_with_2() -> None:
    command = [sys.executable, "-m", "runner", "--gateway", "nonsense", "--token", "msw_x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("runner: --gateway must look like")


def test_help_names_the_owners_signals() -> None:
    done = subprocess.run([sys.executable, "-m", "runner", "--help"], capture_output=True, text=True, check=True, timeout=30)
    assert "SIGUSR1 takes the box back" in done.stdout
    assert "MUSTER_TOKEN_FILE" in done.stdout
