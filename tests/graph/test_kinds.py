"""Which keys are the head of a model, for every class of transformers that has one beside its base model."""

import pytest
from library_families import made, with_heads

from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.checkpoint import TensorInfo
from mecha_exp.graph.by_key import by_key

NO_HEAD_OF_ITS_OWN = (
    *(".vision_model.head.", ".vision_tower.head.", ".img_processor.head.", ".lm_head.", ".contact_head."),
)
"""What base models have under a head's name: SigLIP's pooling, ESM's contacts, heads of models in models."""

UNTOLD = {"CvtForImageClassification": {"layernorm.weight", "layernorm.bias"}}
"""Keys that are named as in base models without a prefix, where they are no part of a head."""


def head_of(keys: dict[str, int]) -> set[str]:
    """The keys of the kind `head`, of tensors with so many axes."""
    infos = {key: TensorInfo("F32", (2,) * axes, 0, 0) for key, axes in keys.items()}
    bound = by_key({"kind:head": 1.0, "default": 0.0}).over(Anatomy.of(infos))
    return {key for key in keys if bound(key) == 1.0}


def test_a_bias_is_of_the_head_where_the_weight_beside_it_is():
    keys = {
        "bert.encoder.layer.0.output.dense.weight": 2,
        "bert.encoder.layer.0.output.dense.bias": 1,
        "bert.embeddings.word_embeddings.weight": 2,
        "bert.pooler.dense.bias": 1,
        "classifier.weight": 2,
        "classifier.bias": 1,
    }
    assert head_of(keys) == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("name", ["fc", "model.output_layer", "transformer.proj_out"])
def test_names_that_depend_on_the_shape_of_a_weight_decide_its_bias_too(name):
    inner = {"layers.0.fc.weight": 2, "layers.0.fc.bias": 1}

    assert head_of({f"{name}.weight": 2, f"{name}.bias": 1, **inner}) == {f"{name}.weight", f"{name}.bias"}
    assert head_of({f"{name}.weight": 4, f"{name}.bias": 1, **inner}) == set()


def test_norms_statistics_and_convolutions_below_a_head_are_of_it():
    below = {"norm.weight": 1, "norm.running_mean": 1, "conv.weight": 4, "probe": 3, "dense.bias": 1}
    head = {f"decode_head.{name}": axes for name, axes in below.items()}

    assert head_of({"backbone.norm.running_mean": 1, **head}) == set(head)


def test_heads_of_an_attention_are_matrices():
    keys = {"blocks.0.attention.q_head.weight": 2, "layers.0.mlp.router.classifier.weight": 2}
    assert head_of(keys) == set()


def test_a_pooler_is_of_the_head_only_beside_a_whole_base_model():
    layers = {"encoder.layer.0.dense.weight": 2, "encoder.layer.1.dense.weight": 2}
    rest = {"embeddings.word_embeddings.weight": 2}
    beside = {"pooler.dense.weight": 2, "pooler.dense.bias": 1, "classifier.weight": 2}

    prefixed = {f"deberta.{key}": axes for key, axes in (layers | rest).items()}
    assert head_of(prefixed | beside) == set(beside)
    assert head_of(layers | rest | beside) == {"classifier.weight"}


@pytest.mark.libraries
def test_what_every_class_of_transformers_adds_to_its_base_model_is_its_head():
    classes = with_heads()
    wrong, built = {}, 0
    for name, cls in classes.items():
        if (model := made(cls)) is None or model.base_model is model:
            continue
        built += 1
        base = next(path for path, module in model.named_modules() if module is model.base_model)
        keys = {key: tensor.dim() for key, tensor in model.state_dict().items()}
        added = {key for key in keys if not key.startswith(f"{base}.")} - UNTOLD.get(name, set())
        own = {key for key in head_of(keys) if not any(word in key for word in NO_HEAD_OF_ITS_OWN)}
        other = {key for key in head_of(keys) ^ added if key in added or key in own}
        if other:
            wrong[name] = sorted(other)

    assert wrong == {}
    assert built > 500, f"only {built} of {len(classes)} classes with a head were built"
