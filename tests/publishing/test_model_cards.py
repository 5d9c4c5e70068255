"""Model cards: README.md of a merged folder, with recipe, inputs, licences and numbers."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from mecha_exp import Job, from_mergekit, merge, merge_many, weighted_sum
from mecha_exp.graph.nodes import call
from mecha_exp.lab.content_hash import content_of
from mecha_exp.mergekit.writer import to_mergekit
from mecha_exp.publishing.inputs import inputs_of
from mecha_exp.publishing.licences import front_matter_of, licence_of

APACHE = "---\nlicense: apache-2.0\n---\n# The model\n"


APACHE_TEXT = "Apache License\n   Version 2.0, January 2004\n ... END OF TERMS AND CONDITIONS"
MIT_TEXT = """Permission is hereby granted, free of charge, to any person obtaining a copy ... to deal in the
Software without restriction ... OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE."""


def model_folder(folder: Path, seed: int, card: str = "") -> Path:
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    save_file({"layer.weight": torch.randn(4, 3)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    if card:
        (folder / "README.md").write_text(card)
    return folder


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two models of one licence, `a` and `b`, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        model_folder(Path(name), seed, APACHE)
    return ["a", "b"]


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def test_a_card_says_what_a_folder_was_made_of(two: list[str], tmp_path: Path):
    merge(weighted_sum(*two, alpha=0.3), "merged")

    text = card_of(Path("merged"))
    assert front_matter_of(Path("merged/README.md")) == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "tags": ["merge", "mecha_exp"],
    }
    assert "# Merge of a and b by Weighted sum\n" in text
    assert "| `weighted_sum` | alpha = 0.3 |" in text
    weights = hashlib.sha256(Path("a/model.safetensors").read_bytes()).hexdigest()
    content = hashlib.sha256(json.dumps([["model.safetensors", weights]]).encode()).hexdigest()
    assert f"| a | apache-2.0 | `{content}` |" in text
    assert 'merge "weighted_sum" &0 &1 alpha=0.3' in text
    assert "The model" not in text, "the card of an input describes the input"


def test_a_card_describes_the_method_and_not_the_rounding_of_its_result(two: list[str]):
    models = [{"model": "b", "parameters": {"weight": 0.5, "density": 0.5}}]
    ties = {"merge_method": "ties", "base_model": "a", "models": models, "dtype": "float32"}
    merge(from_mergekit(ties), "merged")

    text = card_of(Path("merged"))
    assert text.index("`ties`: ") < text.index("| `ties`") < text.index("| `cast`")


def test_the_same_merge_has_the_same_card(two: list[str]):
    for output in ("first", "second"):
        merge(weighted_sum(*two, alpha=0.3), output)

    assert card_of(Path("first")) == card_of(Path("second"))


def test_no_card_is_written_where_none_is_wanted(two: list[str]):
    recipe = weighted_sum(*two, alpha=0.3)

    merge(recipe, "merged", card=False)
    merge(recipe, "file.safetensors")
    merge_many([Job(recipe, Path("plain"))])

    assert sorted(file.name for file in Path("merged").iterdir()) == ["config.json", "model.safetensors"]
    assert not Path("README.md").exists() and not Path("plain/README.md").exists()


def test_a_readme_of_somebody_else_stays(two: list[str], caplog: pytest.LogCaptureFixture):
    Path("merged").mkdir()
    Path("merged/README.md").write_text("Mine.")

    merge(weighted_sum(*two, alpha=0.3), "merged")

    assert card_of(Path("merged")) == "Mine."
    assert "merged/README.md was not written by mecha_exp and stays as it is. Delete it for" in caplog.text


def test_a_card_of_ours_is_replaced_with_its_model(two: list[str]):
    for alpha in (0.3, 0.6):
        merge(weighted_sum(*two, alpha=alpha), "merged")

    assert "alpha = 0.6" in card_of(Path("merged"))


def test_the_card_of_a_model_that_is_replaced_without_one_goes(two: list[str]):
    for card in (True, False):
        merge(weighted_sum(*two, alpha=0.3), "merged", card=card)
        Path("merged/notes.txt").write_text("Mine.")

    assert sorted(file.name for file in Path("merged").iterdir()) == [
        "config.json",
        "model.safetensors",
        "notes.txt",
    ]


def test_the_current_folder_has_its_name_in_a_card(two: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir("a")

    merge(weighted_sum(".", "../b", alpha=0.3), "../merged")

    assert "# Merge of a and b by Weighted sum\n" in card_of(Path("../merged"))


def test_a_merge_that_fails_leaves_the_card_of_the_model_that_stays(two: list[str], tmp_path: Path):
    merge(weighted_sum(*two, alpha=0.3), "merged")
    save_file({"layer.weight": torch.full((4, 3), torch.nan)}, tmp_path / "nan.safetensors")

    with pytest.raises(Exception, match="not finite"):
        merge(weighted_sum("a", "nan.safetensors", alpha=0.6), "merged")

    assert "alpha = 0.3" in card_of(Path("merged"))


def test_different_licences_are_said_and_none_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    model_folder(Path("a"), 0, APACHE)
    model_folder(Path("b"), 1, "---\nlicense: other\nlicense_name: tiny-research\n---\n")
    model_folder(Path("c"), 2)

    merge(call("linear", "a", "b", "c"), "merged")

    text = card_of(Path("merged"))
    assert "license" not in front_matter_of(Path("merged/README.md"))
    assert "The inputs have different licences (apache-2.0, tiny-research), so this card names none." in text
    assert "The licence of c is not known from a card beside the weights." in text


def test_a_merge_of_a_merge_has_no_licence_that_its_inputs_do_not_share(tmp_path: Path):
    (model_folder(tmp_path / "a", 0) / "LICENSE").write_text(MIT_TEXT)
    b = model_folder(tmp_path / "b", 1, APACHE)
    merge(weighted_sum(tmp_path / "a", b, alpha=0.5), tmp_path / "first")
    assert (tmp_path / "first" / "LICENSE").exists()

    merge(weighted_sum(tmp_path / "first", tmp_path / "a", alpha=0.5), tmp_path / "second")

    assert licence_of(tmp_path / "first") is None
    assert "license" not in front_matter_of(tmp_path / "second" / "README.md")


def test_a_licence_without_a_word_of_the_hub_keeps_its_name(tmp_path: Path):
    card = "---\nlicense: other\nlicense_name: tiny\nlicense_link: https://example.org\n---\n"
    folders = [model_folder(tmp_path / name, seed, card) for seed, name in enumerate("ab")]

    merge(weighted_sum(*folders, alpha=0.5), tmp_path / "merged")

    entries = front_matter_of(tmp_path / "merged" / "README.md")
    assert entries["license"] == "other"
    assert (entries["license_name"], entries["license_link"]) == ("tiny", "https://example.org")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (APACHE_TEXT + "\nAPPENDIX: How to apply the Apache License to your work.", "apache-2.0"),
        ("Some rights reserved. Parts are under the\n" + APACHE_TEXT, ""),
        ("The code is under the Apache License, Version 2.0; the weights are for research only.", ""),
        ("MIT License\n\nCopyright (c) 2025 Somebody\n\n" + MIT_TEXT, "mit"),
        (MIT_TEXT, "mit"),
        ("Modified MIT License\n\n" + MIT_TEXT, ""),
        (MIT_TEXT + "\nIts name is shown to all users.", ""),
        ("All rights reserved.", ""),
        ("", ""),
    ],
)
def test_a_licence_file_is_known_by_its_words(text: str, word: str, tmp_path: Path):
    (tmp_path / "LICENSE.txt").write_text(text)

    licence = licence_of(tmp_path)

    assert licence is not None and licence.word == word


def test_a_licence_of_several_files_is_not_told_by_one_of_them(tmp_path: Path):
    (tmp_path / "LICENSE-CODE").write_text(MIT_TEXT)
    (tmp_path / "LICENSE-MODEL").write_text("For research only.")

    licence = licence_of(tmp_path)

    assert licence is not None and licence.word == "" and str(licence) == "see its licence file"


@pytest.mark.parametrize("text", ["", "no front matter", "---\n[", "---\n- a list\n---\n", "\x00\xff"])
def test_a_card_that_cannot_be_read_says_nothing(text: str, tmp_path: Path):
    (tmp_path / "README.md").write_text(text, encoding="latin-1")

    assert front_matter_of(tmp_path / "README.md") == {}
    assert licence_of(tmp_path) is None


def test_models_of_the_hub_are_linked(tmp_path: Path):
    cache = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    base = model_folder(cache, 0)
    local = model_folder(tmp_path / "local", 1)

    merge(weighted_sum(base, local, alpha=0.5), tmp_path / "merged")

    entries = front_matter_of(tmp_path / "merged" / "README.md")
    assert entries["base_model"] == ["org/name"] and entries["base_model_relation"] == "merge"
    assert "| org/name at `0123abcd` | unknown |" in card_of(tmp_path / "merged")
    assert "# Merge of org/name and local by Weighted sum\n" in card_of(tmp_path / "merged")


def test_a_model_in_memory_has_no_path_to_name(two: list[str]):
    merge(weighted_sum("a", {"layer.weight": torch.ones(4, 3)}, alpha=0.5), "merged")

    text = card_of(Path("merged"))
    assert "| in-memory model | unknown | `not known` |" in text
    assert "models in memory, which have no path" in text


def test_known_hashes_are_taken_and_inputs_not_read(two: list[str]):
    recipe = weighted_sum(*two, alpha=0.5)

    inputs = inputs_of(recipe, contents={Path("a"): "one"})

    assert [each.sha256 for each in inputs] == ["one", ""]
    assert inputs_of(recipe)[1].sha256 == content_of(Path("b"))


@pytest.fixture
def three(save) -> list[str]:
    """Three files of float32."""
    torch.manual_seed(0)
    return [save(name, {"layer.weight": torch.randn(6, 5), "bias": torch.randn(6)}) for name in "abc"]


RECIPES: dict[str, Callable[..., object]] = {
    "weights": lambda *m: call("linear", *m, weights=[0.2, 0.3, 0.5]),
    "a weight for all": lambda *m: call("linear", *m, normalize=False),
    "task arithmetic": lambda *m: call("task_arithmetic", *m, weights=0.4, scale=0.5),
    "ties": lambda *m: call("ties", *m, density=0.3, scale=0.7),
    "ties by sums": lambda *m: call("ties", *m, density=0.3, combine="sum"),
    "breadcrumbs": lambda *m: call("breadcrumbs", *m, density=0.5, gamma=0.02),
    "slerp": lambda *m: call("slerp_raw", *m[:2], alpha=0.3),
    "model stock": lambda *m: call("model_stock_pairwise", *m, cos_eps=1e-6),
    "sce": lambda *m: call("sce", *m, select_topk=0.5, equal_below=1e-6),
    "one model": lambda *m: call("passthrough", m[0], scale=0.5),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_configuration_of_mergekit_gives_the_same_bytes(name: str, dtype: torch.dtype | None, three):
    recipe = RECIPES[name](*three)

    config = to_mergekit(recipe, dtype)

    assert config is not None
    theirs, ours = merge(from_mergekit(config)), merge(recipe, output_dtype=dtype)
    assert all(torch.equal(theirs[key], ours[key]) for key in ours)


@pytest.mark.parametrize(
    "recipe",
    [
        lambda *m: weighted_sum(*m[:2], alpha=0.3),
        lambda *m: call("ties", *m, variant="paper"),
        lambda *m: call("sce", *m, select_topk=0.5),
        lambda *m: call("linear", *m, weights=[0.2, 0.3, 0.5]) + (call("add_difference", m[0], m[1] - m[2])),
        lambda *m: call("slerp_raw", *m[:2], alpha={"bias": 0.1, "default": 0.2}),
    ],
)
def test_what_mergekit_would_do_otherwise_has_no_configuration(recipe, three):
    from mecha_exp import model

    assert to_mergekit(recipe(*map(model, three))) is None


def test_an_adapter_has_no_configuration_since_mergekit_takes_it_beside_its_model(three, tmp_path: Path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    name = "base_model.model.layer"
    factors = {f"{name}.lora_A.weight": torch.ones(2, 5), f"{name}.lora_B.weight": torch.ones(6, 2)}
    save_file(factors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["layer"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))

    assert to_mergekit(call("ties", *three[:2], adapter)) is None


def test_the_verb_writes_the_configuration_that_it_ran(two: list[str], tmp_path: Path, app):
    config = {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 1}} for m in two]}
    (tmp_path / "linear.yml").write_text(yaml.safe_dump(config))

    outcome = app("merge", "linear.yml", "merged", "-p", "models.0.parameters.weight", "3", cwd=tmp_path)

    assert outcome.status == 0, outcome.err
    block = card_of(Path("merged")).partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(block)["models"][0] == {"model": "a", "parameters": {"weight": 3}}
    assert app("merge", "linear.yml", "bare", "--no-card", cwd=tmp_path).status == 0
    assert not Path("bare/README.md").exists()


def test_names_of_folders_make_no_headings_links_or_html(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = ["a\n# Heading", "<img src=x onerror=alert(1)> [b](https:c)"]
    for seed, name in enumerate(names):
        model_folder(Path(name), seed, APACHE)

    merge(weighted_sum(*names, alpha=0.3), "merged")

    text = card_of(Path("merged")).partition("\n---\n")[2].partition("## Recipe")[0]
    assert not [
        line for line in text.splitlines() if line.startswith("# ") and not line.startswith("# Merge of a ")
    ]
    assert "<img" not in text.replace("\\<img", "") and "[b]" not in text
