"""The table of requirements and how it is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.engine import script
from conformance.engine.script import DIRECTIVES, find_prompt, read_script
from conformance.fields import Field, read_json
from conformance.report import format_json, format_summary, format_table
from conformance.table import Surface, list_rows
from conformance.verdicts import Finding, Verdict, Violation
from controlplane.launcher.cli import _parse


def test_every_surface_has_rows_and_every_row_says_whom_it_helps() -> None:
    rows = list_rows()
    assert {row.surface for row in rows} == set(Surface)
    assert len(rows) > 300
    assert all(row.requirement and row.clients for row in rows)
    assert len({(row.surface, row.requirement) for row in rows}) == len(rows)


def test_rows_are_chosen_by_the_beginning_of_their_ids() -> None:
    assert {row.surface for row in list_rows(["chat.tools", "models"])} == {Surface.CHAT, Surface.MODELS}
    with pytest.raises(ValueError, match="no requirement begins with 'chta'"):
        list_rows(["chta"])


def test_every_directive_is_explained() -> None:
    listed = {word.strip(",").partition(":")[0] for word in (script.__doc__ or "").split()}
    assert set(DIRECTIVES) <= listed


def test_a_misspelt_directive_is_refused() -> None:
    assert read_script("[[slow:0.5]] [[tools]]").seconds("slow") == 0.5
    for text in ("[[tolls]]", "[[slow:soon]]"):
        with pytest.raises(ValueError, match=r"tolls|soon"):
            read_script(text)


def test_directives_are_found_in_the_last_message_of_the_user() -> None:
    parts = [{"type": "input_text", "text": "[[tools]]"}, {"type": "input_image"}]
    turns = [
        {"role": "user", "content": "[[refusal]]"},
        {"role": "user", "content": parts},
        {"role": "tool", "content": "[[cut]]"},
    ]
    assert find_prompt({"messages": turns}) == "[[tools]]"
    assert find_prompt({"input": turns}) == "[[tools]]"
    assert find_prompt({"prompt": ["[[length]]"]}) == "[[length]]"
    assert find_prompt({"input": "[[cached]]"}) == "[[cached]]"


def test_what_does_not_fit_is_named_with_its_place() -> None:
    reply = read_json('{"choices": [{"index": "0"}], "none": null}', "reply")
    reads: list[tuple[Callable[[], object], str]] = [
        (reply["choices"][0]["index"].count, r'reply.choices\[0\].index must be an integer of at least 0 and is "0"'),
        (partial(reply["choices"].__getitem__, 1), "has 1 entries, number 1 is asked for"),
        (partial(reply.__getitem__, "usage"), "reply.usage is missing"),
        (reply["none"].text, "must be a string and is null"),
        (partial(Field(True, "x").must_be, 1), "x must be 1 and is true"),
        (partial(read_json, "[NaN]", "y"), "y is not JSON"),
    ]
    for read, words in reads:
        with pytest.raises(Violation, match=words):
            read()


def test_the_table_shows_verdict_and_detail_and_counts_by_surface() -> None:
    rows = list_rows(["chat.stream.role", "models.health", "models.head"])
    verdicts = [(Verdict.FAIL, "role is missing"), (Verdict.OK, ""), (Verdict.SKIPPED, "no such thing")]
    findings = [Finding(row.id, *verdict, 0.1) for row, verdict in zip(rows, verdicts, strict=True)]
    table = format_table(rows, findings)
    assert "[chat.stream.role]" in table
    assert "Node helper, runTools" in table
    assert "→ role is missing" in table
    assert format_summary(rows, findings).splitlines() == [
        "chat             1 requirements:    0 ok    1 failed    0 failed by the engine    0 skipped",
        "models           2 requirements:    1 ok    0 failed    0 failed by the engine    1 skipped",
        "all              3 requirements:    1 ok    1 failed    0 failed by the engine    1 skipped",
    ]
    written = json.loads(format_json(rows, findings, base_url="http://x", model="m"))
    assert written["rows"][0] == {
        "id": "chat.stream.role",
        "surface": "chat",
        "requirement": "the first delta has role: assistant",
        "clients": "Node helper, runTools",
        "verdict": "FAIL",
        "detail": "role is missing",
        "took_s": 0.1,
    }


def test_nothing_checked_is_neither_success_nor_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nobody = ["--base-url", "http://127.0.0.1:9", "--api-key", "k", "--model", "m"]
    for arguments, words in (
        (nobody, "cannot connect"),
        ([*nobody, "--only", "chta"], "no requirement begins with"),
        (["--base-url", "http://127.0.0.1:9", "--api-key", "k"], "--model are needed"),
    ):
        assert main([*arguments, "--json", str(tmp_path / "out.json")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_the_requirements_can_be_listed_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "images"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["images.reply", "images.no_nulls", "images.n"]


def test_the_launcher_hands_everything_on() -> None:
    assert _parse(["conformance", "--base-url", "http://x", "--help"])[1] == ["--base-url", "http://x", "--help"]
