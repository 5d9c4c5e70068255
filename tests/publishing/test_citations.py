"""BibTeX of merge methods: every source that a docstring names has an entry, and `cite` prints those used."""

import re
from pathlib import Path

import pytest
import yaml

from mecha_exp.cli import main
from mecha_exp.method_api.registry import all_methods
from mecha_exp.runs.citations import OWN, cited, entries, methods_in, source_of

REPOSITORY = Path(__file__).parents[2]
OWN_WORK = ("this project", "torch.median", "Arcee Fusion", "torch.lerp", "diffusers", "PEFT")
"""Sources without a paper."""


def named(*methods: str) -> set[str]:
    return {entry.key for entry in cited(methods)[0]} - {OWN}


@pytest.fixture
def cite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the verb in an empty folder; returns its exit status and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["mecha_exp", "cite", *words])
        status = main()
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_every_number_of_arxiv_in_a_source_has_an_entry():
    known = {entry.fields.get("eprint") for entry in entries()}

    lacking = {
        (method.identifier, number)
        for method in all_methods()
        for number in re.findall(r"arXiv:(\d{4}\.\d{5})", source_of(method))
        if number not in known
    }

    assert not lacking


def test_every_source_of_a_method_has_an_entry_or_is_not_a_paper():
    for method in all_methods():
        source = source_of(method)
        if source and not any(word in source for word in OWN_WORK) and not method.is_conversion:
            assert cited([method.identifier])[1] == [], (method.identifier, source)


def test_entries_are_whole_and_of_different_keys():
    keys = [entry.key for entry in entries()]

    assert len(set(keys)) == len(keys) > 40
    for entry in entries():
        assert {"title", "author"} <= entry.fields.keys()
        assert "year" in entry.fields or entry.kind == "software"
        assert entry.text.count("{") == entry.text.count("}")
        assert re.search(r"(?<!\\)[&%#_]", "".join(entry.fields[f] for f in ("title", "author"))) is None or (
            entry.key == OWN
        )
    text = (REPOSITORY / "mecha_exp" / "runs" / "references.bib").read_text(encoding="utf-8")
    assert text.count("\n@") + 1 == len(keys)


def test_papers_name_every_author_and_where_they_appeared():
    venues = {"article": "journal", "inproceedings": "booktitle", "incollection": "booktitle"}
    for paper in (entry for entry in entries() if entry.kind != "software"):
        assert "others" not in paper.fields["author"].split(" and "), paper.key
        assert paper.fields.get(venues[paper.kind]), paper.key
        assert paper.fields["year"] in paper.key, "a key has the year of its venue"


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("ties", {"yadav2023ties"}),
        ("dare_ties", {"yu2024dare", "yadav2023ties"}),
        ("task_arithmetic", {"ilharco2023task"}),
        ("tsv_m", {"gargiulo2025task"}),
        ("clamp", {"sd_mecha"}),
        ("slerp", {"shoemake1985animating"}),
    ],
)
def test_a_method_is_cited_by_the_sources_of_its_docstring(method: str, keys: set[str]):
    assert named(method) == keys


def test_the_calls_of_a_recipe_are_read_from_its_text():
    text = 'version 0.1.0\nmodel "a"\nmerge "ties" &0 &0 alpha=1.0\nmerge "slerp" &1 &0\nmerge "ties" &2 &0\n'

    assert methods_in(text) == ["ties", "slerp"]


def test_cite_prints_bibtex_of_named_methods(cite):
    status, printed = cite("ties", "weighted_sum")

    assert status == 0
    assert printed.startswith("@software{mecha_exp,") and "@inproceedings{yadav2023ties," in printed
    assert "eprint = {2306.01708}" in printed and "source =" not in printed


def test_cite_says_what_a_word_could_have_meant(cite):
    status, printed = cite("tise")

    assert status == 1 and "'ties'" in printed and "is not a merge method, a sweep or a run" in printed


def test_this_projects_entry_is_that_of_the_citation_file():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    own = next(entry for entry in entries() if entry.key == OWN)

    assert own.fields["title"] == citation["title"] and own.fields["version"] == citation["version"]
    assert own.fields["license"] == citation["license"]
    assert own.fields["year"] == str(citation["date-released"])[:4]
