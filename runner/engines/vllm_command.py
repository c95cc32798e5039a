"""From a load plan to vLLM's command line and environment, and what its log says of the start. Nothing is started here."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from runner.definitions.plan import LoadPlan, Report
from runner.engines.process import StageLog, child_environment, gpu_environment
from runner.errors import EngineError
from runner.limits import MIB, limits

PYTHON_VARIABLE = "MUSTER_VLLM_PYTHON"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
_NO_MEDIA_DOMAIN = "none.invalid"
_OURS_ALREADY = (
    "VLLM_API_KEY",  # the socket is private; a key of the owner's would lock us out
    "VLLM_MAX_MODEL_LEN", "VLLM_GPU_MEMORY_UTILIZATION", "VLLM_ENABLE_PREFIX_CACHING",  # defaults of plans, no words of vLLM
)  # fmt: skip
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_ROOT = Path(__file__).resolve().parents[2]
_INSTALL = (
    "vLLM is not installed: install vllm into a virtual environment of its own, .venv-vllm beside this program or any other "
    f"whose python is named in {PYTHON_VARIABLE}"
)
_OPTION_FLAGS = {
    "vllm_kv_cache_dtype": "--kv-cache-dtype",
    "vllm_reasoning_parser": "--reasoning-parser",
    "vllm_max_num_batched_tokens": "--max-num-batched-tokens",
}
_SPECULATIVE_FIELDS = {
    "vllm_speculative_method": "method",
    "vllm_speculative_model": "model",
    "vllm_num_speculative_tokens": "num_speculative_tokens",
    "vllm_speculative_moe_backend": "moe_backend",
    "vllm_speculative_attention_backend": "attention_backend",
}


def find_python(root: Path = _ROOT) -> str:
    """Return the interpreter that can import vLLM. Raises EngineError that says how to get one. ``root``: of our program."""
    named = os.environ.get(PYTHON_VARIABLE, "")
    if named:
        if not os.access(named, os.X_OK):
            raise EngineError(f"{PYTHON_VARIABLE} names {named}, which cannot be run: give the python of vLLM's environment")
        return named
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    beside = root / ".venv-vllm" / "bin" / "python"
    if beside.exists():
        return str(beside)
    raise EngineError(_INSTALL)


def build_command(python: str, plan: LoadPlan, socket: Path) -> list[str]:
    return [
        python, "-m", SERVER_MODULE,
        "--model", str(model_folder(plan)),
        "--served-model-name", plan.model_id,
        "--uds", str(socket),
        "--max-num-seqs", str(plan.slots),
        "--scheduling-policy", "priority",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
        # A picture by address would have this machine fetch whatever a stranger names in its owner's network.
        f"--allowed-media-domains={_NO_MEDIA_DOMAIN}",
        *_model_flags(plan),
        *_memory_flags(plan),
        *_lora_flags(plan),
    ]  # fmt: skip


def build_environment(plan: LoadPlan) -> dict[str, str]:
    environment = child_environment() | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # without it there is no flush and no sleep
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "VLLM_LOGGING_LEVEL": "INFO",  # the progress of a load is read from these lines
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_DISABLE_LOG_LOGO": "1",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }
    environment |= gpu_environment(plan.gpu_ids, is_cpu=runs_on_cpu(plan))
    for name in _OURS_ALREADY:
        environment.pop(name, None)
    if runs_on_cpu(plan):
        # Binding threads to cores of its choice would pile up two models on the same ones.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(plan.threads)}
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only, and it would contradict our flag
    return environment


def runs_on_cpu(plan: LoadPlan) -> bool:
    return not plan.gpu_ids


def is_pooling(plan: LoadPlan) -> bool:
    """Return whether the model embeds texts instead of writing them (option ``vllm_task``: generate or embed)."""
    return plan.options.get("vllm_task") == "embed"


def caches_prefixes(plan: LoadPlan) -> bool:
    return not is_pooling(plan) and plan.options.get("vllm_enable_prefix_caching") is not False


def can_sleep(plan: LoadPlan) -> bool:
    return not runs_on_cpu(plan) and plan.options.get("vllm_enable_sleep_mode") is True  # on a CPU it frees no memory


def takes_lora(plan: LoadPlan) -> bool:
    return bool(plan.options.get("vllm_lora") or plan.options.get("vllm_max_lora_rank"))


def sees_pictures(plan: LoadPlan) -> bool:
    try:
        return "vision_config" in read_config(plan)
    except EngineError:
        return False


def model_folder(plan: LoadPlan) -> Path:
    path = plan.path
    if path is None:
        raise EngineError(f"{plan.model_id}: vLLM needs the folder of the model")
    if not (path / "config.json").is_file():
        raise EngineError(f"{path} has no config.json: vLLM needs a folder in the Hugging Face format")
    return path


def read_config(plan: LoadPlan) -> dict[str, object]:
    file = model_folder(plan) / "config.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError) as error:
        raise EngineError(f"{file} cannot be read: {error}") from None


def weights_bytes(plan: LoadPlan) -> int:
    return sum(file.stat().st_size for file in model_folder(plan).glob("*.safetensors"))


def lora_paths(plan: LoadPlan) -> dict[str, Path]:
    """Return the adapters of the option ``vllm_lora`` by name. Raises EngineError when one is not there."""
    named = plan.options.get("vllm_lora") or {}
    if not isinstance(named, dict):
        raise EngineError("vllm_lora must map names to folders of adapters")
    found = {str(name): Path(str(path)) for name, path in named.items()}
    for name, path in found.items():
        if not (path / "adapter_config.json").is_file():
            raise EngineError(f"vllm_lora {name}: {path} has no adapter_config.json")
    return found


def _model_flags(plan: LoadPlan) -> Iterator[str]:
    options = plan.options
    context = plan.context_tokens or options.get("vllm_max_model_len")
    if context:
        yield from ("--max-model-len", str(context))
    if len(plan.gpu_ids) > 1 or plan.cluster is not None:
        yield from ("--tensor-parallel-size", str(len(plan.gpu_ids)))
    if plan.cluster is not None:  # tensor parallel within a node, pipeline parallel over nodes
        yield from ("--pipeline-parallel-size", str(plan.nodes), "--distributed-executor-backend", "ray")
    if is_pooling(plan):
        yield from ("--runner", "pooling", "--convert", "embed")
    yield "--enable-prefix-caching" if caches_prefixes(plan) else "--no-enable-prefix-caching"
    if runs_on_cpu(plan) or options.get("vllm_enforce_eager") is True:
        yield "--enforce-eager"
    if can_sleep(plan):
        yield "--enable-sleep-mode"
    # A quantised folder says so itself, and vLLM then picks the fastest kernel for it.
    if plan.quantization and "quantization_config" not in read_config(plan):
        yield from ("--quantization", plan.quantization)
    for option, flag in _OPTION_FLAGS.items():
        if options.get(option) is not None:
            yield from (flag, str(options[option]))
    yield from _chat_flags(plan)
    if options.get("vllm_max_pixels"):
        yield from ("--mm-processor-kwargs", _json({"max_pixels": options["vllm_max_pixels"]}))
    speculative = {field: options[name] for name, field in _SPECULATIVE_FIELDS.items() if options.get(name) is not None}
    if speculative:
        yield from ("--speculative-config", _json(speculative))


def _chat_flags(plan: LoadPlan) -> Iterator[str]:
    parser, thinking = plan.options.get("vllm_tool_call_parser"), plan.options.get("enable_thinking")
    if parser:
        yield from ("--enable-auto-tool-choice", "--tool-call-parser", str(parser))
    if thinking is not None and not is_pooling(plan):  # of every dialect, where a request says nothing
        yield from ("--default-chat-template-kwargs", _json({"enable_thinking": thinking}))


def _memory_flags(plan: LoadPlan) -> Iterator[str]:
    share = plan.options.get("vllm_gpu_memory_utilization")
    kv_bytes = plan.options.get("vllm_kv_cache_memory_bytes") or _kv_bytes_of_budget(plan)
    if kv_bytes is None and runs_on_cpu(plan):
        kv_bytes = limits().engines.vllm_cpu_kv_bytes
    if kv_bytes is not None:
        yield from ("--kv-cache-memory-bytes", str(kv_bytes))
        # Next to a size in bytes the share only serves a check that would refuse a card which others use as well.
        share = share if share is not None or runs_on_cpu(plan) else 0.05
    if share is not None:
        yield from ("--gpu-memory-utilization", str(share))


def _kv_bytes_of_budget(plan: LoadPlan) -> int | None:
    if plan.memory_budget_mb is None:
        return None
    needed = -(-weights_bytes(plan) // plan.nodes) + limits().engines.vllm_overhead_bytes * max(1, len(plan.gpu_ids))
    left = plan.memory_budget_mb * MIB - needed
    if left <= 0:
        raise EngineError(
            f"a budget of {plan.memory_budget_mb} MB leaves nothing for the KV cache: the weights and vLLM itself need "
            f"{needed // MIB} MB. Give more, or another quantisation"
        )
    return left // max(1, len(plan.gpu_ids))


def _lora_flags(plan: LoadPlan) -> Iterator[str]:
    adapters = lora_paths(plan)
    if not takes_lora(plan):
        return
    yield "--enable-lora"
    yield from ("--max-lora-rank", str(_fitting_rank(plan, adapters)))
    yield from ("--max-loras", str(max(1, min(len(adapters), plan.slots))))
    if adapters:
        yield "--lora-modules"
        yield from (_json({"name": name, "path": str(path)}) for name, path in adapters.items())


def _fitting_rank(plan: LoadPlan, adapters: dict[str, Path]) -> int:
    wanted = plan.options.get("vllm_max_lora_rank")
    highest = wanted if isinstance(wanted, int) else 1
    for name, path in adapters.items():
        try:
            highest = max(highest, msgspec.json.decode((path / "adapter_config.json").read_bytes(), type=_AdapterConfig).r)
        except (OSError, msgspec.DecodeError) as error:
            raise EngineError(f"vllm_lora {name}: its adapter_config.json cannot be read: {error}") from None
    fitting = next((rank for rank in _LORA_RANKS if rank >= highest), None)
    if fitting is None:
        raise EngineError(f"vLLM takes adapters up to rank {_LORA_RANKS[-1]}, not {highest}")
    return fitting


class _AdapterConfig(msgspec.Struct):
    r: int


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


# ---- the log of a start; versions 0.11 to 0.33 are known, and a line that is not costs progress and never a load ----

_CACHE_HINT = " (here: vllm_kv_cache_memory_bytes or the memory budget, or a shorter context)"
_WEIGHTS_BEGIN, _WEIGHTS_END = 0.2, 0.7
_GRAPHS_BEGIN, _GRAPHS_END = 0.8, 0.95

_STAGES: tuple[tuple[str, str, float], ...] = (
    ("Resolved architecture", "reading the model's configuration", 0.05),
    ("Initializing a V1 LLM engine", "starting the engine process", 0.1),
    ("Starting to load model", "loading weights", _WEIGHTS_BEGIN),
    ("Loading weights took", "weights loaded", _WEIGHTS_END),
    ("Dynamo bytecode transform", "compiling", 0.72),
    ("torch.compile takes", "compiled", 0.76),
    ("KV cache size:", "setting up the KV cache", _GRAPHS_BEGIN),
    ("Graph capturing finished", "graphs captured", _GRAPHS_END),
    ("init engine (profile", "engine ready", 0.96),
    ("Starting vLLM", "opening the API", 0.98),
)
_SHARDS = re.compile(r"Loading \S+ checkpoint shards:.*?(\d+)/(\d+)")
_GRAPHS = re.compile(r"Capturing (?:CUDA|cuda) graphs?.*?(\d+)/(\d+)")
_WEIGHTS_SIZE = re.compile(r"[Mm]odel loading took ([\d.]+) Gi?B")
_KV_SIZE = re.compile(r"Available KV cache memory: ([\d.]+) GiB")


class StartupLog:
    """Fed with the lines of one start. ``weights_bytes`` and ``kv_bytes`` are what vLLM said it took, None = not said."""

    def __init__(self, report: Report) -> None:
        self._stages = StageLog(report, _STAGES)
        self.weights_bytes: int | None = None
        self.kv_bytes: int | None = None

    def feed(self, line: str) -> None:
        self._stages.feed(line)
        self._note_sizes(line)
        if match := _SHARDS.search(line):
            self._advance(f"loading weights ({match[1]} of {match[2]} files)", match, _WEIGHTS_BEGIN, _WEIGHTS_END)
        elif match := _GRAPHS.search(line):
            self._advance(f"capturing graphs ({match[1]} of {match[2]})", match, _GRAPHS_BEGIN, _GRAPHS_END)

    def failure(self, last_lines: str = "") -> str:
        reason = self._stages.failure(last_lines)
        return reason + _CACHE_HINT if "cache blocks" in reason or "KV cache" in reason else reason

    def _advance(self, stage: str, match: re.Match[str], begin: float, end: float) -> None:
        done, of = int(match[1]), int(match[2])
        self._stages.tell(stage, begin + (end - begin) * (done / of if of else 0.0))

    def _note_sizes(self, line: str) -> None:
        if match := _WEIGHTS_SIZE.search(line):
            self.weights_bytes = _add(self.weights_bytes, match)
        elif match := _KV_SIZE.search(line):
            self.kv_bytes = _add(self.kv_bytes, match)


def _add(sum_so_far: int | None, match: re.Match[str]) -> int:
    return (sum_so_far or 0) + int(float(match[1]) * 1024**3)
