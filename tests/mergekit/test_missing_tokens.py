"""Tokens that a model lacks get rows as mergekit-tokensurgeon makes them; `make parity` writes its file."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mergekit_tokens import TRANSPLANTS, VOCABULARY_KEYS, with_rows, write_token_models
from mergekit_tokens import tokenizer as word_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mecha_exp import (
    CheckpointError,
    ConfigError,
    EngineOptions,
    MechaError,
    RecipeError,
    align_tokens,
    deserialize,
    merge,
    serialize,
    slerp,
)
from mecha_exp.cli import main
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.recipe.token_names import TokenNames
from mecha_exp.sources.tokenizer import Tokenizer
from mecha_exp.sources.views import pursuit
from mecha_exp.sources.views.pursuit import pursue, sparse_sums

GOLDEN = Path(__file__).parents[1] / "golden" / "mergekit-tokensurgeon.safetensors"
EMBEDDING, HEAD = VOCABULARY_KEYS
BYTE_LEVEL = {"decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}
approximate_rows = resolve_method("approximate_rows")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny Llamas of several vocabularies; tests write nothing into it."""
    folder = tmp_path_factory.mktemp("models")
    write_token_models(folder)
    return folder


@pytest.fixture(autouse=True)
def inside(here: Path, models: Path) -> None:
    """The current folder, with links to the models in it."""
    for path in models.iterdir():
        (here / path.name).symlink_to(path)


def write(name: str, tokens: list[str], state: Mapping[str, torch.Tensor], **settings: object) -> None:
    Path(name).mkdir()
    save_file(dict(state), Path(name) / "model.safetensors")
    (Path(name) / "config.json").write_text(json.dumps({"vocab_size": len(tokens), **settings}))
    (Path(name) / "tokenizer.json").write_text(json.dumps(word_tokenizer(tokens, [])))


def made_of(*models: str, **how: object) -> dict[str, torch.Tensor]:
    return merge(align_tokens(*models, **how))


@pytest.mark.parametrize("name", TRANSPLANTS)
def test_the_rows_are_those_of_tokensurgeon(name: str):
    way, *words = name.split()
    if way == "pieces":
        pytest.importorskip("tokenizers")
    k = 6 if words else 4

    made = made_of("a", "words", missing=way, k=k)

    with safe_open(GOLDEN, framework="pt") as golden:
        for key in VOCABULARY_KEYS:
            torch.testing.assert_close(made[key], golden.get_tensor(f"{name}|{key}"), rtol=1e-5, atol=1e-5)
    own = load_file("a/model.safetensors")
    assert all(torch.equal(made[key], own[key]) for key in own.keys() - set(VOCABULARY_KEYS))
    assert torch.equal(made[EMBEDDING][:10], own[EMBEDDING][:10])


def test_more_rows_than_dimensions_end_when_the_sum_is_exact():
    """Of eight dimensions and sums of ten mergekit 0.1.5 makes rows of a million: it divides by rounding."""
    exact, more = (made_of("a", "words", missing="omp", k=k)[EMBEDDING] for k in (8, 10))

    torch.testing.assert_close(more, exact, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 1000), st.integers(1, 4))
def test_a_sum_of_few_atoms_is_found_again(seed: int, count: int):
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.linalg.qr(torch.randn(12, 12, generator=generator))[0][:8]
    places = torch.randperm(8, generator=generator)[:count]
    target = (torch.arange(1, count + 1)[:, None] * atoms[places]).sum(0, keepdim=True)

    found, coefficients = pursue(target, atoms, 6)

    used = coefficients[0].abs() > 1e-4
    assert sorted(found[0, used].tolist()) == sorted(places.tolist())
    torch.testing.assert_close((coefficients @ atoms[found[0]].double()).float(), target)


@given(st.integers(0, 1000), st.integers(1, 9))
def test_the_residual_is_that_of_least_squares(seed: int, count: int):
    generator = torch.Generator().manual_seed(seed)
    atoms, target = torch.randn(20, 7, generator=generator), torch.randn(1, 7, generator=generator)

    places, coefficients = pursue(target, atoms, count)

    chosen = atoms[places[0]].double()
    residual = target.double() - coefficients @ chosen
    assert (chosen[coefficients[0] != 0] @ residual[0]).abs().max() < 1e-5
    assert residual.norm() < 1e-5 or (count < 7 and len(set(places[0].tolist())) == count)


def test_atoms_that_depend_on_each_other_and_rows_of_zeros_do_no_harm():
    atoms = torch.tensor([[1.0, 0, 0], [2.0, 0, 0], [0.0, 0, 0], [1.0, 0, 0]])
    targets = torch.tensor([[3.0, 0, 4], [0.0, 0, 0], [0.0, 5, 0]])

    places, coefficients = pursue(targets, atoms, 4)

    sums = torch.stack([c @ atoms[p].double() for c, p in zip(coefficients, places, strict=True)])
    assert sums.tolist() == [[3.0, 0, 0], [0.0, 0, 0], [0.0, 0, 0]]
    assert (coefficients != 0).sum() == 1


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    targets, atoms = torch.randn(11, 6, generator=generator), torch.randn(9, 6, generator=generator)
    whole = sparse_sums(lambda first, end: targets[first:end], 11, atoms, 3)

    monkeypatch.setattr(pursuit, "_BLOCK_BYTES", 1000)
    blocks = sparse_sums(lambda first, end: targets[first:end], 11, atoms, 3)

    assert torch.equal(whole[0], blocks[0])
    torch.testing.assert_close(whole[1], blocks[1])


@pytest.mark.parametrize("tile", [4, 12, 1 << 18])
def test_the_bytes_do_not_depend_on_tiles_and_the_recipe_is_text(here: Path, tile: int):
    recipe = slerp(align_tokens("a", "words", missing="omp", k=4), "words", alpha=0.3)

    merge(recipe, "made", EngineOptions(tile_size=tile, workers=2))
    merge(deserialize(serialize(recipe)), "again")

    made, again = (load_file(here / name / "model.safetensors") for name in ("made", "again"))
    assert all(torch.equal(made[key], again[key]) for key in made)
    assert (here / "made" / "tokenizer.json").read_bytes() == (here / "words/tokenizer.json").read_bytes()


def test_models_of_other_sizes_give_the_tokens(here: Path):
    """A donor that is tied and twice as wide: its embedding stands for its output layer."""
    own = load_file("a/model.safetensors")
    tokens = [f"t{number}" for number in range(16)]
    wide = {"model.embed_tokens.weight": torch.cat([own[EMBEDDING], 2 * own[EMBEDDING]], dim=1)}
    wide = with_rows(wide, [*range(16), 3])
    write("wide", [*tokens, "new"], {key: tensor.contiguous() for key, tensor in wide.items()})

    made = made_of("a", "wide", missing="omp", k=1)

    assert made[EMBEDDING].shape == made[HEAD].shape == (17, 8)
    torch.testing.assert_close(made[EMBEDDING][16], 1.25 * own[EMBEDDING][3])
    torch.testing.assert_close(made[HEAD][16], 1.25 * own[HEAD][3])


def test_a_bias_of_tokens_is_zero():
    tokens = [f"t{number}" for number in range(4)]
    state = {"lm_head.weight": torch.eye(4), "lm_head.bias": torch.ones(4)}
    write("small", tokens, state)
    write("large", [*tokens, "new"], {"lm_head.weight": torch.ones(5, 4), "lm_head.bias": torch.ones(5)})

    made = made_of("small", "large", missing="omp", k=1)

    assert made["lm_head.bias"].tolist() == [1, 1, 1, 1, 0]


def test_the_numbers_of_special_tokens_are_those_of_the_tokenizer(here: Path):
    state = {"model.embed_tokens.weight": torch.eye(4)}
    write("old", ["<s>", "</s>", "a", "b"], state, eos_token_id=1, pad_token_id=3, layers=1)
    write("new", ["a", "b", "<s>", "</s>"], state, eos_token_id=3)
    settings = {"eos_token_id": [1, 2], "temperature": 0.5}
    (here / "old" / "generation_config.json").write_text(json.dumps(settings))

    merge(align_tokens("old", "new"), "made")

    config = json.loads((here / "made" / "config.json").read_text())
    assert config == {"vocab_size": 4, "layers": 1, "eos_token_id": 3, "pad_token_id": None}
    generation = json.loads((here / "made" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 3, "temperature": 0.5}


def names(folder: str, vocabulary: list[str], settings: Mapping[str, object], **special: str) -> TokenNames:
    content = {**word_tokenizer(vocabulary, []), **settings}
    content["added_tokens"] = [
        {"id": vocabulary.index(token), "content": token, "special": True} for token in special.values()
    ]
    Path(folder).mkdir()
    Path(folder, "tokenizer.json").write_text(json.dumps(content))
    Path(folder, "tokenizer_config.json").write_text(json.dumps(special))
    return TokenNames(Tokenizer.beside(Path(folder)))


def test_tokens_of_two_families_are_compared_by_text_and_kind():
    pieces = names("pieces", ["</s>", "▁the", "er", "▁é", "<0x0A>", "<0x41>", "A", "é"], {}, eos_token="</s>")
    level = names("level", ["<|end|>", "Ġthe", "er", "ĠÃ©", "Ċ", "A", "é"], BYTE_LEVEL, eos_token="<|end|>")

    rows = {token: pieces.row_of(token, level) for token in level.rows}

    assert rows == {"<|end|>": 0, "Ġthe": 1, "er": 2, "ĠÃ©": 3, "Ċ": 4, "A": 6, "é": None}  # the byte 0xE9
    assert [level.row_of(token, pieces) for token in pieces.rows] == [0, 1, 2, 3, 4, 5, 5, None]
    assert [pieces.row_of(token, pieces) for token in pieces.rows] == list(range(8))


def test_a_word_is_split_with_one_space_before_it():
    pytest.importorskip("tokenizers")
    level = names("level", ["Ġthe", "the"], BYTE_LEVEL)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
    llama = names("llama", ["t0", "▁the", "▁▁the", "▁a"], {"normalizer": normalizer})

    assert llama.pieces_of("Ġthe", level) == llama.pieces_of("the", level) == [1]


def test_a_part_of_a_character_is_made_of_its_bytes():
    pytest.importorskip("tokenizers")
    level = names("level", ["Ã", "Ã©Ã"], BYTE_LEVEL)
    fallback = names("pieces", ["<0xC3>", "<0xA9>", "t0"], {})

    assert fallback.pieces_of("Ã©Ã", level) == [0, 1, 0]
    with pytest.raises(CheckpointError, match=r"level has no pieces with a row for 'Â', a token of part"):
        level.pieces_of("Â", names("part", ["Â"], BYTE_LEVEL))
    with pytest.raises(CheckpointError, match=r"cannot split 't9' by the tokenizer.json in level: "):
        level.pieces_of("t9", fallback)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({}, CheckpointError, "or say how their rows are made: missing=zero, mean, pieces, omp"),
        (
            {"missing": "opm"},
            ConfigError,
            "missing: expected one of error, zero, mean, pieces, omp, got 'opm'.",
        ),
        ({"missing": "omp", "k": 0}, ConfigError, "k: expected a whole number above 0, got 0."),
        (
            {"missing": "omp"},
            CheckpointError,
            "a and words share 10 tokens, and missing=omp adds the rows of k=64 of them. Set k=10 or less.",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(how: dict, error: type[MechaError], message: str):
    with pytest.raises(error) as raised:
        made_of("a", "words", **how)
    assert message in str(raised.value)


def test_pieces_need_a_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ConfigError, match=r"missing=pieces splits tokens with the library tokenizers, which is"
    ):
        made_of("a", "words", missing="pieces")


def test_models_without_shared_tokens_are_refused():
    write("other", ["x", "y"], {"model.embed_tokens.weight": torch.eye(2)})
    with pytest.raises(
        CheckpointError, match=r"a and other share 0 tokens, .* Set missing=pieces, mean or zero"
    ):
        made_of("a", "other", missing="omp", k=1)


def test_a_donor_whose_rows_are_not_finite_is_refused():
    words = load_file("words/model.safetensors")
    words[HEAD][3, 1] = float("nan")
    write("broken", list(Tokenizer.beside(Path("words")).in_order()), words)
    with pytest.raises(
        CheckpointError, match=r"row 3 of 'lm_head.weight' of broken has a NaN or an infinity"
    ):
        made_of("a", "broken", missing="omp", k=2)


@pytest.mark.parametrize(
    ("shared", "rows", "error", "message"),
    [
        ("0:3", "5", RecipeError, "shared: expected a row of each model for every token, such as 0@5+1@7."),
        ("0@0:3+1@0:3", "1@5", RecipeError, "rows: expected rows of the donor alone, such as 5 and 9:12."),
        ("0@0:2+1@0:2", "5", RecipeError, "a sum of k=3 rows is asked for, and the models share 2 tokens."),
        ("0@0:3+1@0:3", "99", CheckpointError, "is asked for, and words has 17, numbered"),
    ],
)
def test_rows_that_are_not_there_are_refused(shared: str, rows: str, error: type[MechaError], message: str):
    with pytest.raises(error) as raised:
        merge(approximate_rows("a", "words", shared=shared, rows=rows, k=3))
    assert message in str(raised.value)


def test_merges_and_donors_of_other_kinds_are_refused():
    with pytest.raises(RecipeError, match=r"approximate_rows: a is slerp\(a, b\), a merge"):
        merge(approximate_rows(slerp("a", "base"), "words", shared="0@0:3+1@0:3", rows="5", k=2))
    write("image", ["t0", "t1"], {"embed_in.weight": torch.eye(2), "wte.weight": torch.eye(2)})
    with pytest.raises(CheckpointError, match=r"has no counterpart in image, which has 2 tensors with a row"):
        merge(approximate_rows("a", "image", shared="0@0+1@0", rows="1", k=1))
    whole = {key: torch.ones(3, 2, dtype=torch.int32) for key in VOCABULARY_KEYS}
    with pytest.raises(CheckpointError, match=r"is I32\. Rows of floating point are added"):
        merge(approximate_rows("a", whole, shared="0@0+1@0", rows="1", k=1))


def test_the_recipe_sweeps_over_the_number_of_rows(here: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    words = ["recipe=align_tokens", "models.base=a", "tokenizer=words", "k=2,4", "evaluator=none"]
    monkeypatch.setattr("sys.argv", ["mecha_exp", *words, "tracking=none", "-m"])

    assert main() == 0, capsys.readouterr().err

    outputs = sorted(here.glob("outputs/multiruns/*/*/model/model.safetensors"))
    made = [load_file(path)[EMBEDDING] for path in outputs]
    expected = [made_of("a", "words", missing="omp", k=k)[EMBEDDING] for k in (2, 4)]
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("missing=opm", "recipe: missing: expected one of error, zero, mean, pieces, omp, got 'opm'."),
        ("k=40", "recipe: align_tokens: a and words share 10 tokens"),
        ("tokenizer=3", "recipe: expected the paths of models in 'align_tokens:', 'tokenizer:' and"),
    ],
)
def test_the_recipe_says_what_is_wrong(word: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys):
    words = ["recipe=align_tokens", "models.base=a", "tokenizer=words", "k=4", word, "evaluator=none"]
    monkeypatch.setattr("sys.argv", ["mecha_exp", *words])

    assert main() == 1
    assert message in " ".join(capsys.readouterr().err.split())
