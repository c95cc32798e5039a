"""Counting tokens at the gateway: templates within bounds, folders of tokenizers, questions to nodes, estimates, its routes."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest

from core.limits import limits
from gateway.process import GatewayRuntime
from gateway.request.models import AliasEntry, KeyEntry
from gateway.routing import Alias, Target
from gateway.token_counts import Count, Source, TokenCounter, ask_node
from gateway.tokenizers import (
    ChatPrompt,
    ChatTemplate,
    TokenizerFolders,
    TokenizerProcess,
    UnusableFolder,
    estimate_tokens,
    find_folder,
    load_tokenizer,
    read_prompt,
)
from gateway.urls import make_application
from gateway.values import Caller, ModelEntry
from nodes.links import EndKind, LinkRegistry
from nodes.states import TOKENIZE
from tests.fakes.asgi_client import on_our_server
from tests.fakes.limits import set_limits
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.models.make import hf_model_dir
from tests.fakes.waiting import turns
from wire.credentials import CredentialKind, mint_credential

PATIENT_MS = 60_000

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "λ"}'}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
TALK: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "a λ?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "A function without a name."},
]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be given up because this machine stood still. What does too much is given up by the number of its steps."""
    set_limits(gateway={"template_s": 60.0, "count_thread_s": 60.0, "count_node_ms": PATIENT_MS})


def chat(*messages: Mapping[str, object], **fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": messages or TALK, **fields}).encode()


def prompt(*messages: Mapping[str, object], **fields: object) -> ChatPrompt:
    return read_prompt(chat(*messages, **fields))


def say(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def test_four_bytes_are_taken_for_a_token_and_pictures_for_a_fixed_number() -> None:
    framed = limits().gateway.token_message + limits().gateway.token_answer
    assert estimate_tokens(prompt(say("four"))) == 1 + framed
    assert estimate_tokens(prompt(say("fours"))) == 2 + framed
    assert estimate_tokens(prompt(say("λλλλ"))) == 2 + framed
    shown = {"role": "user", "content": [{"type": "text", "text": "four"}, PICTURE, {"type": "file", "file": {}}]}
    assert estimate_tokens(prompt(shown)) == 1 + framed + 2 * limits().gateway.token_media


def render(source: str, *messages: Mapping[str, object], **specials: str) -> str:
    return ChatTemplate(source, specials).render(prompt(*messages, tools=[TOOL]))


def test_a_template_is_rendered_the_way_of_hugging_face() -> None:
    source = (
        "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=1) | length }}{% endif %}\n"
        "{% for message in messages %}\n"
        "    {% if loop.index0 % 2 == 1 %}{% continue %}{% endif %}\n"
        "<{{ message.role }}>{{ message['content'] | trim + ';' }}\n"
        "{% endfor %}\n"
        "{% generation %}{% if add_generation_prompt %}{{ '<' ~ 'assistant' ~ '>' }}{% endif %}{% endgeneration %}"
        "{% set ns = namespace(found=false) %}{%- for m in messages -%}{% if m.role == 'system' and not ns.found %}"
        "{% set ns.found = true %}{{ m['content'][1:] | trim }}{% endif %}{%- endfor -%}"
        "{% for key, value in {'b': 1, 'a': [2, 3]} | dictsort %}{{ key ~ '=' ~ (value | tojson) }};{% endfor %}"
        "{{ [1, 2] | sum }}{{ ['x', 'y'] | join(', ') }}{{ 'a-b'.split('-')[-1].replace('b', 'c') }}{{ 1.5 | round | int }}"
        "{% macro call(t) %}<{{ t.name | upper }}>{% endmacro %}{{ call({'name': 'f'}) }}{{ [[1, 2], ('a',)] }}"
    )
    begun = f"<s>{len(json.dumps([TOOL], indent=1))}<system>Be brief.;\n<assistant>;\n<assistant>"
    assert render(source, bos_token="<s>") == begun + "e brief.a=[2, 3];b=1;3x, yc2<F>[[1, 2], ('a',)]"


def test_what_a_client_hands_to_a_template_cannot_take_the_place_of_what_is_ours() -> None:
    variables = {
        "messages": [], "bos_token": "X", "muster_step": 1, "muster_bound": 1, "add_generation_prompt": False, "own": "!",
    }  # fmt: skip
    source = "{{ bos_token ~ own }}{% for m in messages %}{{ m.role }} {% endfor %}{{ add_generation_prompt }}"
    found = ChatTemplate(source, {"bos_token": "<s>"}).render(prompt(say("x"), chat_template_kwargs=variables))
    assert found == "<s>!user True"


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ x",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "x" * (limits().gateway.template_source_chars + 1),
    ],
    ids=["syntax", "open", "nested", "large"],
)
def test_what_is_no_template_says_so(source: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(source, {})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the tokenizer of the tiny model as ``tiny`` and as ``of/tiny``."""
    place = tmp_path / "tokenizers"
    for name in ("tiny", "of/tiny"):
        put_tokenizer(place / name)
    return place


def put_tokenizer(folder: Path, **changes: Any) -> None:  # Any: members of tokenizer_config.json, None takes one out
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(hf_model_dir() / "tokenizer.json", folder)
    settings = json.loads((hf_model_dir() / "tokenizer_config.json").read_text()) | changes
    kept = {name: value for name, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))


def tokens_of(folder: Path, found: ChatPrompt | None = None) -> tuple[int, bool]:
    """Return what the tokenizer in a folder counts, and whether that is a guess."""
    counted = load_tokenizer(folder).count(found or prompt())
    assert counted is not None
    return counted


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "./", "..", "../tokenizers/tiny", "tiny/..", "tiny/../tiny", "/etc", "//etc", "of\\tiny", "tiny\x00",
        "absent", "out", "loop",
    ],
)  # fmt: skip
def test_no_name_leads_out_of_the_root(root: Path, name: str) -> None:
    put_tokenizer(root.parent / "outside")
    (root / "out").symlink_to(root.parent / "outside")
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(UnusableFolder):
        find_folder(root, name)


def test_of_many_tokenizers_those_used_last_stay(root: Path) -> None:
    most = limits().gateway.count_folders
    for number in range(most):
        put_tokenizer(root / str(number))
    folders = TokenizerFolders(root)
    first = folders.get("tiny")
    kept = [folders.get(str(number)) for number in range(most - 1)]
    assert folders.get("tiny") is first
    assert folders.get("0") is kept[0]
    folders.get(str(most - 1))
    assert (len(folders._loaded), folders.get("0") is kept[0]) == (most, True)
    assert folders.get("1") is not None


def test_without_a_template_messages_are_put_one_after_the_other_and_that_is_said(root: Path) -> None:
    put_tokenizer(root / "bare", chat_template=None)
    put_tokenizer(root / "broken", chat_template="{{ raise_exception('no') }}")
    plain = len(load_tokenizer(root / "bare").tokenizer.encode(prompt().to_text())) + prompt().framing_tokens
    assert tokens_of(root / "bare") == tokens_of(root / "broken") == (plain, True)
    whole, is_guess = tokens_of(root / "tiny")
    assert (whole != plain, is_guess) == (True, False)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", b"{", "tokenizer.json is not JSON"),
        ("tokenizer.json", b"[]", "does not hold a JSON object"),
        ("tokenizer.json", b"\xff", "cannot be read"),
        ("tokenizer_config.json", b"7", "does not hold a JSON object"),
        ("tokenizer_config.json", b"[" * 100_000, "is not JSON"),
        ("chat_template.jinja", b"{% if %}", "chat template cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(root: Path, name: str, content: bytes | None, reason: str) -> None:
    path = root / "tiny" / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnusableFolder, match=reason):
        load_tokenizer(root / "tiny")


def counting_link(*models: str, load: int = 0) -> FakeLink:
    link = FakeLink(*models)
    link.endpoints = {model: frozenset({"/v1/chat/completions", TOKENIZE}) for model in link.models}
    link.external_load = load
    return link


def registry_of(*links: FakeLink) -> LinkRegistry:
    registry = LinkRegistry()
    for link in links:
        registry.add(link)
    return registry


async def stream_of(link: FakeLink) -> FakeStream:
    async with asyncio.timeout(30):
        while not link.streams:
            await turns(1)
    return link.streams[0]


async def ask(link: FakeLink, *, deadline_ms: int = PATIENT_MS) -> int | None:
    return await ask_node(link, model="m", body=b"{}", tenant="t", request_id="req_1", deadline_ms=deadline_ms)


@pytest.mark.parametrize(
    "answer",
    [
        lambda stream: stream.answer(b'{"error":{}}', status=400),
        lambda stream: stream.answer(b"no JSON"),
        lambda stream: stream.answer(b"\xff"),
        lambda stream: stream.answer(b'{"count": -1}'),
        lambda stream: stream.answer(b'{"count": 9999999999999}'),
        lambda stream: stream.answer(b" " * (limits().gateway.count_answer_bytes + 1), ends=False),
        lambda stream: stream.end(EndKind.BUSY, retryable=True),
        lambda stream: stream.end(EndKind.LINK_LOST),
    ],
    ids=["refused", "text", "bytes", "negative", "huge", "long", "busy", "lost"],
)
async def test_what_is_no_count_is_none_and_the_stream_is_let_go(answer: Callable[[FakeStream], None]) -> None:
    link = counting_link()
    asked = asyncio.create_task(ask(link))
    answer(await stream_of(link))
    assert await asked is None
    assert link.streams == []


def entry(tokenizer: str = "", *, name: str = "m", allowed: bool = True) -> ModelEntry:
    return ModelEntry(name, allowed, "x", max_tokens=10, max_prompt_chars=10, max_queue=1, created=0, tokenizer=tokenizer)


MakeCounter = Callable[[LinkRegistry, Path], TokenCounter]


@pytest.fixture
def make_counter() -> Iterator[MakeCounter]:
    made: list[TokenCounter] = []

    def make(registry: LinkRegistry, root: Path) -> TokenCounter:
        made.append(TokenCounter(registry, root))
        return made[-1]

    yield make
    for counter in made:
        counter.close()


async def count(counter: TokenCounter, *, tokenizer: str = "", body: bytes = b"") -> Count:
    return await counter.count(entry(tokenizer), body or chat(), tenant="t", request_id="req_1")


async def test_a_registered_tokenizer_is_asked_before_any_box_and_what_is_too_large_nobody(
    root: Path, make_counter: MakeCounter
) -> None:
    link, bounds = counting_link(), limits().gateway
    counter = make_counter(registry_of(link), root)
    assert await count(counter, tokenizer="tiny") == Count(tokens_of(root / "tiny")[0], Source.TOKENIZER)
    found = await count(counter, tokenizer="tiny", body=chat(say("x" * bounds.count_body_bytes)))
    guess = bounds.count_body_bytes // 4 + bounds.token_message + bounds.token_answer
    assert found == Count(guess, Source.ESTIMATE, is_estimated=True)
    long = chat(say("word " * (bounds.template_chars // 5 + 1)))
    assert (await count(make_counter(LinkRegistry(), root), tokenizer="tiny", body=long)).source is Source.ESTIMATE
    assert link.streams == []


async def test_after_two_boxes_it_is_estimated() -> None:
    links = [counting_link(load=load) for load in range(3)]
    asked = asyncio.create_task(count(TokenCounter(registry_of(*links), None)))
    for link in links[:2]:
        (await stream_of(link)).end(EndKind.ENGINE_FAILED)
    assert await asked == Count(estimate_tokens(prompt()), Source.ESTIMATE, is_estimated=True)
    assert links[2].streams == []


@pytest.mark.parametrize("tokenizer", ["", "absent", "../tokenizers/tiny", "foreign"])
async def test_a_box_is_asked_where_no_tokenizer_can_be_used_and_an_operator_hears_of_it_once(
    root: Path, tokenizer: str, caplog: pytest.LogCaptureFixture, make_counter: MakeCounter
) -> None:
    (root / "foreign").mkdir()
    (root / "foreign" / "tokenizer.json").write_text('{"model": {"type": "Nobody"}}')
    link = counting_link()
    counter = make_counter(registry_of(link), root)
    with caplog.at_level(logging.WARNING, "muster.gateway"):
        for _ in range(2):
            asked = asyncio.create_task(count(counter, tokenizer=tokenizer))
            (await stream_of(link)).answer(b'{"count": 42}')
            assert await asked == Count(42, Source.ENGINE, node=link.node_name)
    said = [record for record in caplog.records if record.name == "muster.gateway"]
    assert len(said) == (1 if tokenizer else 0)


async def test_two_prompts_are_tokenized_at_once_and_a_crowd_goes_on_to_the_next_source(
    root: Path, make_counter: MakeCounter
) -> None:
    counter = make_counter(LinkRegistry(), root)
    found = await asyncio.gather(*(count(counter, tokenizer="tiny") for _ in range(30)))
    sources = [one.source for one in found]
    assert sources.count(Source.TOKENIZER) == 10
    assert sources.count(Source.ESTIMATE) == 20
    assert (await count(counter, tokenizer="tiny")).source is Source.TOKENIZER


async def test_a_process_that_is_lost_costs_one_count_and_its_tokenizer_rests(
    root: Path, make_counter: MakeCounter, caplog: pytest.LogCaptureFixture
) -> None:
    set_limits(gateway={"template_s": 0.5})
    put_tokenizer(root / "bomb", chat_template=DEADLY)
    counter = make_counter(LinkRegistry(), root)
    with caplog.at_level(logging.WARNING, "muster.gateway"):
        assert (await count(counter, tokenizer="bomb")).source is Source.ESTIMATE
    assert [record.getMessage() for record in caplog.records if record.name == "muster.gateway"] == [
        "count.tokenizer_unusable model=m reason=its process ended before it had counted"
    ]
    assert (await count(counter, tokenizer="tiny")).source is Source.TOKENIZER
    before = set(counter._processes)
    assert (await count(counter, tokenizer="bomb")).source is Source.ESTIMATE
    assert set(counter._processes) == before  # nobody was asked
    counter.close()
    assert (await count(counter, tokenizer="tiny")).source is Source.ESTIMATE
    assert all(process.is_lost for process in before)


DOUBLED = "{% set a = [1, 2] %}" + "{% set a = [a, a] %}" * 40
TEXT = "{% set t = 'abcdefgh' %}" + "{% set t = t ~ t %}" * 16  # half a megabyte
ROOM_BYTES = 64 * 1024 * 1024
BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "doubled": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "squared": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "printed": "{% for i in range(90000) %}{{ 'forty letters of text, each of them twice' }}{% endfor %}",
    "times": "{{ 'a' * 1000000000 }}",
    "power": "{{ 9 ** 999999999 }}",
    "formatted": "{{ '%1000000000d' % 1 }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "range": "{{ range(1000000) | list }}",
    "classes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "append": "{{ messages.append(1) }}",
    "raised": "{{ raise_exception('roles must alternate') }}",
    "by zero": "{{ 1 / 0 }}",
    "lipsum": "{{ lipsum(n=1000000) | length }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "filter replace": TEXT + "{{ t | replace('a', t) | length }}",
    "method join": TEXT + "{{ t.join(['a'] + range(90000) | map('string') | list) | length }}",
    "mapped": TEXT + "{{ range(90000) | map('replace', '1', t) | list | length }}",
    "bytes": "{{ (5).to_bytes(1000000000, 'big') | length }}",
    "round": "{{ 5 | round(-1000000000) }}",
    "nested printed": DOUBLED + "{{ a }}",
    "nested JSON": DOUBLED + "{{ a | tojson | length }}",
    "namespaces": "{% set a = namespace(x=1) %}" + "{% set a = namespace(x=a, y=a) %}" * 40 + "{{ a }}",
    "separators": TEXT + "{{ range(90000) | list | tojson(separators=[t, t]) | length }}",
    "slices": TEXT + "{% set s = [" + "t[1:]," * 1200 + "] %}{{ s | length }}",
    "macro": TEXT + "{% macro m() %}{% for i in range(90000) %}{{ t }}{% endfor %}{% endmacro %}{{ m() | length }}",
    "block": "{% set x %}{% for i in range(90000) %}" + "z" * 20000 + "{% endfor %}{% endset %}{{ x | length }}",
    "constants": "{% set x %}{% for i in range(90000) %}{{ '" + "z" * 20000 + "' }}{% endfor %}{% endset %}{{ x | length }}",
    "steps taken over": "{% set muster_step = namespace %}{% set muster_bound = namespace %}"
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
}
DEADLY = DOUBLED.replace("[", "(").replace("]", ")") + "{{ a in [a] | unique | list }}"
"""What stays in one call of the interpreter, deaf to the timer."""
CALM = b'{"messages": [{"role": "user", "content": "Hello"}]}'


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, TokenizerProcess]]:
    """Folders, and a process that counts by them with little room and time; all templates are its, one after the other."""
    folders = tmp_path_factory.mktemp("tokenizers")
    set_limits(gateway={"template_s": 0.3, "template_bytes": ROOM_BYTES})
    process = TokenizerProcess(folders)
    yield folders, process
    process.close()


def peak_of(process: TokenizerProcess) -> int:
    """Return the most address space that a process had, in bytes."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak"))


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_does_too_much_or_fails_is_given_up(name: str, tried: tuple[Path, TokenizerProcess]) -> None:
    folders, process = tried
    put_tokenizer(folders / "bare", chat_template=None)
    put_tokenizer(folders / name, chat_template=BOMBS[name])
    bare = process.count("bare", CALM)
    before = peak_of(process)
    assert process.count(name, CALM) == bare  # counted without the template
    assert peak_of(process) <= before + 2 * ROOM_BYTES
    assert process.count("bare", CALM) == bare


MESSAGES, RESPONSES = "/v1/messages/count_tokens", "/v1/responses/input_tokens"
CLAUDE_TOOL = {"name": "look_up", "description": "Find a word", "input_schema": {"type": "object", "properties": {}}}
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "What is a λ?"}]}  # JSON


class Setting:
    """A gateway that was not started: no database, no background, nodes played by the test."""

    def __init__(self, *, per_minute: int = 100) -> None:
        self.runtime = GatewayRuntime()
        minted = mint_credential(CredentialKind.CLIENT)
        self.key = minted.text
        caller = Caller(uuid.uuid4(), "k", "t", per_minute, frozenset())
        catalogue = self.runtime.catalogue
        catalogue.apply_keys([(minted.keyid, KeyEntry(minted.digest, caller, revoked=False, expires_at=None))], replace=True)
        catalogue.apply_models([entry(), entry(name="other", allowed=False)])
        catalogue.apply_aliases([AliasEntry(None, Alias("claude", (Target("m"),)))])
        self.link = counting_link()
        self.application = make_application(self.runtime)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(on_our_server(self.application)), base_url="http://gateway"
        )

    async def ask(self, body: object = ASKED, *, path: str = MESSAGES, key: str = "") -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(path, content=content, headers={"x-api-key": key or self.key})

    async def ask_box(self, body: object = ASKED, *, path: str = MESSAGES) -> httpx.Response:
        """Ask, and have the node answer 42. What it was asked stands in ``self.asked``."""
        self.runtime.registry.add(self.link)
        asking = asyncio.create_task(self.ask(body, path=path))
        stream = await stream_of(self.link)
        self.asked: dict[str, Any] = json.loads(stream.request.body)
        assert self.link.active == 0
        stream.answer(b'{"count": 42}')
        return await asking


@pytest.fixture
def setting() -> Setting:
    return Setting()


async def test_a_box_counts_system_and_tools_too_and_no_limit_of_an_answer_is_needed(setting: Setting) -> None:
    answer = await setting.ask_box({**ASKED, "system": "Be brief.", "tools": [CLAUDE_TOOL]}, path=MESSAGES + "?beta=true")
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": 42})
    told = {"x-muster-token-count": "engine", "x-muster-model": "m", "x-muster-node": setting.link.node_name}
    assert {**told, "anthropic-ratelimit-requests-remaining": "99"}.items() <= dict(answer.headers).items()
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert ([message["role"] for message in setting.asked["messages"]], setting.asked["model"]) == (["system", "user"], "m")
    assert setting.asked["tools"][0]["function"]["name"] == "look_up"


PICTURED = [{"role": "user", "content": [{"type": "image"}]}]
REFUSED: list[tuple[object, int, str]] = [
    (b"{", 400, "invalid_request_error"),
    ({"messages": ASKED["messages"]}, 400, "invalid_request_error"),
    ({"model": "m", "messages": []}, 400, "invalid_request_error"),
    ({"model": "m", "messages": PICTURED}, 400, "invalid_request_error"),
    (b'{"model":"m","model":"other","messages":[{"role":"user","content":"x"}]}', 400, "invalid_request_error"),
    ({**ASKED, "model": "absent"}, 404, "not_found_error"),
    ({**ASKED, "model": "other"}, 400, "invalid_request_error"),
]


async def test_refusals_have_the_shape_of_anthropic(setting: Setting) -> None:
    large = (b" " * (setting.runtime.limits.max_body_bytes + 1), 413, "request_too_large")
    for body, status, kind in [*REFUSED, large]:
        answer = await setting.ask(body)
        said = answer.json()
        assert (answer.status_code, said["type"], said["error"]["type"]) == (status, "error", kind)
        assert said["request_id"] == answer.headers["request-id"]
    wrong = await setting.client.get(MESSAGES)
    assert (wrong.status_code, wrong.headers["allow"], wrong.json()["type"]) == (405, "POST", "error")
    setting.runtime.pipeline.is_stopping = True
    assert (await setting.ask()).status_code == 503


async def test_a_key_is_needed_and_its_rate_holds_over_both_apis() -> None:
    setting = Setting(per_minute=2)
    asked = [
        await setting.ask(key="mst_wrong"),
        await setting.ask(),
        await setting.ask({"model": "m", "input": "x"}, path=RESPONSES),
    ]
    assert [answer.status_code for answer in asked] == [401, 200, 200]
    assert asked[0].json()["error"]["type"] == "authentication_error"
    limited = await setting.ask()
    assert (limited.status_code, limited.json()["error"]["type"]) == (429, "rate_limit_error")
    assert (limited.headers["anthropic-ratelimit-requests-remaining"], int(limited.headers["retry-after"]) > 0) == ("0", True)


async def test_input_of_responses_is_counted_as_the_conversation_it_is_and_its_sdk_reads_it(setting: Setting) -> None:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(on_our_server(setting.application)))
    sdk = openai.AsyncOpenAI(api_key=setting.key, base_url="http://gateway/v1", http_client=http, max_retries=0)
    found = await sdk.responses.input_tokens.count(model="m", input="What is a λ?", instructions="Be brief.")
    assert (found.object, found.input_tokens > 0) == ("response.input_tokens", True)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.input_tokens.count(model="m", input="x", previous_response_id="resp_1")
    body = {"model": "claude", "instructions": "Be brief.", "input": [{"role": "user", "content": "Hi"}]}
    answer = await setting.ask_box(body, path=RESPONSES)
    assert answer.json() == {"object": "response.input_tokens", "input_tokens": 42}
    assert [message["role"] for message in setting.asked["messages"]] == ["system", "user"]
    refused = await setting.ask({"model": "m"}, path=RESPONSES)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("arguments", ["", "not JSON", "[1]", "[" * 100_000], ids=["none", "text", "list", "deep"])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    found = prompt({"role": "assistant", "content": "", "tool_calls": [call, {"function": None}]})
    assert found.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments
