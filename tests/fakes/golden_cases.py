"""What each dialect is told of a request and of its answer, to the byte: the cases of tests/unit/gateway, and their player.

A case says who asks (``client``: the path, ``headers``, ``request``), what the engine says (``engine``: the path that it
answers, with ``answer`` or ``stream``), and what comes of it: ``read`` or ``refusal`` on the way in, ``asked`` at the engine,
``answered``, ``usage`` and ``failure`` on the way back. With ``unread`` the translation gets what the surface would refuse.

A text stands for its own bytes (half a character for a byte that is no UTF-8), a list for its joined parts (``["x", 9]``: nine
times), an object for compact JSON; of a response stands what a plain one has not.
``python -m tests.fakes.golden_cases`` writes what comes of every case anew: read the difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gateway.dialects.chat import AnswerContext, AnswerTranslator, FailingTranslator, Translation
from gateway.dialects.messages_request import to_chat_body
from gateway.dialects.refusal import read_refusal
from gateway.dialects.surface import SURFACES
from gateway.errors import ContextTooLong, GatewayError
from gateway.values import InferenceRequest

Case = dict[str, Any]  # Any: JSON
FOLDER = Path(__file__).parents[1] / "unit" / "gateway" / "cases"
PLAIN: Case = json.loads((FOLDER / "plain" / "response.json").read_text(encoding="utf-8"))
CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"
REQUEST_ID, CREATED = "req_ab12", 1_795_000_000
RESULTS = ("read", "refusal", "renamed", "asked", "answered", "usage", "failure")
HELLO = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Case] = {
    CHAT: {"messages": HELLO}, "/v1/completions": {"prompt": "hi"}, "/v1/embeddings": {"input": "hi"},
    "/v1/messages": {"max_tokens": 9, "messages": HELLO}, "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/v1/responses": {"input": "hi"}, "/v1/responses/compact": {"input": "hi"},
}  # fmt: skip
"""What a case asks that says nothing of it."""


def write_bytes(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, list):
        return b"".join(write_bytes(part) if isinstance(part, str) else write_bytes(part[0]) * part[1] for part in value)
    return msgspec.json.encode(value)


def read_bytes(data: bytes) -> object:
    """Return the value of a case that stands for these bytes: an object where that says every byte, else text."""
    try:
        value = json.loads(data)
        if isinstance(value, dict) and msgspec.json.encode(value) == data:
            return value
    except ValueError:
        pass
    return data.decode("utf-8", "surrogateescape")


def read_response(response: Case) -> Case:
    return {key: value for key, value in response.items() if key not in PLAIN or json.dumps(PLAIN[key]) != json.dumps(value)}


def read_event(event: bytes, path: str, number: int) -> list[object]:
    """Return an event of a client's stream as it stands in a case. ``number``: how many came before."""
    name, _, data = event.partition(b"\n")
    kind, value = name.removeprefix(b"event: ").decode(), read_bytes(data.removeprefix(b"data: ").removesuffix(b"\n\n"))
    for head in ("type", "sequence_number"), ("type",):
        said = {key: member for key, member in value.items() if key not in head} if isinstance(value, dict) else {}
        if isinstance(said.get("response"), dict):
            said["response"] = read_response(said["response"])
        if write_event(["client", kind, said], path, number) == event:
            return ["client", kind, said]
    return ["client", event.decode("utf-8", "surrogateescape")]


def write_event(entry: list[Any], path: str, number: int) -> bytes:
    if len(entry) == 2:
        return write_bytes(entry[1])
    _, name, said = entry
    is_numbered = path == "/v1/responses" and "sequence_number" not in said
    head = {"type": name} | ({"sequence_number": number} if is_numbered else {})
    if "response" in said:
        said = said | {"response": PLAIN | said["response"]}
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(head | said) + b"\n\n"


def tell_error(error: GatewayError) -> Case:
    told: Case = {"type": type(error).__name__, "status": error.status, "code": error.code}
    told |= {"param": error.param} if error.param is not None else {}
    told["message"] = error.message
    if isinstance(error, ContextTooLong):
        counts = {"prompt": error.prompt_tokens, "answer": error.answer_tokens, "context": error.context_tokens}
        told |= {"tokens": counts, "is_at_least": error.is_at_least}
    return told


def tell_request(request: InferenceRequest) -> Case:
    """Return what was read of a request, as far as it is not what a bare one has."""
    bare = InferenceRequest(endpoint=request.endpoint, paths=SURFACES[request.endpoint].paths, model="m")
    names = [name for name in request.__struct_fields__ if name not in ("endpoint", "body")]
    return {
        name: json.loads(msgspec.json.encode(getattr(request, name), order="sorted"))
        for name in names
        if name == "prompt_chars" or getattr(request, name) != getattr(bare, name)
    }


class Player:
    """One case: what comes of it, found out by asking the dialects."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.path: str = case["client"]
        self.surface = SURFACES["/v1/messages" if self.path == COUNT else self.path]
        asked = {"model": "m", **ASKED.get(self.path, {})} | ({"stream": True} if "stream" in case else {})
        self.body = write_bytes(case.get("request", asked))
        self.translation: Translation | None = None

    def play(self) -> Case:
        played = {key: value for key, value in self.case.items() if key not in RESULTS}
        try:
            request = self._parse()
            if "engine" not in self.case:
                played |= self._tell_native(request)
            elif self.case["engine"] != self.path:
                asked = self._translate(request)
                played |= {"asked": asked} if self._is_about_request else {}
        except GatewayError as error:
            return played | {"refusal": tell_error(error)}
        if "status" in self.case:
            played |= self._refuse()
        elif "answer" in self.case:
            played |= self._answer()
        elif "stream" in self.case:
            played |= self._follow()
        return played

    def stream(self, size: int) -> bytes:
        """Return the client's stream when the engine's bytes come in pieces of this size."""
        self._translate(self._parse())
        said = b"".join(self._list_chunks())
        return b"".join(self._say(self._open(), (said[at : at + size] for at in range(0, len(said), size))))

    @property
    def _is_about_request(self) -> bool:
        return not {"answer", "stream"} & set(self.case)

    def _parse(self) -> InferenceRequest:
        if self.case.get("unread") or self.path == COUNT:
            fields = msgspec.json.decode(self.body) if self.body.startswith(b"{") and "unread" not in self.case else {}
            return InferenceRequest(
                endpoint=self.path, paths=self.surface.paths, model="m", is_streaming=bool(fields.get("stream")), body=self.body
            )
        return self.surface.parse(self.body, self.case.get("headers", {}))

    def _tell_native(self, request: InferenceRequest) -> Case:
        told: Case = {"read": tell_request(request)}
        if request.body != self.body:
            told["asked"] = {"body": read_bytes(request.body)}
        if "rename" in self.case:
            told["renamed"] = read_bytes(self.surface.rename(request, self.case["rename"]).body)
        return told

    def _translate(self, request: InferenceRequest) -> Case:
        """Say the request to the engine; ``earlier``: what the gateway keeps of the conversation."""
        if self.path == COUNT:
            body, ignored = to_chat_body(request.body, is_counting=True)
        else:
            assert self.surface.translate is not None
            earlier = dict(self.case.get("earlier", {}))
            if "history" in earlier:
                earlier["history"] = [write_bytes(item) for item in earlier["history"]]
            self.translation = self.surface.translate(request, **earlier)
            assert self.translation.path == self.case["engine"]
            body, ignored = self.translation.body, self.translation.ignored
        return {"body": read_bytes(body), "ignored": list(ignored)}

    def _open(self) -> AnswerTranslator:
        assert self.translation is not None
        readings = iter(self.case.get("clock", ()))
        return self.translation.open_answer(
            AnswerContext(REQUEST_ID, "m", CREATED, lambda: next(readings, 0.0), self.case.get("received_at"))
        )

    def _refuse(self) -> Case:
        body = write_bytes(self.case["answer"])
        is_translated = self.case["engine"] != self.path
        said = self.surface.render_refusal(
            self.case["status"], body, REQUEST_ID, translated=self.body if is_translated else None
        )
        return {"answered": read_bytes(said), "failure": tell_error(read_refusal(self.case["status"], body))}

    def _answer(self) -> Case:
        translator = self._open()
        said = translator.translate_whole(write_bytes(self.case["answer"]))
        if translator.failure is not None:
            assert (said, translator.kept) == (b"", None)
            return {"failure": tell_error(translator.failure)}
        assert translator.kept in (None, said)
        value = read_bytes(said)
        if isinstance(value, dict) and value.get("object") == "response":
            different = read_response(value)
            value = {"response": different} if msgspec.json.encode(PLAIN | different) == said else value
        return {"answered": value, **self._tell_usage(translator)}

    def _follow(self) -> Case:
        """Return the stream as the client gets it, between the chunks that bring it about."""
        translator, entries, number = self._open(), [], 0
        given = [entry for entry in self.case["stream"] if entry[0] == "engine"]
        steps = [*given, ["end"]]
        for step, said in zip(steps, self._say(translator, self._list_chunks()), strict=False):
            entries.append(step)
            for event in said.split(b"\n\n")[:-1]:
                entries.append(read_event(event + b"\n\n", self.path, number))
                number += 1
        assert translator.kept is None or translator.kept in said
        told = {"failure": tell_error(translator.failure)} if translator.failure is not None else {}
        left = given[sum(entry[0] == "engine" for entry in entries) :]
        return {"stream": entries + left, **self._tell_usage(translator), **told}

    def _list_chunks(self) -> list[bytes]:
        said = [entry[1] for entry in self.case["stream"] if entry[0] == "engine"]
        return [write_bytes(chunk) if not isinstance(chunk, dict) else b"data: %b\n\n" % write_bytes(chunk) for chunk in said]

    def _say(self, translator: AnswerTranslator, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            said = translator.feed(piece)
            if translator.failure is not None:
                yield said + self._fail(translator)
                return
            yield said
        said = translator.finish()
        yield said if translator.failure is None else said + self._fail(translator)

    def _fail(self, translator: AnswerTranslator) -> bytes:
        assert translator.failure is not None
        failing = isinstance(translator, FailingTranslator)
        said = translator.fail(translator.failure) if isinstance(translator, FailingTranslator) else b""
        assert failing == bool(said)
        assert translator.feed(b'data: {"choices":[{"delta":{"content":"more"}}]}\n\n') == translator.finish() == b""
        assert translator.kept is None
        return said or self.surface.render_stream_error(translator.failure, REQUEST_ID)

    def _tell_usage(self, translator: AnswerTranslator) -> Case:
        usage = translator.usage
        return {} if usage is None else {"usage": [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]}


def load_cases() -> dict[str, Case]:
    files = sorted(FOLDER.glob("*.json"))
    return {f"{file.stem}: {case['name']}": case for file in files for case in json.loads(file.read_text(encoding="utf-8"))}


CASES = load_cases()
STREAMS = {name: case for name, case in CASES.items() if "stream" in case}


def write_case(case: Case) -> str:
    """Return a case as its file has it: a line for each member, and for each entry of a stream."""
    lines = []
    for key, value in case.items():
        text = json.dumps(value, ensure_ascii=False)
        if key == "stream":
            text = "[\n" + ",\n".join(f"      {json.dumps(entry, ensure_ascii=False)}" for entry in value) + "\n    ]"
        lines.append(f"    {json.dumps(key)}: {text}")
    return "  {\n" + ",\n".join(lines) + "\n  }"


def write_file(file: Path, cases: list[Case]) -> None:
    """Write cases into a file; what is no character is escaped."""
    text = "[\n" + ",\n".join(map(write_case, cases)) + "\n]\n"
    file.write_text("".join(c if not "\ud800" <= c <= "\udfff" else f"\\u{ord(c):04x}" for c in text), encoding="utf-8")


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.json")):
        write_file(path, [Player(case).play() for case in json.loads(path.read_text(encoding="utf-8"))])
