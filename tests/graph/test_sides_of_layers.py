"""A gradient's first point goes to what comes before the layers, its last one to what comes after.

The names are those of published checkpoints; where a name does not tell, the gradient is an error.
"""

import pytest
import torch

from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.graph.by_key import ByKey, NoValueError, as_curve

LAYERS = 4

# name: (a key of layer `{}`, keys before, keys after, keys that cannot be told)
MODELS = {
    "timm ViT": (
        "blocks.{}.attn.qkv.weight",
        "cls_token reg_token pos_embed patch_embed.proj.weight patch_embed.norm.weight norm_pre.weight",
        "norm.weight fc_norm.weight head.weight attn_pool.q.weight",
        "",
    ),
    "timm DeiT": ("blocks.{}.mlp.fc1.weight", "dist_token pos_embed", "head_dist.bias norm.bias", ""),
    "CLIP vision": (
        "vision_model.encoder.layers.{}.self_attn.k_proj.weight",
        "vision_model.embeddings.class_embedding vision_model.embeddings.patch_embedding.weight "
        "vision_model.embeddings.position_embedding.weight vision_model.pre_layrnorm.weight",
        "vision_model.post_layernorm.weight visual_projection.weight",
        "",
    ),
    "CLIP text": (
        "text_model.encoder.layers.{}.mlp.fc1.weight",
        "text_model.embeddings.token_embedding.weight text_model.embeddings.position_embedding.weight",
        "text_model.final_layer_norm.weight text_projection.weight",
        "",
    ),
    "OpenCLIP vision": (
        "visual.transformer.resblocks.{}.attn.in_proj_weight",
        "visual.class_embedding visual.positional_embedding visual.ln_pre.weight",
        "visual.ln_post.weight visual.proj",
        "logit_scale",
    ),
    "RWKV": ("blocks.{}.att.key.weight", "emb.weight", "ln_out.weight head.weight", ""),
    "x-transformers": (
        "attn_layers.layers.{}.1.to_q.weight",
        "token_emb.emb.weight pos_emb.emb.weight",
        "attn_layers.final_norm.g to_logits.weight",
        "memory_tokens",
    ),
    "GPT-2": ("h.{}.attn.c_attn.weight", "wte.weight wpe.weight", "ln_f.weight lm_head.weight", ""),
    "BERT": (
        "bert.encoder.layer.{}.output.dense.weight",
        "bert.embeddings.word_embeddings.weight bert.embeddings.LayerNorm.weight",
        "bert.pooler.dense.weight classifier.weight cls.predictions.bias",
        "",
    ),
    "Mamba": (
        "backbone.layers.{}.mixer.in_proj.weight", "backbone.embeddings.weight", "backbone.norm_f.weight", ""
    ),
    "Flux": (
        "double_blocks.{}.img_attn.qkv.weight",
        "img_in.weight txt_in.weight time_in.in_layer.bias vector_in.in_layer.bias guidance_in.in_layer.bias",
        "final_layer.linear.weight",
        "",
    ),
}  # fmt: skip


def gradient(*points: float) -> ByKey:
    return ByKey((), as_curve(points))


def anatomy(name: str, *, with_unknown: bool) -> Anatomy:
    layer, before, after, unknown = MODELS[name]
    keys = [layer.format(i) for i in range(LAYERS)] + before.split() + after.split()
    return Anatomy.of({key: torch.empty(3) for key in [*keys, *(unknown.split() if with_unknown else ())]})


@pytest.mark.parametrize("name", MODELS)
def test_each_key_has_the_point_of_its_side(name):
    layer, before, after, _ = MODELS[name]
    value = gradient(0, 1).over(anatomy(name, with_unknown=False))

    assert [value(layer.format(i)) for i in range(LAYERS)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert {key: value(key) for key in before.split()} == dict.fromkeys(before.split(), 0)
    assert {key: value(key) for key in after.split()} == dict.fromkeys(after.split(), 1)


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name][3]])
def test_a_key_whose_name_does_not_tell_is_an_error_that_names_it(name):
    value = gradient(0, 1).over(anatomy(name, with_unknown=True))

    for key in MODELS[name][3].split():
        with pytest.raises(NoValueError, match=key.replace(".", r"\.")):
            value(key)


def test_the_first_norm_of_rwkv_lies_in_its_first_layer():
    keys = [f"blocks.{i}.att.key.weight" for i in range(LAYERS)] + ["blocks.0.ln0.weight", "emb.weight"]
    value = gradient(0.25, 1).over(Anatomy.of({key: torch.empty(3) for key in keys}))

    assert value("blocks.0.ln0.weight") == value("emb.weight") == 0.25


def test_of_two_towers_the_nearest_one_decides():
    keys = [
        f"{tower}.layers.{i}.mlp.weight"
        for tower in ("text", "vision")
        for i in range(LAYERS + (tower == "text"))
    ]
    outside = {"text.norm.weight": 1, "vision.patch_embed.weight": 0, "text.embed_tokens.weight": 0}
    value = gradient(0, 1).over(Anatomy.of({k: torch.empty(3, 2) for k in [*keys, *outside, "norm.weight"]}))

    assert {key: value(key) for key in outside} == outside
    with pytest.raises(NoValueError, match=r"norm\.weight"):
        value("norm.weight")
