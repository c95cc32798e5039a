"""The adapters of engines that we start (on tiny models, stand-ins and contract servers), and what the suite asks of them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import wave
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import LoadPlan
from runner.engines.http_engine import HttpEngine, ServerProcess
from runner.engines.library import make_ct2, make_exllamav3, make_whisper
from runner.engines.llama import LlamaChildProbe, make_llamacpp
from runner.engines.llama_slots import LlamaSlots
from runner.engines.port import TRANSCRIPTIONS, Call, FlushResult
from runner.engines.tgi import free_ports, make_tgi
from runner.engines.vllm import VllmProbe, make_vllm
from runner.engines.vllm_command import PYTHON_VARIABLE
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chatting, environment, openai_cached_tokens
from tests.fakes.models.make import ct2_model_dir, hf_model_dir, speech_wav, whisper_dir

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
QUESTION = "Explain the lambda expression of Python, its syntax, and what people use it for, in a few plain sentences."
PAGES_QUESTION = "Explain the lambda expression of Python, its syntax, and what people use it for. " * 8
"""More than two pages of ExLlamaV3's 256 tokens, which are characters there."""
BLOCKS_QUESTION = "What is a lambda? " * 12
ENDLESS: dict[str, Any] = {"stream": True, "ignore_eos": True, "max_tokens": 100_000, "n_probs": 1000}
"""Any: keywords. Probabilities of the whole vocabulary with every token slow the tiny model down to seconds per context."""
LONG_CONTEXT_TOKENS = 200_000
"""Far more than the model was trained for; CTranslate2 computes it, and the answer lasts for minutes."""
BORDER = "part-of-a-test"
SHARD_CAUSE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
CORE_CAUSE = "ValueError: shape mismatch in model.embed_tokens.weight"


def folder_of(engine: HttpEngine) -> Path | None:
    """Return the private folder of an engine's server."""
    assert isinstance(engine.loader, ServerProcess)
    return engine.loader.folder


def slots_of(engine: HttpEngine) -> LlamaSlots:
    assert isinstance(engine.probe, LlamaChildProbe)
    return engine.probe.slots


def vllm_of(engine: HttpEngine) -> VllmProbe:
    assert isinstance(engine.probe, VllmProbe)
    return engine.probe


def halve(model: Path, broken: Path, size: int) -> Path:
    shutil.copytree(model, broken)
    (broken / "model.bin").write_bytes((model / "model.bin").read_bytes()[:size])
    return broken


def write_program(path: Path, contract: str) -> str:
    program = HERE / "programs" / contract
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "{program}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def build_driver(folder: Path, *defines: str) -> Path:
    """Build the driver library of NVIDIA with two GPUs in it, and return the folder, which LD_LIBRARY_PATH may name."""
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", *(f"-D{define}" for define in defines)]
    source = HERE / "programs" / "fake_nvml.c"
    subprocess.run(["cc", *flags, "-o", folder / "libnvidia-ml.so.1", source], check=True, timeout=60)
    return folder


# ---- llama.cpp in a child, with the shipped tiny model ----


def tiny_plan(path: Path = TINY_MODEL_PATH, *, slots: int = 2, options: dict[str, object] | None = None) -> LoadPlan:
    return LoadPlan("tiny", "gguf", path, context_tokens=2048, slots=slots, threads=1, options=options or {})


@contextlib.asynccontextmanager
async def open_llamacpp(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    broken = folder / "half.gguf"
    broken.write_bytes(TINY_MODEL_PATH.read_bytes()[:600_000])
    yield chatting(
        make_llamacpp, client, tiny_plan(), tiny_plan(broken), "is not within the file bounds",
        text=QUESTION, long=ENDLESS, cached=openai_cached_tokens,
    )  # fmt: skip


# ---- CTranslate2 and faster-whisper in children; whisper's made-up weights say the same for every sound ----


def ct2_plan(path: Path | None = None, *, slots: int = 2, context_tokens: int | None = None) -> LoadPlan:
    return LoadPlan("tiny", "ct2", path or ct2_model_dir(), context_tokens=context_tokens, slots=slots, threads=2)


@contextlib.asynccontextmanager
async def open_ct2(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    broken = ct2_plan(halve(ct2_model_dir(), folder / "half", 400_000))
    yield chatting(
        make_ct2, client, ct2_plan(context_tokens=LONG_CONTEXT_TOKENS), broken,
        "^half cannot be loaded: .*invalid payload size", text=QUESTION, flushes=frozenset({FlushResult.NOTHING_KEPT}),
    )  # fmt: skip


def whisper_plan(path: Path | None = None, **options: object) -> LoadPlan:
    return LoadPlan("tiny-whisper", "whisper", path or whisper_dir(), slots=2, threads=2, options=options)


def audio_call(audio: bytes | None, *, path: str = TRANSCRIPTIONS, **fields: str | list[str]) -> Call:
    """Return a multipart request with ``audio`` as its file; a list is a field that comes several times, under ``name[]``."""
    body = io.BytesIO()
    for name, value in fields.items():
        for one in [value] if isinstance(value, str) else value:
            title = name if isinstance(value, str) else f"{name}[]"
            body.write(f'--{BORDER}\r\nContent-Disposition: form-data; name="{title}"\r\n\r\n{one}\r\n'.encode())
    if audio is not None:
        head = f'--{BORDER}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        body.write(head.encode() + audio + b"\r\n")
    body.write(f"--{BORDER}--\r\n".encode())
    return Call("POST", path, {"content-type": f"multipart/form-data; boundary={BORDER}"}, body.getvalue())


@cache
def long_wav() -> bytes:
    """Return half an hour of sound, four kilobytes a second: dozens of windows of work."""
    with wave.open(str(speech_wav())) as file:
        samples = file.readframes(file.getnframes())
    quarter = bytes((sample + 128) & 0xFF for sample in samples[1::8])  # every fourth sample, its upper byte
    second = quarter[: len(quarter) // 12 * 12]
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setparams((1, 1, 4000, 0, "NONE", ""))
        file.writeframes(second * (1800 * 4000 // len(second)))
    return target.getvalue()


@contextlib.asynccontextmanager
async def open_whisper(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    broken = whisper_plan(halve(whisper_dir(), folder / "half", 200_000))
    audio = speech_wav().read_bytes()
    yield EngineUnderTest(
        engine=make_whisper(whisper_plan(), client), call=audio_call(audio, language="en"),
        streamed=audio_call(audio, language="en", stream="true"), long=audio_call(long_wav(), language="en", stream="true"),
        broken=make_whisper(broken, client), broken_words="^half cannot be loaded: .*invalid payload size",
        flushes=frozenset({FlushResult.NOTHING_KEPT}),
    )  # fmt: skip


# ---- ExLlamaV3's child over a stand-in for the library, which needs a GPU ----


def fake_library() -> contextlib.AbstractContextManager[None]:
    return environment(PYTHONPATH=os.pathsep.join(filter(None, [str(HERE / "packages"), os.environ.get("PYTHONPATH")])))


def exllama_plan(folder: Path, *, slots: int = 2, fake: dict[str, object] | None = None, **options: object) -> LoadPlan:
    """Return a plan for a model folder made in ``folder``; ``fake`` is how the stand-in behaves."""
    shutil.copytree(hf_model_dir(), folder, dirs_exist_ok=True)
    (folder / "fake.json").write_text(json.dumps(fake or {}), encoding="utf-8")
    options = {"exllama_cache_size": 262_144, **options}
    return LoadPlan("tiny", "exllamav3", folder, context_tokens=131_072, slots=slots, threads=1, options=options)


@contextlib.asynccontextmanager
async def open_exllamav3(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    plan = exllama_plan(folder / "good", fake={"module_s": 0.02})
    with fake_library():
        yield chatting(
            make_exllamav3, client, plan, exllama_plan(folder / "bad", fake={"refuses": "CUDA out of memory"}),
            "^CUDA out of memory", text=PAGES_QUESTION, long={"ignore_eos": True}, cached=openai_cached_tokens,
            flushes=frozenset({FlushResult.RELOADED}),
        )  # fmt: skip


# ---- TGI and vLLM over contract servers of ours; tests/rings/vllm runs the same checks on the real one ----


def launched_plan(folder: Path, **faults: object) -> LoadPlan:
    """Return a plan that starts the launcher, on a model folder on which the contract server does what ``faults`` say."""
    model = folder / "model"
    model.mkdir(exist_ok=True, parents=True)
    (model / "contract.json").write_text(json.dumps(faults))
    options: dict[str, object] = {"tgi_launcher": write_program(folder / "text-generation-launcher", "tgi_contract.py")}
    return LoadPlan("tiny", "tgi", model, context_tokens=1024, slots=2, options=options)


@contextlib.asynccontextmanager
async def foreign_server(model_id: str, *flags: str, key: str = "") -> AsyncIterator[str]:
    port, server = free_ports(1)[0], str(HERE / "programs" / "tgi_contract.py")
    command = [sys.executable, server, "--hostname", "127.0.0.1", "--port", str(port), "--model-id", model_id, *flags]
    env = {**os.environ, "API_KEY": key, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    shards: list[psutil.Process] = []
    try:
        async with asyncio.timeout(30):
            while b"Connected" not in await process.stdout.readline():
                assert process.returncode is None
        shards = psutil.Process(process.pid).children()
        yield f"http://127.0.0.1:{port}"
    finally:
        for shard in shards:
            shard.kill()
        process.kill()
        await process.wait()


def foreign_plan(url: str, **options: object) -> LoadPlan:
    return LoadPlan("tiny", "tgi", options={"server_url": url, **options})


@contextlib.asynccontextmanager
async def open_tgi(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    yield chatting(
        make_tgi, client, launched_plan(folder), launched_plan(folder / "broken", fail=SHARD_CAUSE), "CUDA out of memory",
        text=QUESTION, flushes=frozenset({FlushResult.NOTHING_KEPT}),
    )  # fmt: skip


@contextlib.contextmanager
def contract_python(folder: Path) -> Iterator[None]:
    """Have the adapter find a python whose ``-m vllm…`` is the contract server."""
    with environment(**{PYTHON_VARIABLE: write_contract_python(folder)}):
        yield


def write_contract_python(folder: Path) -> str:
    """Return such a python, with a ``ray`` beside it."""
    write_program(folder / "ray", "ray_contract.py")
    return write_program(folder / "python-of-vllm", "vllm_contract.py")


def contract_model(folder: Path, **faults: object) -> Path:
    """Return a model folder that the contract server accepts, or fails on as ``faults`` say."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(b"\0" * 1000)
    (folder / "contract.json").write_text(json.dumps(faults))
    return folder


def contract_plan(
    model: Path, *, slots: int = 2, gpu_ids: tuple[int, ...] = (), options: Mapping[str, object] | None = None
) -> LoadPlan:
    return LoadPlan("tiny", "vllm", model, context_tokens=512, slots=slots, gpu_ids=gpu_ids, options=options or {})


@contextlib.asynccontextmanager
async def open_vllm(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    plan, broken = (contract_plan(contract_model(folder / name, **faults)) for name, faults in MODELS_OF_VLLM.items())
    with contract_python(folder):
        yield chatting(
            make_vllm, client, plan, broken, "shape mismatch in model.embed_tokens.weight",
            text=BLOCKS_QUESTION, cached=openai_cached_tokens,
        )  # fmt: skip


MODELS_OF_VLLM: dict[str, dict[str, object]] = {"model": {}, "broken": {"fail": CORE_CAUSE}}
CASES = [
    EngineCase("llamacpp", open_llamacpp), EngineCase("ct2", open_ct2), EngineCase("whisper", open_whisper),
    EngineCase("exllamav3", open_exllamav3), EngineCase("tgi-contract", open_tgi), EngineCase("vllm-contract", open_vllm),
]  # fmt: skip
