"""The process that holds a CTranslate2 text model: ``python -m runner.engines.children.ct2 PARENT_PID``.

Settings: folder, model_name, key, slots, threads, device, device_index, compute_type, context_tokens (0 = the model's own).
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

from runner.engines.children import Parent, Settings, import_engine, load_ctranslate2, run_child, unload_ctranslate2
from runner.engines.children.textserver import Detokeniser, Prompt, Sampling, Step, read_json, serve_text, special_tokens
from runner.limits import limits


class Ct2Model:
    """A ``ctranslate2.Generator`` and the tokenizer beside it. Keeps nothing between calls: there is no prefix cache."""

    def __init__(self, generator: Any, tokenizer: Any, folder: Path, context_tokens: int) -> None:  # Any: untyped libraries
        self._generator = generator
        self._tokenizer = tokenizer
        settings = read_json(folder / "tokenizer_config.json")
        self.specials = special_tokens(settings)
        self._ends = _end_tokens(folder, tokenizer, self.specials)
        longest = settings.get("model_max_length")
        if not isinstance(longest, int) or not 0 < longest < limits().children.context_tokens:
            longest = limits().children.unknown_context_tokens
        self.context_tokens = context_tokens or longest

    def tokenise(self, text: str) -> Prompt:
        """Return the tokens as texts, which is what CTranslate2 takes."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False).tokens
        return Prompt(len(tokens), tokens)

    def generate(self, prompt: Prompt, sampling: Sampling) -> Generator[Step, None, None]:
        # The seed is not used: each thread of the library draws from one generator of its own, seeded once in its life.
        options: dict[str, Any] = {  # Any: keyword arguments of an untyped function
            "max_length": sampling.max_tokens,
            "min_length": sampling.max_tokens if sampling.ignores_end else 0,
            "sampling_topk": 1 if sampling.temperature == 0 else sampling.top_k,
            "sampling_topp": sampling.top_p,
            "sampling_temperature": sampling.temperature or 1.0,
            "repetition_penalty": sampling.repetition_penalty,
            "end_token": self._ends,
        }
        if sampling.beam_size > 1:
            # It has no steps to stop between: its answer comes in one.
            yield self._search(prompt, sampling, options)
            return
        pieces = Detokeniser(self._tokenizer.decode, self._tokens_before(prompt, sampling))
        for found in self._generator.generate_tokens(prompt.native, **options):
            if found.token_id in self._ends:
                yield Step(pieces.finish(), 1, "stop")
                return
            text = pieces.add(found.token_id)
            yield Step(text + pieces.finish(), 1, "length") if found.is_last else Step(text, 1)

    def stats(self) -> dict[str, int]:
        return {}

    def flush(self) -> int | None:
        return 0

    def unload(self) -> None:
        unload_ctranslate2(self._generator)

    def _tokens_before(self, prompt: Prompt, sampling: Sampling) -> list[int]:
        """Return the tokens that decide how the first one of an answer reads which goes on with the prompt's text."""
        number = limits().children.broken_tokens if sampling.goes_on else 0
        return [self._tokenizer.token_to_id(token) for token in prompt.native[len(prompt.native) - number :]]

    def _search(self, prompt: Prompt, sampling: Sampling, options: dict[str, Any]) -> Step:  # Any: as above
        options = {**options, "sampling_topk": 1, "sampling_topp": 1.0, "sampling_temperature": 1.0}
        result = self._generator.generate_batch(
            [prompt.native], beam_size=sampling.beam_size, include_prompt_in_result=False, return_end_token=True, **options
        )[0]
        ids = list(result.sequences_ids[0])
        ended = bool(ids) and ids[-1] in self._ends
        before = self._tokens_before(prompt, sampling)
        text = self._tokenizer.decode(before + (ids[:-1] if ended else ids))[len(self._tokenizer.decode(before)) :]
        return Step(text, len(ids), "stop" if ended else "length")


def _end_tokens(folder: Path, tokenizer: Any, specials: dict[str, str]) -> list[int]:  # Any: untyped library
    named = read_json(folder / "generation_config.json").get("eos_token_id")
    ids = {named} if isinstance(named, int) else set(named or ())
    for text in (specials.get("eos_token"), read_json(folder / "config.json").get("eos_token")):
        if text and (token := tokenizer.token_to_id(text)) is not None:
            ids.add(token)
    if not ids:
        raise ValueError("the model names no end token: tokenizer_config.json lacks eos_token")
    return sorted(ids)


def load(settings: Settings, parent: Parent) -> Ct2Model:
    """Load the model. Raises RuntimeError, ValueError or OSError with a reason for the node's owner."""
    parent.say(stage="starting CTranslate2")
    ctranslate2, tokenizers = import_engine("ctranslate2", "ct2"), import_engine("tokenizers", "ct2")
    folder = Path(settings["folder"])
    with load_ctranslate2(parent, folder):
        read_json(folder / "tokenizer.json")  # says what is wrong with a broken file; the library's words do not
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        generator = ctranslate2.Generator(
            str(folder),
            device=settings["device"],
            device_index=settings["device_index"] or 0,
            compute_type=settings["compute_type"],
            inter_threads=settings["slots"],
            intra_threads=max(1, settings["threads"] // settings["slots"]),
        )
    return Ct2Model(generator, tokenizer, folder, settings["context_tokens"])


if __name__ == "__main__":
    sys.exit(run_child(load, serve_text, Ct2Model.unload))
