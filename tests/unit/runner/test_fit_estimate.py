"""What a model takes, what an engine takes beside it, and what would fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.definitions.plan import Observation
from runner.fit import (
    CACHE_TYPES,
    Alternative,
    DoesNotFit,
    Fits,
    KvLayer,
    ModelShape,
    Suggestion,
    SuggestionKind,
    estimate,
    judge,
    learn_overhead,
)
from tests.fakes.examples import examples

MIB = 1 << 20


def make_shape(*layers: KvLayer, weights_bytes: int = 1000) -> ModelShape:
    return ModelShape("gguf", "llama", weights_bytes, 500, len(layers), 4, layers)


LLAMA_8B = make_shape(*[KvLayer(8, 128, 128)] * 32, weights_bytes=8_540_000_000)


def test_the_cache_is_tokens_times_slots_times_bytes_of_a_token() -> None:
    result = estimate(LLAMA_8B, context_tokens=8192, slots=2, overhead_bytes=7)

    assert result.kv_bytes_per_token == 131_072
    assert result.kv_bytes == 2 * 8192 * 131_072 == 2 * (1 << 30)
    assert result.total_bytes == 8_540_000_000 + 2 * (1 << 30) + 7


@pytest.mark.parametrize(
    ("cache_type", "bits"),
    [("f32", 32.0), ("f16", 16.0), ("bf16", 16.0), ("q8_0", 8.5), ("q5_1", 6.0), ("q5_0", 5.5), ("q4_1", 5.0), ("q4_0", 4.5),
     ("iq4_nl", 4.5), ("fp8", 8.0), ("fp8_e5m2", 8.0)],
)  # fmt: skip
def test_a_type_of_cache_takes_its_bits_with_the_scales_of_its_blocks(cache_type: str, bits: float) -> None:
    result = estimate(LLAMA_8B, context_tokens=1, slots=1, type_k=cache_type, type_v=cache_type, overhead_bytes=0)

    assert result.kv_bytes == 32 * 2 * 8 * 128 * bits / 8


def test_keys_and_values_may_be_of_different_types_and_rows_are_whole_blocks() -> None:
    result = estimate(make_shape(KvLayer(1, 40, 8)), context_tokens=1, slots=1, type_k="q8_0", type_v="f16", overhead_bytes=0)

    assert result.kv_bytes == 2 * 34 + 8 * 2


def test_an_unknown_type_of_cache_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="'q3' is no type of KV cache"):
        estimate(LLAMA_8B, context_tokens=1, slots=1, type_k="q3", overhead_bytes=0)


def test_a_sliding_window_bounds_what_a_layer_keeps() -> None:
    # Gemma 3 27B: 62 layers, every sixth sees everything, 16 heads of 128, a window of 1024, at its full context.
    layers = [KvLayer(16, 128, 128, None if (layer + 1) % 6 == 0 else 1024) for layer in range(62)]
    of_token = 16 * (128 + 128) * 2
    result = estimate(make_shape(*layers), context_tokens=131_072, slots=1, overhead_bytes=0)

    assert result.kv_bytes == 10 * 131_072 * of_token + 52 * (1024 + 512) * of_token
    assert result.kv_bytes_per_token == 62 * of_token


def test_a_context_shorter_than_the_window_is_kept_as_it_is() -> None:
    result = estimate(make_shape(KvLayer(1, 1, 1, 4096)), context_tokens=100, slots=3, overhead_bytes=0)

    assert result.kv_bytes == 3 * 100 * 4


def test_the_audio_of_a_transcription_does_not_grow_with_the_context() -> None:
    shape = make_shape(KvLayer(1, 1, 1), KvLayer(2, 1, 1, fixed_tokens=1500))

    assert estimate(shape, context_tokens=448, slots=1, overhead_bytes=0).kv_bytes == 448 * 4 + 1500 * 8
    assert estimate(shape, context_tokens=448, slots=1, overhead_bytes=0).kv_bytes_per_token == 4


def seen(beyond: int, at: float, *, backend: str = "gguf", measured: int | None = None) -> Observation:
    return Observation(backend, "m", "k", 1000, 200, 1200 + beyond if measured is None else measured, 1.0, at)


def test_without_measurements_the_overhead_is_a_guess_that_says_where_it_comes_from() -> None:
    guess = learn_overhead([seen(5, 1.0, backend="vllm")], "gguf")

    assert (guess.bytes, guess.is_learnt, guess.samples) == (48 * MIB, False, 0)
    assert "37 MB" in guess.reason
    assert learn_overhead([], "vllm").bytes > learn_overhead([], "whisper").bytes > learn_overhead([], "ct2").bytes > 0
    assert learn_overhead([], "openai_compatible").bytes == 0


def test_the_overhead_is_the_median_of_the_newest_twenty_loads() -> None:
    old = [seen(9_000_000, float(at)) for at in range(30)]
    new = [seen(500 + at, 100.0 + at) for at in range(20)]
    learnt = learn_overhead([*new, *old], "gguf")

    assert (learnt.bytes, learnt.is_learnt, learnt.samples) == (509, True, 20)


def test_one_odd_measurement_does_not_spoil_what_was_learnt_and_it_is_never_negative() -> None:
    assert learn_overhead([seen(100, 1.0), seen(110, 2.0), seen(9_999_999, 3.0)], "gguf").bytes == 110
    assert learn_overhead([seen(-500, 1.0)], "gguf").bytes == 0


def test_a_load_whose_memory_could_not_be_measured_teaches_nothing() -> None:
    assert learn_overhead([seen(0, 1.0, measured=0)], "gguf").is_learnt is False


def ask(
    free_bytes: int, *, budget_bytes: int | None = None, context_tokens: int = 8192, slots: int = 4, **more: object
) -> Fits | DoesNotFit:
    predicted = estimate(LLAMA_8B, context_tokens=context_tokens, slots=slots, overhead_bytes=100 * MIB)
    return judge(
        predicted, free_bytes=free_bytes, budget_bytes=budget_bytes, shape=LLAMA_8B, context_tokens=context_tokens, slots=slots,
        **more,  # type: ignore[arg-type]  # the further arguments by name
    )  # fmt: skip


def refused(verdict: Fits | DoesNotFit) -> dict[SuggestionKind, Suggestion]:
    assert isinstance(verdict, DoesNotFit)
    return {suggestion.kind: suggestion for suggestion in verdict.suggestions}


NEEDED = 8_540_000_000 + 4 * (1 << 30) + 100 * MIB


def test_exactly_enough_is_enough_and_one_byte_less_is_not() -> None:
    assert isinstance(ask(NEEDED), Fits)
    assert isinstance(ask(NEEDED - 1), DoesNotFit)
    assert isinstance(ask(NEEDED * 2, budget_bytes=NEEDED - 1), DoesNotFit)


def test_the_longest_context_that_fits_is_suggested_in_steps_of_256() -> None:
    suggestion = refused(ask(NEEDED - 1))[SuggestionKind.SHORTER_CONTEXT]

    assert suggestion.context_tokens == 8192 - 256
    assert suggestion.as_dict() == {
        "kind": "shorter_context", "text": suggestion.text, "requiredMB": -(-suggestion.required_bytes // MIB),
        "maxContextLength": 7936,
    }  # fmt: skip
    assert "7936 tokens" in suggestion.text


def test_fewer_requests_at_once_are_suggested() -> None:
    suggestion = refused(ask(NEEDED - 2 * (1 << 30)))[SuggestionKind.FEWER_SLOTS]

    assert (suggestion.slots, suggestion.required_bytes) == (2, NEEDED - 2 * (1 << 30))
    assert refused(ask(NEEDED - 3 * (1 << 30)))[SuggestionKind.FEWER_SLOTS].text.startswith(
        "One request at a time instead of 4"
    )


def test_the_first_preferred_type_of_cache_that_fits_is_suggested() -> None:
    free = NEEDED - 2 * (1 << 30)
    suggestion = refused(ask(free, kv_types=("q8_0", "unheard_of", "q4_0")))[SuggestionKind.SMALLER_KV_TYPE]

    assert suggestion.kv_type == "q4_0"  # q8_0 takes 8.5 of 16 bits: just too much
    assert SuggestionKind.SMALLER_KV_TYPE not in refused(ask(free))


def test_the_largest_other_quantisation_that_fits_is_suggested() -> None:
    others = [
        Alternative("q4", "q4_k_m", 4_900_000_000),
        Alternative("q2", "q2_k", 3_200_000_000),
        Alternative("f16", "f16", 1 << 34),
    ]
    suggestion = refused(ask(NEEDED - 3_000_000_000, alternatives=others))[SuggestionKind.OTHER_QUANTIZATION]

    assert (suggestion.model_id, suggestion.quantization) == ("q4", "q4_k_m")
    assert suggestion.required_bytes == NEEDED - 8_540_000_000 + 4_900_000_000


def test_the_fewest_models_that_free_enough_are_named_for_eviction() -> None:
    loaded = [("small", 1 << 30), ("middle", 3 << 30), ("large", 6 << 30), ("unknown", 0)]

    assert refused(ask(NEEDED - (2 << 30), loaded=loaded))[SuggestionKind.EVICT].evict == ("middle",)
    assert refused(ask(NEEDED - (7 << 30), loaded=loaded))[SuggestionKind.EVICT].evict == ("small", "large")
    assert SuggestionKind.EVICT not in refused(ask(NEEDED - (11 << 30), loaded=loaded))


def test_evicting_others_does_not_help_against_the_budget_of_the_model_itself() -> None:
    verdict = ask(NEEDED - 1, budget_bytes=NEEDED - 1, loaded=[("other", 1 << 40)])

    assert SuggestionKind.EVICT not in refused(verdict)


def test_nothing_is_suggested_that_would_not_fit() -> None:
    verdict = ask(1000, kv_types=("q4_0",), alternatives=[Alternative("q2", "q2_k", 3_000_000_000)])

    assert verdict == DoesNotFit(NEEDED, 1000, ())


@examples(25)
@given(
    free=st.integers(0, NEEDED + 1),
    context=st.integers(1, 40_000),
    slots=st.integers(1, 9),
    sizes=st.lists(st.integers(0, NEEDED), max_size=20),
)
def test_every_suggestion_is_enough_by_itself(free: int, context: int, slots: int, sizes: list[int]) -> None:
    loaded = [(f"m{index}", size) for index, size in enumerate(sizes)]
    verdict = ask(free, context_tokens=context, slots=slots, kv_types=tuple(CACHE_TYPES), loaded=loaded)
    if isinstance(verdict, Fits):
        assert verdict.predicted.total_bytes <= free
        return
    assert verdict.required_bytes > free
    for suggestion in verdict.suggestions:
        freed = sum(size for name, size in loaded if name in suggestion.evict)
        again = estimate(
            LLAMA_8B, context_tokens=suggestion.context_tokens or context, slots=suggestion.slots or slots,
            type_k=suggestion.kv_type or "f16", type_v=suggestion.kv_type or "f16", overhead_bytes=100 * MIB,
        )  # fmt: skip
        assert again.total_bytes == suggestion.required_bytes <= free + freed
        assert suggestion.text.endswith(".")
