"""Rows of tokens are taken by token, in place: permuted, from other models, as means and as zeros."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mecha_exp import (
    CheckpointError,
    EngineOptions,
    MechaError,
    RecipeError,
    align_tokens,
    deserialize,
    merge,
    merge_many,
    model,
    serialize,
    slerp,
    stack_layers,
    ties,
    weighted_sum,
)
from mecha_exp.graph.nodes import InMemory
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.sources.memory import MemorySource
from mecha_exp.sources.views.row_table import RowTable
from mecha_exp.sources.views.rows import RowsSource

take_rows = resolve_method("take_rows")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENS = ["<s>", "</s>", "a", "b", "c", "d", "e", "f"]
WIDTH = 5


def tensors(seed: int, rows: int = len(TOKENS)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {EMBEDDING: (rows, WIDTH), "model.layers.0.w.weight": (3, WIDTH), HEAD: (rows, WIDTH)}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def write(folder: Path, tokens: list[str], state: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors")
    content = {"vocab_size": state[EMBEDDING].shape[0], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(content))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary}, "added_tokens": []})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models a and b, and `moved`, which is b with its tokens in another order."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", TOKENS, tensors(1))
    write(tmp_path / "b", TOKENS, tensors(2))
    order = [5, 0, 7, 1, 2, 6, 3, 4]
    moved = {k: t[order].clone() if k in (EMBEDDING, HEAD) else t for k, t in tensors(2).items()}
    write(tmp_path / "moved", [TOKENS[number] for number in order], moved)
    return tmp_path


@pytest.mark.parametrize("tile", [4, 12, 1 << 18])
def test_models_whose_tokenizers_are_permutations_merge_like_aligned_ones_to_the_bit(here: Path, tile: int):
    for recipe in (lambda b: slerp("a", b, alpha=0.3), lambda b: ties("a", b)):
        jobs = [(recipe("b"), here / "plain"), (recipe(align_tokens("moved", "a")), here / "made")]
        merge_many(jobs, EngineOptions(tile_size=tile))

        plain, made = (load_file(here / name / "model.safetensors") for name in ("plain", "made"))
        assert all(torch.equal(plain[key], made[key]) for key in plain | made)
        assert (here / "made" / "tokenizer.json").read_bytes() == (here / "a/tokenizer.json").read_bytes()


def test_a_folder_gets_the_tokenizer_of_its_rows(here: Path):
    merge(align_tokens("moved", "a"), "made")

    assert (here / "made" / "tokenizer.json").read_bytes() == (here / "a/tokenizer.json").read_bytes()
    merge(take_rows("a", rows="0:4"), "cut")
    assert not (here / "cut" / "tokenizer.json").exists()
    assert json.loads((here / "cut" / "config.json").read_text())["vocab_size"] == 4
    assert load_file(here / "cut" / "model.safetensors")[HEAD].shape == (4, WIDTH)


def test_tokens_that_a_model_lacks_come_from_the_next_that_has_them(here: Path):
    write(here / "more", [*TOKENS, "new"], tensors(3, 9))

    merge(weighted_sum("more", align_tokens("moved", "more", "more"), alpha=1.0), "made")

    made, more, b = (load_file(here / n / "model.safetensors") for n in ("made", "more", "b"))
    assert torch.equal(made[EMBEDDING][:8], b[EMBEDDING])
    assert torch.equal(made[HEAD][8], more[HEAD][8])
    assert json.loads((here / "made" / "config.json").read_text())["vocab_size"] == 9


def test_the_words_for_rows():
    a, b, c = (tensors(seed) for seed in (1, 2, 3))

    made = merge(take_rows(a, b, c, rows="2:4 7 1@1 zero*2 1@0:2+2@4:6 0@3+1@3 zero mean*3"))

    expected = [a[HEAD][2:4], a[HEAD][7:8], b[HEAD][1:2], torch.zeros(2, WIDTH)]
    expected += [(b[HEAD][0:2] + c[HEAD][4:6]) / 2, ((a[HEAD] + b[HEAD]) / 2)[3:4], torch.zeros(1, WIDTH)]
    mean = torch.cat(expected).mean(0, keepdim=True)
    torch.testing.assert_close(made[HEAD], torch.cat([*expected, mean, mean, mean]))
    assert torch.equal(made["model.layers.0.w.weight"], a["model.layers.0.w.weight"])


class Counting(MemorySource):
    """A model in memory that counts the elements which are read of it."""

    count = 0

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        self.count += out.numel()
        super().read_into(key, start, out)


@given(st.integers(0, 8 * WIDTH - 1), st.integers(1, 3 * WIDTH))
def test_a_tile_reads_the_elements_that_it_has_and_no_others(start: int, count: int):
    order = [5, 0, 7, 1, 2, 6, 3, 4]
    source = Counting(InMemory(tensors(1)))
    view = RowsSource(source, RowTable.of([((0, row),) for row in order]))
    tile = torch.empty(min(count, len(order) * WIDTH - start))

    view.read_into(HEAD, start, tile)

    assert source.count == tile.numel()
    assert torch.equal(tile, tensors(1)[HEAD][order].flatten()[start : start + tile.numel()])


def test_rows_of_several_dtypes_have_the_one_that_all_are_promoted_to():
    a, b = ({k: t.to(dtype) for k, t in tensors(1).items()} for dtype in (torch.float16, torch.bfloat16))

    made = merge(take_rows(a, b, rows="0:2 1@5"))

    assert made[HEAD].dtype is torch.float32
    assert torch.equal(made[HEAD], torch.cat([a[HEAD][:2].float(), b[HEAD][5:6].float()]))
    assert made["model.layers.0.w.weight"].dtype is torch.float16


def test_layers_and_rows_are_taken_together(here: Path):
    stacked = merge(take_rows(stack_layers(("a", 0, 1)), rows="1:3"))

    assert torch.equal(stacked[EMBEDDING], tensors(1)[EMBEDDING][1:3])


def test_a_recipe_with_rows_is_text_and_merges_again_to_the_same_bytes(here: Path):
    recipe = slerp("a", align_tokens("moved", "a"), alpha=0.3)

    assert deserialize(serialize(recipe)) is recipe
    merge(recipe, "one.safetensors")
    merge(deserialize(serialize(recipe)), "two.safetensors")
    assert (here / "one.safetensors").read_bytes() == (here / "two.safetensors").read_bytes()


ORIGINS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=2).map(tuple)


@given(st.lists(ORIGINS, min_size=1, max_size=12), st.integers(0, 3))
def test_a_table_is_what_its_text_says(rows: list, padding: int):
    table = RowTable.of(rows, padding)

    assert RowTable.parse(str(table)) == table
    listed = [
        tuple((model, row + place) for model, row in run.origins)
        for run in table.runs
        for place in range(run.count)
    ]
    assert listed == rows
    assert all(run.at <= row < run.end for row in range(table.count) for run in table.between(row, row + 1))


def said(recipe_of, error: type[MechaError]) -> str:
    with pytest.raises(error) as raised:
        merge(recipe_of())
    return str(raised.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "rows: expected words such as 0:32000, got ''."),
        ("mean*2", "rows: expected words such as 0:32000"),
        ("1:2 three", "rows: 'three' cannot be read. Rows are 0:32000, 1@5 of the next model"),
        ("5:5", "rows: '5:5' cannot be read."),
        ("0@1:3+1@4", "rows: '0@1:3+1@4' cannot be read."),
        ("1 mean*2 3", "rows: '3' comes after the mean of all rows, which is the last."),
        ("1@2", "take_rows: rows are taken from model 1, counted from 0, and 1 are given."),
    ],
)
def test_words_that_cannot_be_read_are_refused(rows: str, message: str):
    assert message in said(lambda: take_rows(tensors(1), rows=rows), RecipeError)


def test_a_model_without_rows_of_tokens_is_refused():
    with pytest.raises(CheckpointError, match="has no key that is known for a row for each token"):
        merge(take_rows({"token_embd.weight": torch.ones(3, 2)}, rows="0:2"))


def test_rows_that_are_not_there_are_refused():
    a, b = tensors(1), tensors(2)
    b[HEAD] = b[HEAD][:, :3]

    assert f"row 8 of '{EMBEDDING}' is asked for" in said(lambda: take_rows(a, rows="0:9"), CheckpointError)
    assert "Rows of one size are moved." in said(lambda: take_rows(a, b, rows="0:4 1@4"), CheckpointError)
    del b[EMBEDDING]
    text = said(lambda: take_rows(a, b, rows="0:4 1@4"), CheckpointError)
    assert f"which has no '{EMBEDDING}'." in text
    whole = {EMBEDDING: torch.ones(4, 2, dtype=torch.int32)}
    assert "Rows of floating point are moved." in said(lambda: take_rows(whole, rows="1"), CheckpointError)
    merged = said(lambda: take_rows(slerp(a, tensors(3)), rows="1"), RecipeError)
    assert "take_rows: models is slerp(a, b), a merge, and it reads models where they are stored" in merged


def test_tokens_that_cannot_be_aligned_are_refused(here: Path):
    write(here / "more", [*TOKENS, "new"], tensors(3, 9))
    assert "have no row for 1 token of more: 'new'. Name a model" in said(
        lambda: align_tokens("a", "more"), CheckpointError
    )
    write(here / "odd", TOKENS, tensors(4), pad_token="<pad>")
    assert "tokenizer_config.json names '<pad>', which tokenizer.json does not have" in said(
        lambda: align_tokens("odd", "a"), CheckpointError
    )
    write(here / "gap", TOKENS, tensors(4))
    (here / "gap" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<s>": 0, "b": 2}}}))
    assert "2 tokens, and none with the number 1, so that" in said(
        lambda: align_tokens("a", "gap"), CheckpointError
    )
    (here / "gap" / "tokenizer.json").unlink()
    assert "there is no tokenizer.json beside gap, by which rows are moved. Write it" in said(
        lambda: align_tokens("a", "gap"), CheckpointError
    )
    save_file({"w": torch.ones(2)}, here / "odd" / "model.safetensors")
    (here / "odd" / "tokenizer_config.json").unlink()
    assert "none of its keys is known for a row for each token" in said(
        lambda: align_tokens("odd", "a"), CheckpointError
    )


def test_models_beside_rows_that_are_taken_keep_their_checks(here: Path):
    recipe = weighted_sum(align_tokens("moved", "a"), weighted_sum("a", model("moved2")), alpha=0.5)
    write(here / "moved2", TOKENS[::-1], tensors(5))

    with pytest.raises(CheckpointError, match="the tokenizers beside") as raised:
        merge(recipe)
    assert "moved2" in str(raised.value)


def test_a_model_that_also_gives_rows_keeps_its_check(here: Path):
    write(here / "reversed", TOKENS[::-1], tensors(5))
    direct = weighted_sum("a", model("reversed"), alpha=0.5)

    said = (
        r"the tokenizers beside .*a and .*reversed differ, .* \(recipe=align_tokens gives a model the tokens"
    )
    with pytest.raises(CheckpointError, match=said):
        merge(weighted_sum(align_tokens("moved", "a", "a"), direct, alpha=0.5))


def test_rows_that_are_taken_for_other_tokens_are_not_merged(here: Path):
    for recipe in (
        weighted_sum("a", align_tokens("b", "moved"), alpha=0.5),
        weighted_sum(align_tokens("b", "a"), align_tokens("b", "moved"), alpha=0.5),
    ):
        with pytest.raises(CheckpointError, match=r"the tokenizers beside .*a and .*moved differ"):
            merge(recipe)

    merge_many([(align_tokens("b", "a"), here / "one"), (align_tokens("b", "moved"), here / "two")])
    assert (here / "two" / "tokenizer.json").read_bytes() == (here / "moved/tokenizer.json").read_bytes()


def test_layers_without_rows_may_come_from_a_model_with_other_tokens(here: Path):
    made = merge(stack_layers(("a", 0, 1), ("moved", 0, 1), ("a", 0, 1)))

    a, moved = (load_file(here / name / "model.safetensors") for name in ("a", "moved"))
    assert torch.equal(made[EMBEDDING], a[EMBEDDING])
    assert torch.equal(made["model.layers.1.w.weight"], moved["model.layers.0.w.weight"])
