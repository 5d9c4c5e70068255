"""Texts for where they go: hostile names are names everywhere, and never structure."""

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from mecha_exp.evaluation.declaration import MERGE_PREFIXES, metric_problem
from mecha_exp.system.texts import (
    csv_text,
    file_name,
    markdown_block,
    markdown_code,
    markdown_table,
    markdown_text,
    one_line,
)
from mecha_exp.tracking.names import acceptable, accepted, metrics

LETTERS = st.characters(codec="utf-8") | st.sampled_from("|`*_[]<>()!#&~$\\\n\r\x1b:/.@- 0")
NAMES = st.text(LETTERS, max_size=40)
HOSTILE = (
    *("# a", "a\n# b", "<img src=x onerror=alert(1)>", "[a](https://b.c)", "![a](b)", "https://a.b"),
    *("a|b", "a\\|b", "`a`", "``", "`", "*a*", "__a__", "~~a~~", "a\\", "&lt;", "<!-- a", "- a", "1. a"),
    *("> a", "a@b.c", "$x$", "\x1b[31m", "\u2028# a", "  a", "```", "a\r\n\r\nb", "[a]: b", "| a |", "---"),
    *("&#35; a", "+ a", "www.a.b", "==="),
)
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def spans(text: str) -> list[str]:
    """The types of all tokens of Markdown that are no plain text."""
    tokens = MARKDOWN.parse(text)
    inner = [token for block in tokens for token in block.children or ()]
    return [token.type for token in (*tokens, *inner) if token.type not in ("text", "inline", "text_special")]


def shown(text: str) -> str:
    """What a reader of Markdown sees."""
    tokens = [token for block in MARKDOWN.parse(text) for token in block.children or ()]
    return "".join(token.content for token in tokens)


def hostile_examples(test):
    for name in HOSTILE:
        test = example(name)(test)
    return test


@hostile_examples
@given(NAMES)
def test_a_name_in_markdown_is_plain_text(name: str):
    assert spans(f"Merge of {markdown_text(name)} and more") == ["paragraph_open", "paragraph_close"]
    assert spans(f"# {markdown_text(name) or 'x'}") == ["heading_open", "heading_close"]
    assert shown(f"x{markdown_text(name)}x") == f"x{one_line(name).strip()}x"
    if markdown_text(name):
        assert spans(markdown_text(name)) == ["paragraph_open", "paragraph_close"]
        assert shown(markdown_text(name)) == one_line(name).strip()


@hostile_examples
@given(NAMES)
def test_a_name_as_code_in_markdown_is_one_piece_of_code(name: str):
    if one_line(name).strip():
        assert spans(f"x {markdown_code(name)} x") == ["paragraph_open", "paragraph_close", "code_inline"]
        assert one_line(name).strip() in shown(f"x {markdown_code(name)} x")
    assert [token.type for token in MARKDOWN.parse(markdown_block(name, "text"))] == ["fence"]


@hostile_examples
@given(NAMES)
def test_a_name_in_a_table_of_markdown_is_one_cell(name: str):
    table = markdown_table([["a", "b"], [markdown_text(name), markdown_code(name + ".")], ["1", "2"]])

    types = [token.type for token in MARKDOWN.parse(f"{table}\n")]

    assert types.count("table_open") == 1 and types.count("tr_open") == 3
    assert types.count("td_open") == 4 and types.count("th_open") == 2
    assert not {"heading_open", "html_block", "bullet_list_open"} & set(types)


@hostile_examples
@given(NAMES)
def test_links_that_github_finds_in_plain_text_are_none(name: str):
    text = markdown_text(name)

    assert not any(mark in text.lower() for mark in ("http://", "https://", "ftp://", "www."))
    assert "@" not in text.replace("\\@", "")


@hostile_examples
@given(NAMES)
def test_a_name_comes_back_from_csv_and_yaml(name: str):
    name = name.replace("\r", "")
    of_one_line = " ".join(name.splitlines())  # PyYAML takes U+0085 for a line end, as YAML 1.1 does
    assert list(csv.reader(io.StringIO(csv_text([[name, "x"]]), newline=""))) == [[name, "x"]]
    assert yaml.safe_load(yaml.safe_dump({"a": of_one_line}, allow_unicode=True)) == {"a": of_one_line}


@given(st.lists(NAMES | st.sampled_from(HOSTILE), unique=True, max_size=8))
def test_names_of_files_differ_as_the_texts_do(names: list[str]):
    files = [file_name(name) for name in names]

    assert len(set(files)) == len(names)
    for file in files:
        assert (
            Path(file).name == file and len(file.encode()) <= 255 and file.strip(".") and file.isprintable()
        )


@given(st.lists(NAMES | st.text("f()[]{}1_", max_size=4), unique=True, max_size=8))
def test_two_metrics_never_become_one_in_mlflow(names: list[str]):
    found = accepted(names)

    assert len({*found.values()}) == len(names)
    assert all(acceptable(plain) == plain or not name for name, plain in found.items())
    assert found == accepted(names[::-1])
    assert all(found[name] == name for name in names if acceptable(name) == name)


def test_metrics_that_mlflow_would_name_alike_are_both_there():
    assert metrics({"f(1)": 1, "f[1]": 2, "f_1_": 3}) == {"f_1__2": 1.0, "f_1__3": 2.0, "f_1_": 3.0}


@pytest.mark.parametrize("prefix", MERGE_PREFIXES)
def test_an_evaluator_cannot_name_a_number_as_the_merge_does(prefix: str):
    assert "numbers of the merge itself" in str(metric_problem(f"{prefix}x"))


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("words", [("show", "ünd→….mecha")])
def test_a_terminal_of_any_encoding_gets_text(tmp_path: Path, encoding: str, words: tuple[str, ...]):
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}

    said = subprocess.run(
        [sys.executable, "-m", "mecha_exp", *words], cwd=tmp_path, env=environment, capture_output=True
    )

    assert b"Traceback" not in said.stderr and b"UnicodeEncodeError" not in said.stderr
    assert (said.stdout if said.returncode == 0 else said.stderr).decode(encoding).strip()
