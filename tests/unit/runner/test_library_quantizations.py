"""Finding the same model in another quantisation."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.library import FoundModel, other_quantizations
from runner.library.quantizations import name_without_quantization


@pytest.mark.parametrize(
    "model_id",
    ["meta/Llama-3.1-8B-Instruct", "x/Llama-3.1-8B-Instruct-AWQ", "Llama-3.1-8B-Instruct-Q4_K_M", "llama-3.1-8b-instruct.Q8_0",
     "z/Llama-3.1-8B-Instruct-GGUF/Llama-3.1-8B-Instruct-UD-IQ2_XXS-00001-of-00003", "Llama-3.1-8B-Instruct-GPTQ-Int4",
     "Llama-3.1-8B-Instruct-bf16", "Llama-3.1-8B-Instruct_FP8-Dynamic", "Llama-3.1-8B-Instruct-exl3-4.0bpw",
     "Llama-3.1-8B-Instruct-4bit", "Llama-3.1-8B-Instruct-w4a16"],
)  # fmt: skip
def test_the_ways_of_naming_a_quantisation_do_not_count(model_id: str) -> None:
    assert name_without_quantization(model_id) == "llama-3.1-8b-instruct"


@pytest.mark.parametrize("model_id", ["Llama-3.1-70B-Instruct-Q4_K_M", "Llama-3.1-8B-Q4_K_M", "Llama-3-8B-Instruct", "Q4_0"])
def test_another_model_stays_another_model(model_id: str) -> None:
    assert name_without_quantization(model_id) != "llama-3.1-8b-instruct"
    assert name_without_quantization(model_id)


def make_found(model_id: str, size_bytes: int, *, problem: str | None = None, quantization: str | None = "q") -> FoundModel:
    return FoundModel(model_id, Path("/m") / model_id, "gguf", size_bytes, quantization, problem)


def test_usable_ones_are_returned_largest_first_without_the_model_itself() -> None:
    found = [
        make_found("m-Q4_0", 4), make_found("m-Q8_0", 8), make_found("m-F16", 16), make_found("m-Q2_K", 2, problem="damaged"),
        make_found("other-Q4_0", 4), make_found("m", 20, quantization=None),
    ]  # fmt: skip

    assert [entry.model_id for entry in other_quantizations("m-F16", found)] == ["m-Q8_0", "m-Q4_0"]
