"""Mixtures of transformers, whose experts lie stacked in one tensor, are merged expert by expert and run.

Run by `make hf`. The models are tiny, of random weights, made from configs.
"""

import ast
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mecha_exp as mx
from mecha_exp import Job, merge_many
from mecha_exp.architectures import detect
from mecha_exp.architectures.keys import is_known_stack

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES = {
    "Mixtral": ("mixtral-hf", {"num_local_experts": 4}),
    "Qwen2Moe": (
        "qwen2_moe-hf",
        {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    ),
    "Qwen3Moe": ("qwen3_moe-hf", {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8}),
    "GptOss": ("gpt_oss-hf", {"num_local_experts": 4, "head_dim": 8}),
    "DeepseekV2": ("deepseek-hf", DEEPSEEK),
    "DeepseekV3": ("deepseek-hf", DEEPSEEK),
    "GraniteMoe": (None, {"num_local_experts": 4}),
}
TOKENS = torch.tensor([[1, 5, 7, 2]])
RECIPES = {
    "ties": lambda *models: mx.ties(*models, density=0.4),
    "iso_c": lambda *models: mx.iso_c(*models),
    "slerp": lambda *models: mx.slerp(*models[:2]),
}


def mixture(family, seed):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES[family][1]})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves three models of a family, as they are in memory or by the names of old; the folders."""

    def save(family, stacked=True):
        folders = []
        for seed in range(3):
            folders.append(tmp_path_factory.mktemp(family) / str(seed))
            mixture(family, seed).save_pretrained(folders[-1], save_original_format=not stacked)
        return folders

    return save


def tensors(folder):
    return {
        key: t for file in sorted(Path(folder).glob("*.safetensors")) for key, t in load_file(file).items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_each_expert_is_merged_by_itself_and_the_model_runs(family, saved, tmp_path):
    folders = saved(family)
    models = [tensors(folder) for folder in folders]
    stacks = {k: len(t) for k, t in models[0].items() if ".experts." in k}
    assert stacks

    merge_many([Job(make(*folders), tmp_path / name) for name, make in RECIPES.items()])

    for name, make in RECIPES.items():
        merged = tensors(tmp_path / name)
        for key, count in stacks.items():
            alone = [mx.merge(make(*({"w": model[key][i]} for model in models)))["w"] for i in range(count)]
            assert torch.equal(merged[key], torch.stack(alone)), (name, key)
        loaded = type(mixture(family, 0)).from_pretrained(tmp_path / name)
        assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in merged.items())
        with torch.no_grad():
            assert loaded(input_ids=TOKENS)[0].isfinite().all()


@pytest.mark.parametrize("family", [family for family, (config, _) in FAMILIES.items() if config])
def test_the_config_of_a_mixture_is_known(family, saved):
    model = tensors(saved(family)[0])
    detection = detect(model)

    assert (detection.config.identifier, detection.extra, detection.missing) == (FAMILIES[family][0], (), ())
    marked = {key for key, info in detection.config.keys().items() if info.stacked}
    assert marked & model.keys() == {key for key in model if ".experts." in key}
    assert {detection.config.block_of(key) for key in marked} == {"0", "1"}


def test_a_merge_of_files_by_the_names_of_old_has_the_same_experts(saved, tmp_path):
    stacked, apart = (saved("Mixtral", stacked=is_stacked) for is_stacked in (True, False))
    for name, folders in (("stacked", stacked), ("apart", apart)):
        merge_many([Job(mx.ties(*folders, density=0.4), tmp_path / name)])
    one, other = tensors(tmp_path / "stacked"), tensors(tmp_path / "apart")

    for layer in range(2):
        experts = [other[f"model.layers.{layer}.block_sparse_moe.experts.{i}.w2.weight"] for i in range(4)]
        assert torch.equal(one[f"model.layers.{layer}.mlp.experts.down_proj"], torch.stack(experts))


def stacks_of_the_library():
    """(architecture, module and parameter) of every stack in a class of experts, by the sources."""
    models = Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "Experts" not in text:
            continue
        tree = ast.parse(text)
        modules = {kind: name for name, kind, _ in made_in(tree)}
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and "Experts" in node.name:
                module = modules.get(node.name, "experts")
                yield from (
                    (path.parent.name, f"{module}.{name}")
                    for name, kind, made in made_in(node)
                    if kind == "Parameter" and len(sizes_of(made.args[0])) > 2
                )


def made_in(tree):
    """(attribute, class, call) of each assignment of a new object to an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            made = node.value
            if isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute | ast.Name):
                yield node.targets[0].attr, getattr(made.func, "attr", getattr(made.func, "id", "")), made


def sizes_of(made):
    """The arguments of `torch.empty(2, 3)` or `torch.empty((2, 3))`."""
    return made.args[0].elts if isinstance(made.args[0], ast.Tuple) else made.args


def test_the_names_of_all_stacks_of_the_library_are_known():
    found = set(stacks_of_the_library())

    assert [entry for entry in found if not is_known_stack(f"layers.0.mlp.{entry[1]}", (4, 2, 3))] == []
    assert len({architecture for architecture, _ in found}) > 30


@pytest.mark.parametrize(
    "kind", ["jetmoe", "granitemoe", "nemotron_h", "llama4_text", "ernie4_5_moe", "mixtral"]
)
def test_stacks_are_the_tensors_of_three_axes_in_modules_of_experts(kind):
    config = transformers.CONFIG_MAPPING[kind]()
    config.num_hidden_layers = 2
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)

    of_experts = {
        key
        for key, tensor in model.state_dict().items()
        if tensor.ndim > 2 and type(model.get_submodule(key.rpartition(".")[0])).__name__.endswith("Experts")
    }
    named = {key for key, tensor in model.state_dict().items() if is_known_stack(key, tuple(tensor.shape))}

    assert named == of_experts
