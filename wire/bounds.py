"""What a number in a request may be, by endpoint: beyond it the APIs that we speak refuse, and so do gateway and node. Pure.

An engine would serve the request with some other number, or with noise, and nobody would be told. A number that an original
takes stands here with the original's bound; where an original names none, neither does this table.

Sources: OpenAI API reference, "Create chat completion", "Create completion", "Create a model response"; Anthropic API
reference, "Create a Message".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Bound = tuple[float, float | None]
"""Lowest and highest value, both allowed; None = no highest one that we know of, a model's own cap aside."""

_SAMPLING: dict[str, Bound] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}

BOUNDS: Mapping[str, Mapping[str, Bound]] = MappingProxyType({
    "/v1/chat/completions": {
        **_SAMPLING, "max_tokens": (1, None), "max_completion_tokens": (1, None), "n": (1, 128), "top_logprobs": (0, 20),
    },
    # Zero tokens are a question here: with ``echo`` the answer is how likely the prompt is.
    "/v1/completions": {**_SAMPLING, "max_tokens": (0, None), "n": (1, 128)},
    # OpenAI's least is 16; one token is what tests of clients ask local engines for, and it can be given.
    "/v1/responses": {**_SAMPLING, "max_output_tokens": (1, None), "top_logprobs": (0, 20)},
    # Anthropic takes 0 to warm its cache, which no engine here can do without making a token.
    "/v1/messages": {"temperature": (0, 1), "top_p": (0, 1), "top_k": (0, None), "max_tokens": (1, None)},
})  # fmt: skip


def find_out_of_bounds(endpoint: str, fields: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the first field whose number the endpoint does not take, and the sentence that says so; None when all are fine.

    ``fields``: decoded JSON values by name; what is no number is somebody else's to refuse.
    """
    bounds = BOUNDS.get(endpoint, {})
    for name in fields:
        if name not in bounds:
            continue
        (lowest, highest), value = bounds[name], fields[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value < lowest or (highest is not None and value > highest):
            wanted = f"at least {lowest:g}" if highest is None else f"between {lowest:g} and {highest:g}"
            return name, f"The field '{name}' must be {wanted}; it is {str(value)[:20]}."
    return None
