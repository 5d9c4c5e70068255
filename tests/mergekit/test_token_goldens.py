"""Rows of tokens are moved as mergekit 0.1.5 moves them; `make parity` makes the golden file anew."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from mergekit_tokens import TOKEN_CONFIGS, VOCABULARY_KEYS, write_token_models
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mecha_exp import MechaError, from_mergekit, merge
from mecha_exp.cli import main
from mecha_exp.sources.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "mergekit-tokens.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models that the configurations name; tests write nothing into it."""
    folder = tmp_path_factory.mktemp("models")
    write_token_models(folder)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, config: str, output: str) -> None:
    Path("config.yml").write_text(config)
    monkeypatch.setattr("sys.argv", ["mecha_exp", "merge", "config.yml", output])
    assert main() == 0


def test_every_configuration_has_its_golden():
    with safe_open(GOLDEN, framework="pt") as golden:
        assert json.loads(golden.metadata()["configs"]).keys() == TOKEN_CONFIGS.keys()


@pytest.mark.parametrize("name", TOKEN_CONFIGS)
def test_the_output_and_its_tokens_are_those_of_mergekit(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
):
    run(monkeypatch, TOKEN_CONFIGS[name], "merged")

    merged = load_file("merged/model.safetensors")
    tokens = Tokenizer.beside(here / "merged").in_order()
    with safe_open(GOLDEN, framework="pt") as golden:
        facts = json.loads(golden.metadata()["configs"])[name]
        expected = {
            k.partition("|")[2]: golden.get_tensor(k) for k in golden.keys() if k.startswith(f"{name}|")
        }
    assert sorted(tokens) == sorted(facts["tokens"])
    config = json.loads((here / "merged" / "config.json").read_text())
    assert (config["vocab_size"], config["num_hidden_layers"]) == (
        facts["vocab_size"],
        facts["num_hidden_layers"],
    )
    assert merged.keys() == expected.keys()
    place = {token: number for number, token in enumerate(tokens)}
    order = [place[token] for token in facts["tokens"]]  # new tokens of a union have any order in mergekit
    order += range(len(tokens), facts["vocab_size"])
    for key, tensor in expected.items():
        ours = merged[key][order] if key in VOCABULARY_KEYS else merged[key]
        assert ours.dtype == tensor.dtype
        torch.testing.assert_close(ours, tensor, rtol=1e-5, atol=1e-5)


def test_a_permutation_merges_like_the_aligned_model_to_the_bit(here: Path):
    config = TOKEN_CONFIGS["a permutation, by the tokens of the base"]

    moved = merge(from_mergekit(yaml.safe_load(config)))
    aligned = merge(from_mergekit(yaml.safe_load(config.replace("moved", "b"))))

    assert moved.keys() == aligned.keys()
    assert all(torch.equal(moved[key], aligned[key]) for key in aligned)


def test_models_with_the_same_tokens_are_read_as_they_are(here: Path):
    config = yaml.safe_load(TOKEN_CONFIGS["a permutation, by the tokens of the base"])
    config["models"][1]["model"] = "b"

    assert from_mergekit(config) is from_mergekit({**config, "tokenizer_source": None})


def test_an_adapter_moves_with_its_model_and_one_of_rows_is_refused(here: Path, models: Path):
    peft = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "moved"}
    config = yaml.safe_load(TOKEN_CONFIGS["a permutation, by the tokens of the base"])
    config["models"][1]["model"] = "moved+adapter"

    def adapter(module: str, *shape: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        names = {
            f"base_model.model.{module}.lora_A.weight": (2, 8),
            f"base_model.model.{module}.lora_B.weight": shape,
        }
        return {key: torch.randn(each, generator=generator) for key, each in names.items()}

    def write(tensors: dict[str, torch.Tensor], target: str) -> None:
        (here / "adapter").mkdir(exist_ok=True)
        save_file(tensors, here / "adapter" / "adapter_model.safetensors")
        (here / "adapter" / "adapter_config.json").write_text(
            json.dumps({**peft, "target_modules": [target]})
        )

    write(adapter("model.layers.1.mlp.up_proj", 8, 2), "up_proj")
    made = merge(from_mergekit(config))
    config["models"][1]["model"] = "b+adapter"
    expected = merge(from_mergekit(config))
    assert all(torch.equal(made[key], expected[key]) for key in expected)

    config["models"][1]["model"] = "moved+adapter"
    write(adapter("lm_head", 16, 2), "lm_head")
    with pytest.raises(MechaError, match=r"moved\+adapter: the adapter changes rows of tokens \(base_model"):
        from_mergekit(config)


UNION = "merge_method: linear\nmodels: [{model: moved}, {model: words}]\nparameters: {weight: 1}\n"


def said(config: str) -> str:
    with pytest.raises(MechaError) as error:
        from_mergekit(yaml.safe_load(config))
    return str(error.value)


def token(entry: str) -> str:
    return f"{UNION}tokenizer: {{source: union, tokens: {{t3: {entry}}}}}"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (token("3"), "tokenizer.tokens.t3: expected a mapping with 'source', got 3."),
        (token("{}"), "tokenizer.tokens.t3: names no 'source', without which mergekit has no row."),
        (token("{sorce: a}"), "tokenizer.tokens.t3: unknown word 'sorce'. Did you mean 'source' or"),
        (token("{source: words, force: 1}"), "tokenizer.tokens.t3.force: expected true or false, got 1."),
        (token("{source: {kind: mean}}"), "t3.source.kind: expected zero or model_token, got 'mean'."),
        (token("{source: {kind: zero, token: a}}"), "tokenizer.tokens.t3.source: unknown word 'token'."),
        (
            token("{source: {kind: model_token, model: words}}"),
            "tokenizer.tokens.t3.source: expected either 'token', a text, or 'token_id', a whole number.",
        ),
        (
            token("{source: {kind: model_token, model: words, token: t12}, force: true}"),
            "tokenizer.tokens.t3.source: words has no row for the token 't12'.",
        ),
        (
            token("{source: {kind: model_token, model: words, token_id: 17}, force: true}"),
            "tokenizer.tokens.t3.source: words has no row for the token 17.",
        ),
        (
            token("{source: chat, force: true}"),
            "tokenizer.tokens.t3: chat is not among the models that are merged, and mergekit takes rows of",
        ),
        (UNION + "tokenizer: {tokens: [t3]}", "tokenizer.tokens: expected a mapping of tokens, got ['t3']."),
        (
            UNION + "tokenizer: {pad_to_multiple_of: 0}",
            "tokenizer.pad_to_multiple_of: expected a whole number above 0, got 0.",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(config: str, message: str, here: Path):
    assert message in said(config)


def test_tokenizers_that_do_not_say_their_rows_are_refused(here: Path, models: Path):
    shutil.copytree(models / "words", here / "words")
    file = here / "words" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"][0]["id"] = 17
    file.write_text(json.dumps(content))
    assert "words: the tokenizer has 17 tokens, and none with the number 16" in said(
        UNION + "tokenizer_source: words"
    )
    content["added_tokens"] = [
        {**content["added_tokens"][0], "id": 16 + n, "content": f"x{n}"} for n in (0, 1)
    ]
    file.write_text(json.dumps(content))
    assert "tokenizer_source: 1 token of words is beyond the rows of its embedding: 'x1'." in said(
        UNION + "tokenizer_source: words"
    )
    union = UNION + "tokenizer_source: union"
    assert "tokenizer_source: 1 token of words is beyond the rows of its embedding: 'x1'." in said(union)
    file.unlink()
    assert "there is no tokenizer.json beside" in said(UNION + "tokenizer_source: union")


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_the_union_and_finds_each_row_by_its_token(
    here: Path, models: Path, monkeypatch: pytest.MonkeyPatch
):
    transformers = pytest.importorskip("transformers")
    run(monkeypatch, TOKEN_CONFIGS["a union with a base"], "merged")

    tokenizer = transformers.AutoTokenizer.from_pretrained(here / "merged")
    model = transformers.AutoModelForCausalLM.from_pretrained(here / "merged").eval()
    encoded = tokenizer("t3 <|user|> w2", return_tensors="pt")["input_ids"]

    assert tokenizer.convert_ids_to_tokens(encoded[0]) == ["t3", "<|user|>", "w2"]
    assert len(tokenizer) == model.config.vocab_size == model.lm_head.weight.shape[0]
    assert model(encoded).logits.isfinite().all()
