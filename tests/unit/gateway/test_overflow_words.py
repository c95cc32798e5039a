"""Prompts that do not fit, in the words of every engine: Claude Code and Codex act on what is made of them."""

from __future__ import annotations

import json

import pytest

from gateway.dialects import SURFACES
from gateway.dialects.refusal import read_refusal, read_stream_failure
from gateway.errors import ContextTooLong, EngineRefused

PROMPT = {
    "vllm": (
        (
            "This model's maximum context length is 2048 tokens. However, your request has 3000 input tokens. Please reduce the"
            " length of the input messages."
        ),
        "prompt is too long: 3000 tokens > 2048 maximum",
    ),
    "vllm_two_counts": (
        (
            "This model's maximum context length is 16384 tokens. However, you requested 122946 tokens (112946 in the messages,"
            " 10000 in the completion). Please reduce the length of the messages or completion."
        ),
        "prompt is too long: 112946 tokens > 16384 maximum",
    ),
    "vllm_newest": (
        (
            "You passed 40721 input tokens and requested 2048 output tokens. However, the model's context length is only 32768"
            " tokens, resulting in a maximum input length of 30720 tokens. Please reduce the length of the input prompt."
        ),
        "prompt is too long: 40721 tokens > 32768 maximum",
    ),
    "vllm_nothing_asked": (
        (
            "You passed 131073 input tokens and requested 0 output tokens. However, the model's context length is only 131072"
            " tokens, resulting in a maximum input length of 131072 tokens."
        ),
        "prompt is too long: 131073 tokens > 131072 maximum",
    ),
    "vllm_encoder": (
        "The decoder prompt (length 6000) is longer than the maximum model length of 4096.",
        "prompt is too long: 6000 tokens > 4096 maximum",
    ),
    "sglang": (
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "prompt is too long: 5000 tokens > 4096 maximum",
    ),
    "llama_cpp": (
        "request (24071 tokens) exceeds the available context size (8192 tokens), try increasing it",
        "prompt is too long: 24071 tokens > 8192 maximum",
    ),
    "openai": (
        "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 509178 tokens.",
        "prompt is too long: 509178 tokens > 272000 maximum",
    ),
    "xai": (
        "This model's maximum prompt length is 131072 but the request contains 537812 tokens",
        "prompt is too long: 537812 tokens > 131072 maximum",
    ),
    "tabby": (
        "Prompt length 5000 is greater than max_seq_len 4096",
        "prompt is too long: 5000 tokens > 4096 maximum",
    ),
    "anthropic": (
        "prompt is too long: 210432 tokens > 200000 maximum",
        "prompt is too long: 210432 tokens > 200000 maximum",
    ),
}
BOTH = {
    "vllm_0_9": (
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 32000. This model's maximum context length is 32768 tokens"
            " and your request has 5000 input tokens (32000 > 32768 - 5000)."
        ),
        (5000, 32000, 32768),
    ),
    "vllm_two_counts": (
        (
            "This model's maximum context length is 16384 tokens. However, you requested 17000 tokens (7000 in the messages,"
            " 10000 in the completion)."
        ),
        (7000, 10000, 16384),
    ),
    "vllm_at_least": (
        (
            "This model's maximum context length is 128000 tokens. However, you requested 65535 output tokens and your prompt"
            " contains at least 62466 input tokens, for a total of at least 128001 tokens."
        ),
        (62466, 65535, 128000),
    ),
    "vllm_newest": (
        (
            "You passed 30,721 input tokens and requested 2,048 output tokens. However, the model's context length is only"
            " 32,768 tokens, resulting in a maximum input length of 30,720 tokens."
        ),
        (30721, 2048, 32768),
    ),
    "sglang": (
        (
            "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 5000"
            " tokens: 4000 tokens from the input messages and 1000 tokens for the completion."
        ),
        (4000, 1000, 4096),
    ),
    "tgi": (
        "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 `inputs` tokens and 1000 `max_new_tokens`",
        (4000, 1000, 4096),
    ),
    "anthropic": (
        "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease input length or `max_tokens`",
        (188240, 21333, 200000),
    ),
}
WITHOUT_COUNTS = [
    "Your input exceeds the context window of this model. Please adjust your input and try again.",
    "the input length exceeds the context length",
    (
        "You passed 9000000 input characters and requested 10 output tokens. However, the model's context length is only 32768"
        " tokens, resulting in a maximum input length of 32758 tokens (at most 1000000 characters)."
    ),
]


def refuse(words: str) -> bytes:
    """Return an engine's 400 as vLLM shapes it."""
    return json.dumps({"error": {"message": words, "type": "BadRequestError", "param": None, "code": 400}}).encode()


def say_to_anthropic(words: str) -> str:
    """Return what a client of Messages reads."""
    said = json.loads(SURFACES["/v1/messages"].render_refusal(400, refuse(words), "req_1"))["error"]
    assert said["type"] == "invalid_request_error"
    return str(said["message"])


@pytest.mark.parametrize("engine", PROMPT)
def test_a_prompt_that_alone_is_too_long_is_said_with_its_own_count(engine: str) -> None:
    words, expected = PROMPT[engine]
    assert say_to_anthropic(words) == expected


@pytest.mark.parametrize("engine", BOTH)
def test_a_prompt_that_leaves_too_little_for_the_answer_is_said_so_that_clients_ask_for_less(engine: str) -> None:
    words, (prompt, answer, context) = BOTH[engine]
    assert say_to_anthropic(words) == (
        f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {context}, "
        "decrease input length or `max_tokens` and try again"
    )


@pytest.mark.parametrize("words", WITHOUT_COUNTS, ids=["openai", "ollama", "vllm_characters"])
def test_without_usable_counts_the_words_of_the_engine_stand_behind_the_known_ones(words: str) -> None:
    assert say_to_anthropic(words) == f"prompt is too long: {words}"


EVERY = [*(words for words, _ in (*PROMPT.values(), *BOTH.values())), *WITHOUT_COUNTS]


@pytest.mark.parametrize("words", EVERY, ids=[f"words_{number}" for number in range(len(EVERY))])
def test_every_engines_words_get_the_code_that_openai_clients_look_for(words: str) -> None:
    said = json.loads(SURFACES["/v1/chat/completions"].render_refusal(400, refuse(words), "req_1"))["error"]
    assert (said["code"], said["message"]) == ("context_length_exceeded", words)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
        ("/v1/embeddings", "input"),
        ("/v1/completions", "prompt"),
        ("/v1/rerank", "documents"),
    ],
)
def test_the_field_that_is_too_long_is_named_as_the_surface_names_it(path: str, param: str) -> None:
    surface, body = SURFACES[path], refuse(WITHOUT_COUNTS[0])
    assert json.loads(surface.render_refusal(400, body, "req_1"))["error"]["param"] == param
    event = surface.render_stream_error(read_refusal(400, body), "req_1").partition(b"data: ")[2]
    assert json.loads(event)["error"]["param"] == param


@pytest.mark.parametrize(
    "words",
    [
        "max_tokens must be at least 1, got -5.",
        "top_k must be 0 (disable), or at least 1, got -3.",
        "Unknown field 'context'",
        "The image is larger than 20 megabytes.",
        "Tool call arguments exceed 1000 characters",
    ],
)
def test_other_refusals_are_not_about_the_context(words: str) -> None:
    assert isinstance(read_refusal(400, refuse(words)), EngineRefused)


def test_a_stream_that_ends_over_the_context_is_known_without_a_status() -> None:
    error = {"message": "Your input exceeds the context window of this model.", "code": "context_length_exceeded"}
    assert isinstance(read_stream_failure(json.dumps(error).encode()), ContextTooLong)
