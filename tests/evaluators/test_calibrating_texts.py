"""Statistics of transformers on texts: gradients and inputs are those of the library's own forward."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_tokenizers import SMALL, write_tokenizer

import mecha_exp as m
from mecha_exp.app.recipes.files import with_files
from mecha_exp.calibration.seams import calibrate
from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import ConfigError
from mecha_exp.sources.statistics.header import StatisticsHeader

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]
TEXTS = ["the cat sat on the mat", "blue sky", "a big dog ran in the green park", "yes no yes", "sun is hot"]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": text, "label": number % 3} for number, text in enumerate(TEXTS)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.fixture
def classifier(texts: Path) -> Path:
    """A tiny classifier of three classes."""
    import transformers

    torch.manual_seed(3)
    config = transformers.BertConfig(vocab_size=40, num_labels=3, max_position_embeddings=32, **SMALL)
    transformers.BertForSequenceClassification(config).save_pretrained(texts / "bert")
    write_tokenizer(texts / "bert")
    return texts / "bert"


def test_a_language_model_has_the_information_of_its_next_tokens(llamas, texts):
    import transformers

    status = calibrate.main([str(llamas[0]), "data=texts.jsonl", "labels=true", "output=s.safetensors"])

    assert status == 0
    made = load_file("s.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(llamas[0]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(llamas[0])
    rows: list[torch.Tensor] = []
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_pre_hook(lambda module, given: rows.append(given[0][0].detach()))
    fisher = torch.zeros_like(layer.weight)
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        model.zero_grad()
        scores = model(ids).logits[0, :-1].log_softmax(-1)
        scores.gather(1, ids[0, 1:, None]).sum().backward()
        fisher += layer.weight.grad**2 / len(TEXTS)
    x = torch.cat(rows)
    key = "model.layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(made[f"fisher/{key}"], fisher, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made[f"gram/{key}"], x.T @ x / len(x), rtol=1e-4, atol=1e-5)
    assert "gram/lm_head.weight" in made and "gram/model.embed_tokens.weight" not in made


def test_a_classifier_has_the_information_of_its_classes(classifier):
    import transformers

    calibrate.main(
        [str(classifier), "data=texts.jsonl", "labels=true", "kind=fisher", "output=s.safetensors"]
    )

    model = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
    fisher = torch.zeros_like(model.classifier.weight)
    with open_stored(Path("s.safetensors")) as made:
        assert StatisticsHeader.of(made).settings == {
            "length": 32, "dtype": "float32", "column": "text", "label": "label",
        }  # fmt: skip
    for number, text in enumerate(TEXTS):
        model.zero_grad()
        given = tokenizer(text, return_tensors="pt")["input_ids"]
        model(given).logits.log_softmax(-1)[0, number % 3].backward()
        fisher += model.classifier.weight.grad**2 / len(TEXTS)
    torch.testing.assert_close(
        load_file("s.safetensors")["fisher/classifier.weight"], fisher, rtol=1e-4, atol=1e-7
    )


def test_models_are_merged_with_their_statistics(llamas, texts):
    for number, folder in enumerate(llamas):
        calibrate.main([str(folder), "data=texts.jsonl", f"output={number}.safetensors"])
    files = [f"{number}.safetensors" for number in range(2)]

    for method, kind in ((m.fisher, "fisher"), (m.regmean, "gram")):
        made = m.merge(method(*llamas, statistics=m.statistics(*files, kind=kind)))
        first = load_file(llamas[0] / "model.safetensors")
        assert made.keys() == first.keys()
        assert all(
            tensor.isfinite().all() and not torch.equal(tensor, first[key])
            for key, tensor in made.items()
            if tensor.ndim == 2
        )


def test_weights_with_the_inputs_first_are_solved_turned(texts):
    import transformers

    models, folders = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        config = transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)
        models.append(transformers.GPT2LMHeadModel(config).eval())
        folders.append(texts / f"gpt{seed}")
        models[-1].save_pretrained(folders[-1])
        write_tokenizer(folders[-1])
        calibrate.main([str(folders[-1]), "data=texts.jsonl", "kind=gram", f"output={seed}.safetensors"])

    made = m.merge(
        m.regmean(*folders, statistics=m.statistics("0.safetensors", "1.safetensors", kind="gram"))
    )

    (key,) = (key for key in made if key.endswith("h.0.mlp.c_proj.weight"))
    weights = [model.transformer.h[0].mlp.c_proj.weight.detach().double() for model in models]
    grams = [load_file(f"{seed}.safetensors")[f"gram/{key} (inputs first)"].double() for seed in range(2)]
    damped = [gram * (0.9 + 0.1 * torch.eye(64)) for gram in grams]
    expected = torch.linalg.solve(sum(damped), sum(g @ w for g, w in zip(damped, weights, strict=True)))
    assert made[key].shape == (64, 16)
    torch.testing.assert_close(made[key], expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=none.jsonl"], r"data=none\.jsonl: there is no such file or folder"),
        (["data=texts.jsonl", "column=words"], "has no column 'words'"),
        (["data=texts.jsonl", "dtype=float31"], r"^dtype=float31: unknown dtype\. Did you mean 'float32'"),
        (["data=texts.jsonl", "device=gpu"], r"^device=gpu: unknown device\."),
        (
            ["data=texts.jsonl", "labels=exact"],
            "labels=exact takes each class of one label, and an example has",
        ),
    ],
)
def test_texts_that_do_not_fit_are_refused(llamas, texts, words, message):
    with pytest.raises(ConfigError, match=message):
        calibrate.main([str(llamas[0]), *words, "output=s.safetensors"])


def test_a_class_that_the_model_lacks_is_refused(classifier, texts):
    (texts / "texts.jsonl").write_text(json.dumps({"text": "the cat", "label": 7}))

    with pytest.raises(ConfigError, match="the label '7' of row 0 is not one of the 3 classes"):
        calibrate.main([str(classifier), "data=texts.jsonl", "labels=true", "output=s.safetensors"])


def test_regmean_plus_plus_measures_the_layers_of_a_llama_behind_the_merged_ones(llamas, texts):
    import transformers

    measurement = {
        "calibrate": "along_merge",
        "models": [str(folder) for folder in llamas],
        "alpha": 0.9,
        "settings": {"data": ["texts.jsonl", "texts.jsonl"], "count": 4},
    }
    files = with_files({"files": measurement}, [])["files"]
    made = m.merge(m.regmean_plus_plus(*llamas, statistics=m.statistics(*files, kind="gram"), alpha=0.9))

    # the authors' steps, by runs of whole networks whose layers before the measured one are merged
    experts = [load_file(folder / "model.safetensors") for folder in llamas]
    merged = {key: sum(expert[key] for expert in experts) / 2 for key in experts[0]}
    tokenizer = transformers.AutoTokenizer.from_pretrained(llamas[0])
    examples = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS[:4]]
    model = transformers.AutoModelForCausalLM.from_pretrained(llamas[0]).eval()
    for number in range(2):
        start = f"model.layers.{number}."
        grams: list[dict[str, torch.Tensor]] = []
        for expert in experts:
            own = {key: x for key, x in expert.items() if key.startswith(start)}
            model.load_state_dict({**merged, **own}, strict=False)
            rows: dict[str, list[torch.Tensor]] = {}
            hooks = [
                layer.register_forward_pre_hook(
                    lambda _, given, key=f"{start}{name}.weight", rows=rows: rows.setdefault(key, []).append(
                        given[0][0].detach().double()
                    )
                )
                for name, layer in model.model.layers[number].named_modules()
                if isinstance(layer, torch.nn.Linear)
            ]
            with torch.no_grad():
                for ids in examples:
                    model(ids)
            for hook in hooks:
                hook.remove()
            stacked = {key: torch.cat(parts) for key, parts in rows.items()}
            grams.append({key: x.T @ x / len(x) for key, x in stacked.items()})
        for key in grams[0]:
            damped = [gram[key] * (0.9 + 0.1 * torch.eye(len(gram[key]))) for gram in grams]
            right = sum(g @ expert[key].double().T for g, expert in zip(damped, experts, strict=True))
            merged[key] = torch.linalg.solve(sum(damped), right).T.float()
    assert made.keys() == merged.keys()
    for key, expected in merged.items():
        torch.testing.assert_close(made[key], expected, rtol=1e-5, atol=1e-5, msg=key)


def test_df_merge_measures_llamas_at_their_scales(llamas, texts):
    measurement = {
        "calibrate": "scaled",
        "base": str(llamas[0]),
        "models": [str(llamas[1]), str(llamas[1])],
        "scales": [0.25, 0.5],
        "settings": {"data": ["texts.jsonl", "texts.jsonl"], "labels": "true", "length": 8},
    }
    files = with_files({"files": measurement}, [])["files"]

    made = m.merge(
        m.df_merge(
            *[llamas[0], llamas[1], llamas[1]],
            statistics=m.statistics(*files, kind="fisher"),
            scales=[0.25, 0.5],
        )
    )

    key = "model.layers.0.mlp.up_proj.weight"
    base, expert = (load_file(folder / "model.safetensors")[key] for folder in llamas)
    fisher = [load_file(file)[f"fisher/{key}"] + 1e-12 for file in files]
    delta = expert - base
    expected = base + 2 * (fisher[0] * 0.25 * delta + fisher[1] * 0.5 * delta) / sum(fisher)
    torch.testing.assert_close(made[key], expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(*fisher)
