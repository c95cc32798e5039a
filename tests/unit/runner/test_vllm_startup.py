"""What is read from vLLM's log. The lines were printed by 0.32."""

from __future__ import annotations

import pytest

from runner.engines.port import Progress
from runner.engines.vllm.startup import StartupLog

GIB = 1024**3


def read(*lines: str) -> tuple[StartupLog, list[Progress]]:
    told: list[Progress] = []
    log = StartupLog(told.append)
    for line in lines:
        log.feed(line)
    return log, told


def test_shards_move_the_share_through_the_weights() -> None:
    _, told = read(
        "(Worker pid=1) INFO 11-21 19:16:38 [cpu_model_runner.py:68] Starting to load model /m...",
        "\rLoading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]",
        "\rLoading safetensors checkpoint shards:  50% Completed | 2/4 [00:10<00:10,  5.1s/it]",
        "(Worker pid=1) INFO 11-21 19:16:38 [default_loader.py:501] Loading weights took 20.01 seconds",
    )
    assert [(progress.stage, progress.fraction) for progress in told] == [
        ("loading weights", 0.2),
        ("loading weights (2 of 4 files)", 0.45),
        ("weights loaded", 0.7),
    ]


def test_the_share_never_goes_back() -> None:
    _, told = read(
        "init engine (profile, create kv cache) took 1 s", "Resolved architecture: Llama", "Starting to load model x"
    )
    assert [progress.fraction for progress in told] == [0.96]


def test_sizes_are_those_of_all_gpus_together() -> None:
    log, _ = read(
        "(Worker_TP0 pid=1) INFO 11-21 19:16:38 [gpu_model_runner.py:5150] Model loading took 7.5 GiB memory and 3.1 seconds",
        "(Worker_TP1 pid=2) INFO 11-21 19:16:38 [gpu_model_runner.py:5150] Model loading took 7.5 GiB memory and 3.1 seconds",
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
