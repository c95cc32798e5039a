"""The process that holds an ExLlamaV3 model: ``python -m runner.engines.children.exllamav3 PARENT_PID``.

Settings: folder, model_name, key, slots, gpu_ids, context_tokens (0 = the model's own), cache_size, k_bits, v_bits (0 = not
quantised), tensor_parallel, tp_backend, gpu_split, max_batch_size, max_chunk_size, max_q_size, max_rq_tokens.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.engines.children import Parent, Settings, import_engine, run_child
from runner.engines.children.textserver import Prompt, Sampling, Step, read_json, serve_text, special_tokens
from runner.limits import limits

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Request:
    """One generation. ``steps`` gets Steps, an error, or None once it was cancelled."""

    prompt: Prompt
    sampling: Sampling
    scope: str
    steps: queue.SimpleQueue[Step | RuntimeError | None] = field(default_factory=queue.SimpleQueue)
    job: Any = None  # Any: an exllamav3.Job
    counted: int = 0


class ExLlamaModel:
    """A loaded model and the thread that alone touches its generator."""

    def __init__(self, library: Any, parts: _Parts, folder: Path, settings: Settings) -> None:  # Any: untyped
        self._library = library
        self._parts = parts
        self._settings = settings
        self.specials = special_tokens(read_json(folder / "tokenizer_config.json"))
        self.context_tokens: int = min(settings["context_tokens"] or parts.own_context, settings["cache_size"])
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[_Request] = deque()
        self._active: dict[int, _Request] = {}
        self._serials = itertools.count()
        self._scope = ""
        self._numbers: dict[str, int] = {}
        self._ends = False
        self._generator = self._make_generator()
        self._thread = threading.Thread(target=self._loop, name="generator", daemon=True)
        self._thread.start()

    def tokenise(self, text: str) -> Prompt:
        """Return the tokens as a tensor of shape (1, count)."""
        ids = self._parts.tokenizer.encode(text, add_bos=False, encode_special_tokens=True)
        return Prompt(int(ids.shape[-1]), ids)

    def generate(self, prompt: Prompt, sampling: Sampling) -> Generator[Step, None, None]:
        """Yield steps that the generator's thread makes. Closing it cancels the job, and waits until that is done."""
        request = _Request(prompt, sampling, sampling.scope or f"alone-{next(self._serials)}")
        self._commands.put(lambda: self._waiting.append(request))
        ended, poll_s = False, limits().children.step_poll_s
        try:
            while not ended:
                try:
                    step = request.steps.get(timeout=poll_s)
                except queue.Empty:  # it waits its turn, or its prompt is long: ask whether it is still wanted
                    yield Step("", 0)
                    continue
                ended = not isinstance(step, Step) or bool(step.finish)
                if isinstance(step, RuntimeError):
                    raise step
                if step is not None:
                    yield step
        finally:
            if not ended:
                self._commands.put(lambda: self._cancel(request))
                while request.steps.get() is not None:
                    pass

    def stats(self) -> dict[str, int]:
        """Return the numbers as of the last step."""
        return self._numbers

    def flush(self) -> int | None:
        """Start over with an empty page table; return how many tokens were cached. None = a request runs."""
        answer: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._commands.put(lambda: answer.put(self._flush()))
        return answer.get(timeout=limits().children.step_s)

    def unload(self) -> None:
        """Stop the thread and free the weights; the process ends right after, which is what proves it."""
        self._commands.put(self._end)
        self._thread.join(limits().children.step_s)
        if self._thread.is_alive():
            raise RuntimeError("the generator does not stop")
        self._parts.model.unload()

    # From here on: in the generator's thread only.

    def _loop(self) -> None:
        while not self._ends:
            self._run_commands()
            self._admit()
            if self._active:
                self._iterate()

    def _run_commands(self) -> None:
        may_wait = not self._active and not self._waiting
        while True:
            try:
                command = self._commands.get(block=may_wait)
            except queue.Empty:
                return
            command()
            may_wait = False

    def _admit(self) -> None:
        # Cached pages are found again by their tokens only, so prompts of two tenants would share them, and the library knows
        # no salt: requests of another scope wait until those of the present one have ended, and then a new generator, whose
        # page table is empty, takes over. First come, first served, so a scope cannot starve another.
        while self._waiting and (not self._active or self._waiting[0].scope == self._scope):
            request = self._waiting.popleft()
            if request.scope != self._scope:
                self._generator, self._scope = self._make_generator(), request.scope
            try:
                request.job = self._make_job(request)
                serial = self._generator.enqueue(request.job)
            except (AssertionError, RuntimeError, ValueError) as error:  # the library asserts where a job cannot fit
                request.steps.put(RuntimeError(f"the job was not accepted: {error}"))
                continue
            self._active[serial] = request

    def _iterate(self) -> None:
        try:
            results = self._generator.iterate()
        except (AssertionError, RuntimeError, ValueError) as error:
            log.exception("the generator failed")
            for request in self._active.values():
                request.steps.put(RuntimeError(f"the generator failed: {error}"))
            self._active.clear()
            self._generator = self._make_generator()
            return
        self._count()  # first, so that whoever has a whole answer finds the numbers without its pages
        for result in results:
            if result["stage"] == "streaming" and (found := self._active.get(result["serial"])) is not None:
                self._deliver(found, result)

    def _deliver(self, request: _Request, result: dict[str, Any]) -> None:  # Any: values of the library
        ids = result.get("token_ids")
        tokens = 0 if ids is None else int(ids.shape[-1])
        if not result["eos"]:
            request.counted += tokens
            request.steps.put(Step(result.get("text", ""), tokens))
            return
        del self._active[result["serial"]]
        cached = int(result.get("cached_tokens") or 0)
        finish = "length" if result.get("eos_reason") == "max_new_tokens" else "stop"
        rest = max(int(result.get("new_tokens", 0)) - request.counted, 0)
        request.steps.put(Step(result.get("text", ""), rest, finish, cached))

    def _cancel(self, request: _Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        for serial, active in list(self._active.items()):
            if active is request:
                self._generator.cancel(request.job)
                del self._active[serial]
        self._count()
        request.steps.put(None)

    def _flush(self) -> int | None:
        if self._active or self._waiting:
            return None
        cached = self._numbers.get("kv_cached_tokens", 0)
        self._generator = self._make_generator()
        return cached

    def _end(self) -> None:
        self._ends = True
        self._generator.clear_queue()

    def _make_generator(self) -> Any:  # Any: untyped library
        # Over the same cache, with a page table that knows nothing of what lies in there.
        settings = self._settings
        self._numbers = {}
        generator = self._library.Generator(
            self._parts.model,
            self._parts.cache,
            self._parts.tokenizer,
            max_batch_size=settings["max_batch_size"],
            max_chunk_size=settings["max_chunk_size"],
            max_q_size=settings["max_q_size"],
        )
        self._count(generator)
        return generator

    def _make_job(self, request: _Request) -> Any:  # Any: untyped library
        sampling = request.sampling
        return self._library.Job(
            request.prompt.native,
            max_new_tokens=sampling.max_tokens,
            sampler=self._library.ComboSampler(
                rep_p=sampling.repetition_penalty,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            ),
            seed=sampling.seed,
            stop_conditions=[] if sampling.ignores_end else self._parts.ends,
            max_rq_tokens=self._settings["max_rq_tokens"] or None,
        )

    def _count(self, generator: Any = None) -> None:  # Any: untyped library
        ask = getattr(generator or self._generator, "get_cache_stats", None)  # older releases have none
        if ask is not None:
            found = ask()
            names = {"max_tokens": "kv_total_tokens", "used_tokens": "kv_used_tokens", "cached_tokens": "kv_cached_tokens"}
            self._numbers = {ours: int(found[theirs]) for theirs, ours in names.items() if theirs in found}


@dataclass(frozen=True, slots=True)
class _Parts:
    model: Any  # Any: untyped library, these three
    cache: Any
    tokenizer: Any
    own_context: int
    """The model's own, in tokens."""
    ends: list[int]


def load(settings: Settings, parent: Parent) -> ExLlamaModel:
    """Load the model. Raises RuntimeError, ValueError or OSError with a reason for the node's owner."""
    if settings["gpu_ids"]:  # before the library, and CUDA with it, is there
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings["gpu_ids"]))
    parent.say(stage="starting ExLlamaV3")
    exllamav3 = import_engine("exllamav3", "exllamav3")
    folder = Path(settings["folder"])
    config = exllamav3.Config.from_directory(str(folder))
    model = exllamav3.Model.from_config(config)
    quantised: dict[str, Any] = {}  # Any: keyword arguments of an untyped function
    if settings["k_bits"]:
        quantised = {"layer_type": exllamav3.CacheLayer_quant, "k_bits": settings["k_bits"], "v_bits": settings["v_bits"]}
    # The cache must exist before the weights are placed: its tensors are made with them.
    cache = exllamav3.Cache(
        model, max_num_tokens=settings["cache_size"], max_batch_size=settings["max_batch_size"], **quantised
    )
    split: dict[str, Any] = {}  # Any: as above
    if settings["gpu_split"]:
        split["use_per_device"] = settings["gpu_split"]
    if settings["tensor_parallel"]:
        split |= {"tensor_p": True, "tp_backend": settings["tp_backend"]}
    model.load(
        callback=lambda done, total: parent.say(stage="loading modules", fraction=round(done / max(total, 1), 4)),
        max_chunk_size=settings["max_chunk_size"],
        **split,
    )
    tokenizer = exllamav3.Tokenizer.from_config(config)
    ends = {token for token in [*config.eos_token_id_list, tokenizer.eos_token_id] if token is not None}
    parts = _Parts(model, cache, tokenizer, int(config.max_position_embeddings), sorted(ends))
    return ExLlamaModel(exllamav3, parts, folder, settings)


if __name__ == "__main__":
    sys.exit(run_child(load, serve_text, ExLlamaModel.unload))
