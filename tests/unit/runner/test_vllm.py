"""vLLM: its command and environment, the salts of its cache, and what its start says."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from runner.definitions.plan import LoadPlan
from runner.engines.port import COMPLETIONS, Call, FlushRequest, FlushScope, Progress
from runner.engines.vllm import command
from runner.engines.vllm.command import PYTHON_VARIABLE, build_command, build_environment
from runner.engines.vllm.salts import Salts, seal_body
from runner.engines.vllm.startup import StartupLog
from runner.errors import EngineError, InvalidRequest
from runner.limits import MIB, limits
from tests.fakes.limits import set_runner_limits

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
    for option, given, flag, expected in (
        ("vllm_kv_cache_memory_bytes", 268435456, "--kv-cache-memory-bytes", "268435456"),
        ("vllm_gpu_memory_utilization", 0.5, "--gpu-memory-utilization", "0.5"), ("vllm_task", "embed", "--runner", "pooling"),
        ("vllm_kv_cache_dtype", "fp8", "--kv-cache-dtype", "fp8"), ("vllm_max_model_len", 512, "--max-model-len", "512"),
        ("vllm_max_pixels", 200704, "--mm-processor-kwargs", '{"max_pixels":200704}'),
        ("vllm_tool_call_parser", "hermes", "--tool-call-parser", "hermes"),
        ("vllm_max_lora_rank", 12, "--max-lora-rank", "16"),
    ):  # fmt: skip
        assert value(flags(plan_for(model, gpu_ids=(0,), options={option: given})), flag) == expected
    options = {"vllm_speculative_method": "ngram", "vllm_num_speculative_tokens": 4, "vllm_enable_prefix_caching": False}
    words = flags(plan_for(model, options=options))
    assert json.loads(value(words, "--speculative-config")) == {"method": "ngram", "num_speculative_tokens": 4}
    assert ("--no-enable-prefix-caching" in words, "--enable-prefix-caching" in words) == (True, False)
    plan = LoadPlan("m", "vllm", model, quantization="awq")
    assert value(flags(plan), "--quantization") == "awq"
    (model / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert "--quantization" not in flags(plan), "the model says it itself"


def test_adapters_are_named_with_a_rank_that_holds_them_all(model: Path, tmp_path: Path) -> None:
    for name, rank in (("a", 4), ("b", 24)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
    words = flags(plan_for(model, options={"vllm_lora": {name: str(tmp_path / name) for name in "ab"}}))
    assert (value(words, "--max-lora-rank"), value(words, "--max-loras")) == ("32", "2")
    at = words.index("--lora-modules")
    assert [json.loads(word)["name"] for word in words[at + 1 : at + 3]] == ["a", "b"]


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
    assert build_environment(plan_for(model, gpu_ids=(1, 3)))["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_without_vllm_the_error_says_where_to_put_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    with pytest.raises(EngineError, match=rf"not installed: .*\.venv-vllm .*{PYTHON_VARIABLE}"):
        command.find_python(tmp_path)
    beside = tmp_path / ".venv-vllm" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.touch()
    assert command.find_python(tmp_path) == str(beside)
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    assert command.find_python(tmp_path) == sys.executable, "a named one wins"


def test_thinking_is_a_default_of_the_chat_template(model: Path) -> None:
    for options, given in (
        ({}, None), ({"enable_thinking": False}, '{"enable_thinking":false}'),
        ({"enable_thinking": True}, '{"enable_thinking":true}'), ({"enable_thinking": True, "vllm_task": "embed"}, None),
    ):  # fmt: skip
        words, flag = flags(plan_for(model, options=options)), "--default-chat-template-kwargs"
        assert (value(words, flag) if flag in words else None) == given


ALPHA = Call("POST", COMPLETIONS, {}, b"{}", tenant="alpha")


def test_other_tenants_tags_and_processes_have_other_salts() -> None:
    salts = Salts()
    calls = [
        ALPHA, replace(ALPHA, tenant="beta"), replace(ALPHA, cache_tag="t"), replace(ALPHA, tenant="alphat"),
        replace(ALPHA, tenant="alph", cache_tag="at"), replace(ALPHA, tenant='alpha","'),
    ]  # fmt: skip
    found = [salts.salt_for(call) for call in calls] + [Salts().salt_for(ALPHA)]
    assert all(first != second for first, second in combinations(found, 2))
    assert salts.salt_for(replace(ALPHA, body=b'{"other":1}')) == found[0], "a tenant and tag keep their own"
    private = replace(ALPHA, cache_mode="none")
    assert len({salts.salt_for(private), salts.salt_for(private), found[0]}) == 3, "nothing is to be reused"


@pytest.mark.parametrize(
    ("request_", "changed"),
    [
        (FlushRequest(FlushScope.ALL), {"alpha", "alpha t", "beta t"}),
        (FlushRequest(FlushScope.MODEL), {"alpha", "alpha t", "beta t"}),
        (FlushRequest(FlushScope.TENANT, tenant="alpha"), {"alpha", "alpha t"}),
        (FlushRequest(FlushScope.TAG, tag="t"), {"alpha t", "beta t"}),
        (FlushRequest(FlushScope.TAG, tenant="alpha", tag="t"), {"alpha t"}),
    ],
)
def test_a_flush_changes_the_salts_it_names_and_no_others(request_: FlushRequest, changed: set[str]) -> None:
    salts = Salts()
    calls = {"alpha": ALPHA, "alpha t": replace(ALPHA, cache_tag="t"), "beta t": replace(ALPHA, tenant="beta", cache_tag="t")}
    before = {name: salts.salt_for(call) for name, call in calls.items()}
    salts.forget(request_)
    assert {name for name, call in calls.items() if salts.salt_for(call) != before[name]} == changed


def test_memory_of_flushes_is_bounded_and_its_end_brings_no_salt_back() -> None:
    set_runner_limits(engines={"vllm_epochs": 3})
    salts, seen = Salts(), set()
    for round_ in range(10):
        seen.add(salts.salt_for(ALPHA))
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


GIB = 1024**3


def read(*lines: str) -> tuple[StartupLog, list[Progress]]:
    told: list[Progress] = []
    log = StartupLog(told.append)
    for line in lines:
        log.feed(line)
    return log, told


def test_the_share_moves_through_the_shards_and_never_back_and_sizes_are_those_of_all_gpus() -> None:
    _, told = read(
        "(Worker pid=1) INFO 11-21 19:16:38 [cpu_model_runner.py:68] Starting to load model /m...",
        "\rLoading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]",
        "\rLoading safetensors checkpoint shards:  50% Completed | 2/4 [00:10<00:10,  5.1s/it]",
        "(Worker pid=1) INFO 11-21 19:16:38 [default_loader.py:501] Loading weights took 20.01 seconds",
    )
    assert [(progress.stage, progress.fraction) for progress in told] == [
        ("loading weights", 0.2), ("loading weights (2 of 4 files)", 0.45), ("weights loaded", 0.7),
    ]  # fmt: skip
    _, told = read(
        "init engine (profile, create kv cache) took 1 s", "Resolved architecture: Llama", "Starting to load model x"
    )
    assert [progress.fraction for progress in told] == [0.96]
    start = "INFO 11-21 19:16:38 [gpu_model_runner.py:5150]"
    log, _ = read(
        *(f"(Worker_TP{gpu} pid=1) {start} Model loading took 7.5 GiB memory and 3.1 seconds" for gpu in range(2)),
        "(Worker_TP0 pid=1) INFO 11-21 19:16:38 [gpu_worker.py:760] Available KV cache memory: 12.25 GiB",
    )
    assert (log.weights_bytes, log.kv_bytes) == (15 * GIB, int(12.25 * GIB))


GENERIC = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["(EngineCore pid=7) ERROR 11-21 19:00:00 [core.py:9] ValueError: the cause", GENERIC], "ValueError: the cause"),
        (
            ["(EngineCore pid=7) torch.OutOfMemoryError: CUDA out of memory", GENERIC],
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        (["api_server.py: error: unrecognized arguments: --x"], "api_server.py: error: unrecognized arguments: --x"),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, Unknown quantization method: x. [type=value_error, input_value=ArgsKwargs]",
            ],
            "Unknown quantization method: x.",
        ),
        ([GENERIC], GENERIC),
        (["INFO: nothing wrong", "KeyErrors are counted: 0"], ""),
    ],
)
def test_the_reason_of_a_failure_is_its_cause(lines: list[str], expected: str) -> None:
    assert read(*lines)[0].failure() == expected
