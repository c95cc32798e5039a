"""Stands in for the ExLlamaV3 library, which needs a GPU: its classes as its documentation and source describe them.

Tokens are characters, an answer counts words, pages of 256 tokens are found again by a chained hash of their tokens (as in
the library, nothing else tells prompts apart). Settings for a test lie in ``fake.json`` of the model folder: ``modules``,
``module_s`` (seconds each module takes to load), ``step_s`` (seconds per token), ``refuses`` (words of a failing load).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.waiting import takes_blocking

PAGE = 256
END = 4


class Tensor:
    """Ids of shape (1, n)."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.shape = (1, len(ids))


class Config:
    def __init__(self, directory: str) -> None:
        folder = Path(directory)
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        fake = folder / "fake.json"
        self.fake: dict[str, Any] = json.loads(fake.read_text(encoding="utf-8")) if fake.is_file() else {}
        self.eos_token_id_list = [END]
        self.max_position_embeddings = self.config["max_position_embeddings"]

    @staticmethod
    def from_directory(directory: str, **_kwargs: object) -> Config:
        return Config(directory)


class Model:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.caches: list[Cache] = []
        self.is_loaded = False

    @staticmethod
    def from_config(config: Config, **_kwargs: object) -> Model:
        return Model(config)

    def load(self, *, callback: Callable[[int, int], None] | None = None, **_kwargs: object) -> None:
        if words := self.config.fake.get("refuses"):
            raise RuntimeError(words)
        modules = self.config.fake.get("modules", 4)
        for done in range(modules + 1):
            takes_blocking(self.config.fake.get("module_s", 0.0))
            if callback is not None:
                callback(done, modules)
        self.is_loaded = True
        for cache in self.caches:  # the tensors of a cache are made with the weights, not later
            cache.is_allocated = True

    def unload(self) -> None:
        self.is_loaded = False


class CacheLayer_quant:  # noqa: N801  # the library's name
    pass


class Cache:
    def __init__(
        self, model: Model, max_num_tokens: int, layer_type: type | None = None, max_batch_size: int = 16, **kwargs: int
    ) -> None:
        assert max_num_tokens % PAGE == 0, "max_num_tokens must be a multiple of the page size"
        assert (layer_type is CacheLayer_quant) == ("k_bits" in kwargs)
        self.max_num_tokens = max_num_tokens
        self.max_batch_size = max_batch_size
        self.is_allocated = False
        model.caches.append(self)


class Tokenizer:
    eos_token_id = END

    @staticmethod
    def from_config(_config: Config) -> Tokenizer:
        return Tokenizer()

    def encode(self, text: str, add_bos: bool = False, encode_special_tokens: bool = False) -> Tensor:
        assert not add_bos
        assert encode_special_tokens
        return Tensor([ord(character) for character in text])


class ComboSampler:
    def __init__(self, rep_p: float = 1.0, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> None:
        assert 0.0 <= top_p <= 1.0
        assert isinstance(top_k, int)
        assert rep_p > 0
        assert temperature >= 0


class Job:
    def __init__(
        self, input_ids: Tensor, max_new_tokens: int, sampler: ComboSampler, seed: int | None = None,
        stop_conditions: list[int] | None = None, identifier: object = None, max_rq_tokens: int | None = None,
    ) -> None:  # fmt: skip
        assert input_ids.shape[-1] > 0, "Input IDs cannot be empty."
        self.ids = input_ids.ids
        self.max_new_tokens = max_new_tokens
        self.stop_conditions = stop_conditions or []
        self.serial = -1
        self.made = 0
        self.cached = 0


class Generator:
    def __init__(
        self, model: Model, cache: Cache, tokenizer: Tokenizer, max_batch_size: int = 256, max_chunk_size: int = 2048,
        max_q_size: int = 8,
    ) -> None:  # fmt: skip
        assert model.is_loaded
        assert cache.is_allocated, "the cache was made after the model was loaded"
        self.model = model
        self.cache = cache
        self.max_batch_size = max_batch_size
        self.pages: set[bytes] = set()
        self.pending: list[Job] = []
        self.active: list[Job] = []
        self.serials = itertools.count()

    def enqueue(self, job: Job) -> int:
        needed = -(-(len(job.ids) + job.max_new_tokens) // PAGE)
        assert needed <= self.cache.max_num_tokens // PAGE, f"Job requires {needed} pages and cannot be enqueued."
        job.serial = next(self.serials)
        self.pending.append(job)
        return job.serial

    def cancel(self, job: Job) -> None:
        for jobs in (self.pending, self.active):
            if job in jobs:
                jobs.remove(job)

    def clear_queue(self) -> None:
        self.pending.clear()
        self.active.clear()

    def iterate(self) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        while self.pending and len(self.active) < self.max_batch_size:
            job = self.pending.pop(0)
            self._prefill(job)
            self.active.append(job)
            common = {"job": job, "identifier": None, "serial": job.serial, "eos": False}
            results.append({**common, "stage": "started"})
            results.append({**common, "stage": "prefill", "curr_progress": len(job.ids), "max_progress": len(job.ids)})
        takes_blocking(self.model.config.fake.get("step_s", 0.001))
        return [*results, *(self._step(job) for job in list(self.active))]

    def get_cache_stats(self) -> dict[str, float]:
        total = self.cache.max_num_tokens
        used = sum(len(job.ids) + job.made for job in self.active)
        return {
            "max_tokens": total, "used_tokens": used, "cached_tokens": PAGE * len(self.pages), "free_tokens": total - used,
            "hit_rate": 0.0, "active_jobs": len(self.active), "pending_jobs": len(self.pending),
        }  # fmt: skip

    def _prefill(self, job: Job) -> None:
        link = b""
        known = True
        for page in range((len(job.ids) - 1) // PAGE):
            link = hashlib.blake2b(link + str(job.ids[page * PAGE : (page + 1) * PAGE]).encode()).digest()
            known = known and link in self.pages
            job.cached += PAGE if known else 0
            self.pages.add(link)

    def _step(self, job: Job) -> dict[str, Any]:
        job.made += 1
        answer: dict[str, Any] = {"job": job, "identifier": None, "serial": job.serial, "stage": "streaming", "eos": False}
        reason = ""
        if job.made >= job.max_new_tokens:
            reason = "max_new_tokens"
        elif END in job.stop_conditions and job.made > 12:
            reason = "stop_token"
        if reason != "stop_token":
            answer |= {"text": f"word{job.made} ", "token_ids": Tensor([job.made])}
        if reason:
            self.active.remove(job)
            answer |= {
                "eos": True, "eos_reason": reason, "new_tokens": job.made, "prompt_tokens": len(job.ids),
                "cached_tokens": job.cached, "time_enqueued": 0.0, "time_prefill": 0.0, "time_generate": 0.0,
            }  # fmt: skip
        return answer
