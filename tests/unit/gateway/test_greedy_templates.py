"""Chat templates that make very much out of little: given up before the memory of the gateway is gone."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.counting.bounds import measure
from gateway.counting.templates import ChatTemplate, TemplateFailed
from gateway.counting.values import ChatPrompt
from tests.fakes.limits import set_limits

PROMPT = ChatPrompt([{"role": "user", "content": "Hello"}], None, {}, 0)
DOUBLED = "{% set a = [1, 2] %}" + "{% set a = [a, a] %}" * 40
TEXT = "{% set t = 'abcdefgh' %}" + "{% set t = t ~ t %}" * 16  # half a megabyte
ROOM_BYTES = 512 * 1024 * 1024


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be given up because this machine stood still: what does too much is given up for what it does."""
    set_limits(gateway={"template_s": 60.0})


@pytest.fixture
def room() -> Iterator[None]:
    """Half a gigabyte more than there is now, so that a template which is not given up fails here and not the machine."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


BOMBS = {
    "lipsum": "{{ lipsum(n=1000000) | length }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "filter replace": TEXT + "{{ t | replace('a', t) | length }}",
    "method replace": TEXT + "{{ t.replace('a', t) | length }}",
    "empty replace": TEXT + "{{ t.replace('', t) | length }}",
    "filter join": TEXT + "{{ range(90000) | join(t) | length }}",
    "method join": TEXT + "{{ t.join(['a'] + range(90000) | map('string') | list) | length }}",
    "mapped": TEXT + "{{ range(90000) | map('replace', '1', t) | list | length }}",
    "translate": TEXT + "{{ 'aaaa'.translate({97: t}) | length }}",
    "bytes": "{{ (5).to_bytes(1000000000, 'big') | length }}",
    "round": "{{ 5 | round(-1000000000) }}",
    "round up": "{{ 5 | round(1000000000, 'ceil') }}",
    "nested printed": DOUBLED + "{{ a }}",
    "nested put together": DOUBLED + "{{ a ~ 'x' }}",
    "nested text": DOUBLED + "{{ a | string | length }}",
    "nested JSON": DOUBLED + "{{ a | tojson | length }}",
    "nested joined": DOUBLED + "{{ a | join | length }}",
    "nested tuples": DOUBLED.replace("[", "(").replace("]", ")") + "{{ a in [a] | unique | list }}",
    "nested objects": "{% set a = {'k': 1} %}" + "{% set a = {'x': a, 'y': a} %}" * 40 + "{{ a | length }}{{ a | tojson }}",
    "nested dicts": "{% set a = 1 %}" + "{% set a = dict(x=a, y=a) %}" * 40 + "{{ a }}",
    "namespaces": "{% set a = namespace(x=1) %}" + "{% set a = namespace(x=a, y=a) %}" * 40 + "{{ a }}",
    "summed": TEXT
    + "{{ [t.split('a')] * 1 }}{{ [t | list, t | list, t | list, t | list, t | list] | sum(start=[]) | length }}",
    "separators": TEXT + "{{ range(90000) | list | tojson(separators=[t, t]) | length }}",
    "slices": TEXT + "{% set s = [" + "t[1:]," * 1200 + "] %}{{ s | length }}",
    "macro": TEXT + "{% macro m() %}{% for i in range(90000) %}{{ t }}{% endfor %}{% endmacro %}{{ m() | length }}",
    "block": "{% set x %}{% for i in range(90000) %}" + "z" * 20000 + "{% endfor %}{% endset %}{{ x | length }}",
    "constants": "{% set x %}{% for i in range(90000) %}{{ '" + "z" * 20000 + "' }}{% endfor %}{% endset %}{{ x | length }}",
    "steps taken over": "{% set muster_step = namespace %}{% set muster_bound = namespace %}"
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
}


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_would_fill_the_memory_is_given_up(name: str) -> None:
    with pytest.raises((TemplateFailed, ValueError)):  # ValueError: it uses what no template may use
        ChatTemplate(BOMBS[name], {}).render(PROMPT)


def test_what_is_held_several_times_is_counted_each_time() -> None:
    inner: list[object] = ["abc", {"key": (1, "de")}]
    shared = {"x": inner, "y": [inner, inner, inner[1]]}
    unshared = json.loads(json.dumps(shared))
    assert measure(shared) == measure(unshared) > 3 * measure(inner) > measure(inner) + 2


def test_a_list_within_itself_is_given_up() -> None:
    endless: list[object] = ["a"]
    endless.append((endless,))
    for value in (endless, {"k": endless}):
        with pytest.raises(TemplateFailed):
            measure(value)


def test_many_times_the_same_is_measured_no_longer_than_once() -> None:
    looked_at = 0

    class Watched(list[object]):
        def __iter__(self) -> Iterator[object]:
            nonlocal looked_at
            looked_at += 1
            return super().__iter__()

    value: list[object] = Watched(["abc"])
    for _ in range(12):
        value = Watched([value, value])
    assert measure(value) > 2**12
    assert looked_at == 13


def test_what_real_templates_do_is_still_done() -> None:
    source = (
        "{% set ns = namespace(found=false) %}{%- for m in messages -%}{% if m.role == 'user' and not ns.found %}"
        "{% set ns.found = true %}{{ m['content'][1:] | trim }}{% endif %}{%- endfor -%}"
        "{% for key, value in {'b': 1, 'a': [2, 3]} | dictsort %}{{ key ~ '=' ~ (value | tojson) }};{% endfor %}"
        "{{ [1, 2] | sum }}{{ ['x', 'y'] | join(', ') }}{{ 'a-b'.split('-')[-1].replace('b', 'c') }}{{ 1.5 | round | int }}"
        "{% macro call(t) %}<{{ t.name | upper }}>{% endmacro %}{{ call({'name': 'f'}) }}{{ [[1, 2], ('a',)] }}"
        "{{ messages | length }}"
    )
    assert ChatTemplate(source, {}).render(PROMPT) == "elloa=[2, 3];b=1;3x, yc2<F>[[1, 2], ('a',)]1"
