"""Models whose keys are equal but for their prefixes: told, and merged on request."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from library_families import made, with_heads
from safetensors.torch import load_file, save_file
from torch import Tensor

from mecha_exp import CheckpointError, EngineOptions, add_difference, merge, model, weighted_sum
from mecha_exp.graph.nodes import InMemory
from mecha_exp.sources.memory import MemorySource
from mecha_exp.sources.views.prefixes import prefixes_between

MATCH = EngineOptions(on_prefix="match")


def tower(prefix: str, seed: int, layers: int = 2, inner: str = "layers") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed_tokens.weight": (6, 4), "norm.weight": (4,)}
    for layer in range(layers):
        shapes[f"{inner}.{layer}.mlp.up_proj.weight"] = (8, 4)
        shapes[f"{inner}.{layer}.mlp.up_proj.bias"] = (8,)
        shapes[f"{inner}.{layer}.norm.weight"] = (4,)
    return {prefix + key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def vision(prefix: str, seed: int) -> dict[str, Tensor]:
    keys = ("patch_embed.weight", "norm.weight", "blocks.0.norm.weight", "blocks.0.mlp.up_proj.weight")
    generator = torch.Generator().manual_seed(seed)
    return {prefix + key: torch.randn(4, 3, generator=generator) for key in keys}


def head(prefix: str, seed: int) -> dict[str, Tensor]:
    return {f"{prefix}lm_head.weight": torch.full((6, 4), float(seed))}


OLD_AND_NEW = {
    "of a task": (
        {**tower("", 1), "classifier.weight": torch.ones(2, 4)},
        {**tower("bert.", 1), "classifier.weight": torch.ones(2, 4)},
    ),
    "DDP": (head("", 1), head("module.", 1)),
    "PEFT": (
        {**tower("model.", 1), **head("", 1)},
        {**tower("base_model.model.model.", 1), **head("base_model.model.", 1)},
    ),
    "Qwen2-VL": (
        {**tower("model.", 1), **vision("visual.", 2), **head("", 3)},
        {**tower("model.language_model.", 1), **vision("model.visual.", 2), **head("", 3)},
    ),
    "LLaVA": (
        {
            **tower("language_model.model.", 1),
            **vision("vision_tower.vision_model.", 2),
            **head("language_model.", 3),
            "multi_modal_projector.linear_1.weight": torch.ones(4, 3),
        },
        {
            **tower("model.language_model.", 1),
            **vision("model.vision_tower.vision_model.", 2),
            **head("", 3),
            "model.multi_modal_projector.linear_1.weight": torch.ones(4, 3),
        },
    ),
}


@pytest.mark.parametrize("name", OLD_AND_NEW)
@pytest.mark.parametrize("back", [False, True])
def test_a_model_under_other_prefixes_is_the_same_model(name, back):
    first, other = reversed(OLD_AND_NEW[name]) if back else OLD_AND_NEW[name]

    merged = merge(weighted_sum(first, other, alpha=0.5), options=MATCH)

    assert merged.keys() == first.keys()
    assert all(torch.equal(merged[key], first[key]) for key in first)


@pytest.mark.parametrize("name", OLD_AND_NEW)
def test_without_the_option_the_error_says_the_prefix_the_option_and_the_rules(name):
    first, other = OLD_AND_NEW[name]

    with pytest.raises(CheckpointError) as error:
        merge(weighted_sum(model(first), model(other), alpha=0.5))

    said = str(error.value)
    assert "equal to those of" in said
    assert "but for the prefix" in said
    assert "on_prefix=match" in said
    assert "one architecture" not in said, "one cause, one message"


def test_the_rules_of_the_error_do_what_the_option_does():
    from mecha_exp.method_api.registry import resolve_method

    first, other = OLD_AND_NEW["LLaVA"]
    rules = prefixes_between(source(other), source(first)).rules

    renamed = resolve_method("rename_keys")(other, rules)

    matched = merge(weighted_sum(first, other, alpha=0.3), options=MATCH)
    assert equal(merge(weighted_sum(first, renamed, alpha=0.3)), matched)


def test_models_of_other_architectures_have_no_prefix_in_common():
    assert prefixes_between(source(tower("model.", 1)), source(vision("visual.", 2))) is None
    with pytest.raises(CheckpointError, match="Are these models of one architecture"):
        merge(weighted_sum(tower("", 1), vision("", 2), alpha=0.5), options=MATCH)


def test_tensors_of_other_shapes_are_no_counterparts():
    wide = {key: torch.zeros(*tensor.shape, 2) for key, tensor in tower("bert.", 1).items()}
    assert prefixes_between(source(tower("", 1)), source(wide)) is None


def test_a_text_model_changes_the_language_tower_alone():
    vlm = {**tower("model.language_model.", 1), **vision("model.visual.", 2), **head("", 3)}
    base, tuned = ({**tower("model.", seed), **head("", seed)} for seed in (4, 5))

    options = EngineOptions(on_prefix="match", on_missing="base")
    merged = merge(add_difference(vlm, tuned, base, alpha=1.0), options=options)

    assert merged.keys() == vlm.keys()
    for key, tensor in vlm.items():
        text = key.replace("model.language_model.", "model.")
        change = tuned[text] - base[text] if text in base else 0
        assert torch.equal(merged[key], tensor + change)


def test_rules_of_a_recipe_are_not_matched_again():
    from mecha_exp.method_api.registry import resolve_method

    renamed = resolve_method("rename_keys")(tower("bert.", 1), "bert.* -> *")
    merged = merge(weighted_sum(tower("", 1), renamed, alpha=0.5), options=MATCH)
    assert equal(merged, tower("", 1))


PATHS = st.lists(
    st.sampled_from(["embed", "layers", "0", "1", "mlp", "up", "weight"]), min_size=1, max_size=5
)
PREFIXES = st.lists(st.sampled_from(["model", "module", "bert"]), max_size=2).map(".".join)


@given(paths=st.sets(PATHS.map(".".join), min_size=1, max_size=12), old=PREFIXES, new=PREFIXES)
def test_one_prefix_in_place_of_another_is_always_found(paths, old, new):
    def named(prefix: str) -> list[str]:
        return [f"{prefix}.{path}" if prefix else path for path in sorted(paths)]

    first = {key: torch.full((2, number + 1), 1.0) for number, key in enumerate(named(new))}
    other = dict(zip(named(old), first.values(), strict=True))

    found = prefixes_between(source(other), source(first))

    assert found is None if old == new else dict(zip(named(old), named(new), strict=True)) == found.names


def test_a_model_is_read_by_rules_on_the_command_line(app, folder):
    tensors = tower("", 1)
    save_file({f"bert.{key}": tensor for key, tensor in tensors.items()}, "base.safetensors")
    Path("sub").mkdir()
    save_file(tensors, "sub/b.safetensors")
    words = ["recipe=weighted_sum", "evaluator=none", "output.path=out.safetensors"]
    models = ["models.base=base.safetensors", "models.experts=[sub/b.safetensors]"]

    refused = app(*words, *models)
    assert "engine.on_prefix=match" in refused.err
    for option in ("engine.on_prefix=match", "models.rename={sub/b.safetensors: '* -> bert.*'}"):
        outcome = app(*words, *models, option)
        assert outcome.status == 0, outcome.err
        assert equal(load_file("out.safetensors"), load_file("base.safetensors"))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("models.rename={c.safetensors: '* -> *'}", "the recipe reads no model 'c.safetensors'"),
        ("models.rename=bert", "expected rules by model, such as {b.safetensors: '* -> bert.*'}, got 'bert'"),
    ],
)
def test_rules_for_no_model_are_refused(app, folder, word, said):
    save_file(tower("", 1), "base.safetensors")
    save_file(tower("", 2), "b.safetensors")
    models = ["models.base=base.safetensors", "models.experts=[b.safetensors]"]

    outcome = app("recipe=weighted_sum", "evaluator=none", "output=none", *models, word)

    assert outcome.status != 0
    assert said in outcome.err


@pytest.mark.libraries
def test_the_base_model_of_every_class_of_transformers_is_found_in_it():
    wrong, built = {}, 0
    for name, cls in with_heads().items():
        whole = made(cls)
        if whole is None or whole.base_model is whole:
            continue
        built += 1
        base = next(path for path, module in whole.named_modules() if module is whole.base_model)
        task, inner = (source(rowless(each)) for each in (whole, whole.base_model))
        found = prefixes_between(inner, task)
        expected = {key: f"{base}.{key}" for key in inner.keys()}
        if found is None or found.names != expected:
            wrong[name] = found and {k: v for k, v in found.names.items() if expected[k] != v}
    assert wrong == {}
    assert built > 500


def rowless(module: torch.nn.Module) -> dict[str, Tensor]:
    """The state dict of a module on the meta device, without rows."""
    return {key: torch.zeros(0, *tensor.shape[1:]) for key, tensor in module.state_dict().items()}


def source(tensors: dict[str, Tensor]) -> MemorySource:
    return MemorySource(InMemory(tensors))


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def llava(folder: Path) -> dict[str, Path]:
    """A vision-language model of transformers, with two text models of the sizes of its language tower."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlamaForCausalLM,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=32)
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=8)
    whole = LlavaConfig(text_config=text, vision_config=vision, image_token_index=31)
    built = {"vlm": (LlavaForConditionalGeneration, whole)}
    built |= dict.fromkeys(("text", "tuned"), (LlamaForCausalLM, text))
    for seed, (name, (cls, config)) in enumerate(built.items()):
        torch.manual_seed(seed)
        cls(config).save_pretrained(folder / name)
    return {name: folder / name for name in built}


@pytest.mark.libraries
@pytest.mark.parametrize("renamed", [False, True])
def test_a_text_model_of_transformers_changes_a_vision_language_model_that_loads_again(app, folder, renamed):
    pytest.importorskip("transformers")
    from transformers import LlavaForConditionalGeneration

    paths = llava(folder)
    stored = {name: load_file(path / "model.safetensors") for name, path in paths.items()}
    if renamed:  # as transformers names the keys in memory since 4.52
        loaded = LlavaForConditionalGeneration.from_pretrained(paths["vlm"])
        stored["vlm"] = {key: tensor.clone() for key, tensor in loaded.state_dict().items()}
        save_file(stored["vlm"], paths["vlm"] / "model.safetensors", {"format": "pt"})

    words = ["recipe=language_tower", "evaluator=none", "output.path=out", "alpha=0.5"]
    outcome = app(*words, "models.base=vlm", "models.experts=[tuned,text]")

    assert outcome.status == 0, outcome.err
    merged, vlm = load_file("out/model.safetensors"), stored["vlm"]
    tower = "model.language_model." if renamed else "language_model.model."
    assert merged.keys() == vlm.keys()
    for key in vlm:
        text = key.replace(tower, "model.").removeprefix("language_model.")
        if text in stored["text"]:
            change = 0.5 * (stored["tuned"][text] - stored["text"][text])
            assert torch.allclose(merged[key], vlm[key] + change, atol=1e-6)
        else:
            assert torch.equal(merged[key], vlm[key])
    assert Path("out/config.json").read_bytes() == (paths["vlm"] / "config.json").read_bytes()
    _, report = LlavaForConditionalGeneration.from_pretrained("out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
