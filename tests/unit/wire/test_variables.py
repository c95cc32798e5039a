"""Variables with the names of other programs: which wins, what is said of it, and what nobody may see."""

from __future__ import annotations

import json

import pytest

from wire.variables import (
    HIDDEN,
    Alias,
    Variable,
    describe_aliases,
    find_variable,
    print_problems,
    read_level,
    read_rust_log,
    report_variables,
)

ALIASES = (Alias("RUST_LOG", "OURS", read=read_rust_log), Alias("THEIRS", "OURS"))


@pytest.mark.parametrize(
    ("environment", "found", "notes"),
    [
        ({}, None, []),
        ({"OURS": "a"}, ("a", "variable", "OURS"), []),
        ({"OURS_FILE": "/f"}, ("/f", "file", "/f"), []),
        ({"THEIRS": " b "}, ("b", "alias", "THEIRS"), ["THEIRS is read as OURS."]),
        ({"THEIRS": " "}, None, []),
        ({"OURS": "a", "THEIRS": "b"}, ("a", "variable", "OURS"), ["OURS is set and wins over THEIRS."]),
        ({"OURS": "b", "THEIRS": "b"}, ("b", "variable", "OURS"), []),
        ({"OURS": "", "THEIRS": "b"}, ("", "variable", "OURS"), ["OURS is set and wins over THEIRS."]),
        ({"OURS_FILE": "/f", "THEIRS": "b"}, ("/f", "file", "/f"), ["OURS_FILE is set and wins over THEIRS."]),
        (
            {"RUST_LOG": "warn", "THEIRS": "b"},
            ("warn", "alias", "RUST_LOG"),
            ["RUST_LOG is read as OURS.", "RUST_LOG is set and wins over THEIRS."],
        ),
        ({"RUST_LOG": "hyper=warn", "THEIRS": "b"}, ("b", "alias", "THEIRS"), ["THEIRS is read as OURS."]),
    ],
)
def test_the_name_of_ours_wins_over_a_file_and_that_over_other_names_which_is_said(
    environment: dict[str, str], found: tuple[str, str, str] | None, notes: list[str]
) -> None:
    read = find_variable("OURS", environment, ALIASES)
    assert (None if read is None else (read.text, read.origin, read.source)) == found
    assert describe_aliases(environment, ALIASES) == notes


def test_only_the_level_for_everything_is_read_of_rust_log() -> None:
    texts = {"info": "info", "my_crate=debug, WARN": "warn", "my_crate=debug": "", "off": "", "": ""}
    assert {text: read_rust_log(text) for text in texts} == texts
    levels = {"loud": "loud", "my_crate=debug,warn": "warn", "my_crate=debug": "", "DEBUG": "DEBUG"}
    assert {text: read_level(text) for text in levels} == levels


def test_an_error_names_what_was_given_and_what_it_is_here() -> None:
    subjects = [Variable("OURS", "x", origin, source).subject for origin, source in (
        ("variable", "OURS"), ("file", "/run/f"), ("alias", "THEIRS"), ("option", "--ours")
    )]  # fmt: skip
    assert subjects == ["OURS", "OURS (from /run/f, which OURS_FILE names)", "THEIRS (read as OURS)", "--ours"]
    assert print_problems(["one"]) == "one"
    assert print_problems(["one", "two"]) == "2 settings cannot be used:\n  one\n  two"


def test_what_is_shown_of_settings_says_where_each_was_set_and_hides_what_is_secret() -> None:
    variables = [
        Variable("MUSTER_WORKER_SECRET", "correct horse", "alias", "WORKER_SECRET"),
        Variable("DATABASE_URL", "postgresql://u:p@db/m", "variable", "DATABASE_URL", allowed="a URL"),
    ]
    shown = json.loads(report_variables(variables, ["bad"], ["note"], as_json=True, is_check=False))
    assert [(one["name"], one["text"], one["source"]) for one in shown["settings"]] == [
        ("DATABASE_URL", f"postgresql://{HIDDEN}@db/m", "DATABASE_URL"),
        ("MUSTER_WORKER_SECRET", HIDDEN, "WORKER_SECRET"),
    ]
    assert (shown["problems"], shown["notes"]) == (["bad"], ["note"])
    table = report_variables(variables, [], [], as_json=False, is_check=False).splitlines()
    assert [line.split()[0] for line in table] == ["VARIABLE", "DATABASE_URL", "MUSTER_WORKER_SECRET"]
    assert report_variables(variables, ["bad"], ["note"], as_json=False, is_check=True) == "note\n\nbad"
    assert report_variables(variables, [], [], as_json=False, is_check=True) == "Every setting can be used."
