"""What a scripted node answers on each API path: streams of stamped chunks, and whole answers. Bytes alone, no I/O.

Every chunk carries one stamp, alone between quotes, which is how ``native/load.c`` finds it; ``native/mock_upstream.c`` says
what is in it and sends the same chat answers. An answer that is not streamed has 700 bytes of thought beside its stamp.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
PROMPT_TOKENS = 20
WHOLE_TOKENS = 200

_THOUGHT = b"lorem ipsum dolor " * 39


@dataclass(frozen=True, slots=True)
class Voice:
    """How answers are said on one API path.

    ``say_chunk`` takes a stamp, the chunk's index and the number of chunks, and says with the first one whatever opens a
    stream. ``say_end`` and ``say_usage`` take the number of chunks; usage that is not asked for is left out. ``whole`` has
    places for a thought and a stamp.
    """

    say_chunk: Callable[[bytes, int, int], bytes]
    say_end: Callable[[int], bytes]
    whole: bytes
    say_usage: Callable[[int], bytes] | None = None

    def make_chunk(self, stream: int, index: int, total: int) -> bytes:
        """Return one chunk, stamped with the present time."""
        return self.say_chunk(_make_stamp(stream, index, total), index, total)

    def make_end(self, total: int, request: bytes) -> bytes:
        """Return what follows the last chunk. ``request``: the body that is answered."""
        end = self.say_end(total)
        return self.say_usage(total) + end if self.say_usage is not None and b'"include_usage":true' in request else end

    def make_whole(self, stream: int) -> bytes:
        """Return the body of an answer that is not streamed."""
        return self.whole % {b"thought": _THOUGHT, b"text": _make_stamp(stream, 0, 1)}


def _make_stamp(stream: int, index: int, total: int) -> bytes:
    return b"T%016x%08x%06x%06x" % (time.monotonic_ns(), stream & 0xFFFFFFFF, index, total)


# /v1/chat/completions

_CHAT_HEAD = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1763700000,"model":"mock","choices":'
_CHAT_CHUNK = _CHAT_HEAD + b'[{"index":0,"delta":{%s"content":"%s"},"finish_reason":%s}]}\n\n'
_CHAT_USAGE = _CHAT_HEAD + b'[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n'
_CHAT_DONE = b"data: [DONE]\n\n"
_CHAT_WHOLE = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1763700000,"model":"mock","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"%(text)s","reasoning_content":"%(thought)s"},"logprobs":null,"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":20,"completion_tokens":200,"total_tokens":220}}'
)


def _say_chat_chunk(stamp: bytes, index: int, total: int) -> bytes:
    role = b'"role":"assistant",' if index == 0 else b""
    return _CHAT_CHUNK % (role, stamp, b'"stop"' if index == total - 1 else b"null")


def _say_chat_usage(total: int) -> bytes:
    return _CHAT_USAGE % (PROMPT_TOKENS, total, PROMPT_TOKENS + total)


def _say_chat_end(total: int) -> bytes:
    del total
    return _CHAT_DONE


# /v1/messages

_MESSAGE = b'"id":"msg_1","type":"message","role":"assistant","model":"mock"'
_MESSAGES_OPENING = (
    b'event: message_start\ndata: {"type":"message_start","message":{%b,"content":[],"stop_reason":null,'
    b'"stop_sequence":null,"usage":{"input_tokens":20,"output_tokens":0}}}\n\n'
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
) % _MESSAGE
_MESSAGES_CHUNK = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"%s"}}\n\n'
)
_MESSAGES_END = (
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
    b'"usage":{"input_tokens":20,"output_tokens":%d}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
_MESSAGES_WHOLE = (
    b"{%b" % _MESSAGE + b',"content":[{"type":"thinking","thinking":"%(thought)s","signature":"none"},'
    b'{"type":"text","text":"%(text)s"}],"stop_reason":"end_turn","stop_sequence":null,'
    b'"usage":{"input_tokens":20,"output_tokens":200}}'
)


def _say_messages_chunk(stamp: bytes, index: int, total: int) -> bytes:
    del total
    chunk = _MESSAGES_CHUNK % stamp
    return chunk if index else _MESSAGES_OPENING + chunk


def _say_messages_end(total: int) -> bytes:
    return _MESSAGES_END % total


# /v1/responses

_RESPONSE = b'"id":"resp_1","object":"response","created_at":1763700000,"model":"mock","error":null,"incomplete_details":null'
_RESPONSE_USAGE = b'"usage":{"input_tokens":20,"output_tokens":%d,"total_tokens":%d}'
_RESPONSES_OPENING = (
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0,'
    b'"response":{%b,"status":"in_progress","output":[]}}\n\n'
    b'event: response.output_item.added\ndata: {"type":"response.output_item.added","sequence_number":1,"output_index":0,'
    b'"item":{"id":"msg_1","type":"message","role":"assistant","status":"in_progress","content":[]}}\n\n'
    b'event: response.content_part.added\ndata: {"type":"response.content_part.added","sequence_number":2,"item_id":"msg_1",'
    b'"output_index":0,"content_index":0,"part":{"type":"output_text","text":"","annotations":[]}}\n\n'
) % _RESPONSE
_RESPONSES_CHUNK = (
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":%d,"item_id":"msg_1",'
    b'"output_index":0,"content_index":0,"delta":"%s"}\n\n'
)
# A real end says the whole text again; here it is left out, so that no stamp is met twice.
_RESPONSES_END = (
    b'event: response.completed\ndata: {"type":"response.completed","sequence_number":%d,'
    b'"response":{' + _RESPONSE + b',"status":"completed","output":[],' + _RESPONSE_USAGE + b"}}\n\n"
)
_RESPONSES_WHOLE = (
    b"{%b" % _RESPONSE + b',"status":"completed","output":[{"id":"rs_1","type":"reasoning","summary":[],'
    b'"content":[{"type":"reasoning_text","text":"%(thought)s"}]},'
    b'{"id":"msg_1","type":"message","role":"assistant","status":"completed",'
    b'"content":[{"type":"output_text","text":"%(text)s","annotations":[]}]}],'
    + _RESPONSE_USAGE % (WHOLE_TOKENS, PROMPT_TOKENS + WHOLE_TOKENS)
    + b"}"
)
_EVENTS_BEFORE = 3


def _say_responses_chunk(stamp: bytes, index: int, total: int) -> bytes:
    del total
    chunk = _RESPONSES_CHUNK % (index + _EVENTS_BEFORE, stamp)
    return chunk if index else _RESPONSES_OPENING + chunk


def _say_responses_end(total: int) -> bytes:
    return _RESPONSES_END % (total + _EVENTS_BEFORE, total, total + PROMPT_TOKENS)


VOICES = {
    CHAT: Voice(_say_chat_chunk, _say_chat_end, _CHAT_WHOLE, _say_chat_usage),
    MESSAGES: Voice(_say_messages_chunk, _say_messages_end, _MESSAGES_WHOLE),
    RESPONSES: Voice(_say_responses_chunk, _say_responses_end, _RESPONSES_WHOLE),
}


def find_voice(path: str) -> Voice:
    """Return how to answer on an API path; every other path is answered like chat."""
    return VOICES.get(path, VOICES[CHAT])
