"""Merges for some keys: which kind each key is of, and what the others get."""

import pytest
import torch

import mecha_exp as m
from mecha_exp import Job, RecipeError, build_recipe, deserialize, for_keys, serialize
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.engine import plan
from mecha_exp.graph.by_key import by_key
from mecha_exp.graph.kinds import KINDS, kind_of
from mecha_exp.inspection.recipe_tree import tree_of

SHAPES = {
    "embed_tokens.weight": (9, 4),
    "layers.0.q_proj.weight": (6, 4),
    "layers.0.q_proj.bias": (6,),
    "layers.0.norm.weight": (4,),
    "final_norm": (4,),
    "layers.0.mlp.experts.gate_up_proj": (3, 4, 6),
    "layers.0.mlp.experts.gate_up_proj_bias": (3, 6),
    "layers.0.conv.weight": (4, 4, 3, 3),
    "text_projection": (4, 4),
    "lm_head.weight": (9, 4),
}


def state_dict(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}


BASE, *EXPERTS = (m.model(state_dict(seed)) for seed in range(3))
TENSORS = [state_dict(seed) for seed in range(3)]


@pytest.mark.parametrize(
    ("key", "axes", "kind"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 2, "matrix"),
        ("bert.encoder.layer.0.attention.output.dense.weight", 2, "matrix"),
        ("model.diffusion_model.time_embed.0.weight", 2, "matrix"),
        ("x_embedder.weight", 2, "matrix"),
        ("visual.proj", 2, "matrix"),
        ("transformer.resblocks.0.attn.in_proj_weight", 2, "matrix"),
        ("layer1.0.conv1.weight", 4, "convolution"),
        ("vision_model.embeddings.patch_embedding.weight", 4, "convolution"),
        ("conv1d.weight", 3, "convolution"),
        ("model.embed_tokens.weight", 2, "embedding"),
        ("text_model.embeddings.position_embedding.weight", 2, "embedding"),
        ("bert.embeddings.word_embeddings.weight", 2, "embedding"),
        ("transformer.wte.weight", 2, "embedding"),
        ("shared.weight", 2, "embedding"),
        ("positional_embedding", 2, "embedding"),
        ("pos_embed", 3, "embedding"),
        ("lm_head.weight", 2, "head"),
        ("classifier.out_proj.weight", 2, "head"),
        ("fc.weight", 2, "head"),
        ("output.weight", 2, "head"),
        ("gpt_neox.embed_in.weight", 2, "embedding"),
        ("model.language_model.embed_tokens_per_layer.weight", 2, "embedding"),
        ("vision_model.embeddings.patch_embedding.weight", 2, "matrix"),
        ("y_embedder.embedding_table.weight", 2, "embedding"),
        ("qformer.query_tokens", 3, "embedding"),
        ("model.diffusion_model.positional_encoding", 3, "embedding"),
        ("cls.predictions.decoder.weight", 2, "head"),
        ("vocab_projector.weight", 2, "head"),
        ("unembedding.weight", 2, "head"),
        ("v_head.summary.weight", 2, "head"),
        ("transformer.output_layer.weight", 2, "head"),
        ("language_model.output.weight", 2, "head"),
        ("layers.0.output.weight", 2, "matrix"),
        ("model.diffusion_model.final_layer.linear.weight", 2, "head"),
        ("transformer.proj_out.weight", 2, "head"),
        ("transformer.norm_out.linear_2.weight", 2, "head"),
        ("down_blocks.0.attentions.0.proj_out.weight", 2, "matrix"),
        ("transformer.scale_shift_table", 2, "vector"),
        ("model.diffusion_model.blocks.0.modulation", 3, "vector"),
        ("blocks.0.modulation.weight", 2, "matrix"),
        ("text_projection.weight", 2, "text_projection"),
        ("bert.embeddings.LayerNorm.weight", 1, "vector"),
        ("class_embedding", 1, "vector"),
        ("logit_scale", 0, "vector"),
        ("bn1.running_var", 1, "running_statistics"),
        ("bn1.num_batches_tracked", 0, "running_statistics"),
    ],
)
def test_the_kind_of_a_key_is_told_by_its_name_and_shape(key, axes, kind):
    assert kind_of(key, axes, is_stack=False) == kind


def test_every_key_of_a_model_is_of_one_kind():
    anatomy = Anatomy.of(state_dict(0))

    held = {kind: [key for key in SHAPES if holds(kind, key, anatomy)] for kind in KINDS}

    assert sorted(key for keys in held.values() for key in keys) == sorted(SHAPES)
    assert held["matrix"] == ["layers.0.q_proj.weight"]
    assert held["experts"] == ["layers.0.mlp.experts.gate_up_proj"]
    assert "layers.0.mlp.experts.gate_up_proj_bias" in held["vector"]


def holds(kind: str, key: str, anatomy: Anatomy) -> bool:
    return by_key({f"kind:{kind}": 1.0, "default": 0.0}).over(anatomy)(key) == 1.0


def test_a_value_by_key_may_be_by_kind_and_a_block_wins_over_a_kind():
    merged = m.merge(m.weighted_sum(BASE, EXPERTS[0], alpha={"kind:vector": 1.0, "0": 0.5, "default": 0.0}))

    base, expert = TENSORS[:2]
    bias, head, norm = "layers.0.q_proj.bias", "lm_head.weight", "final_norm"
    assert torch.equal(merged[norm], expert[norm])
    assert torch.equal(merged[head], base[head])
    torch.testing.assert_close(merged[bias], (base[bias] + expert[bias]) / 2)


@pytest.mark.parametrize(("policy", "weight"), [("mean", 0.5), ("task_arithmetic", 1.0), ("base", 0.0)])
def test_the_others_get_their_policy_with_the_scale_of_the_method(policy, weight):
    whole = m.ties(BASE, *EXPERTS, scale=0.7)
    base, a, b = TENSORS

    merged = m.merge(for_keys(whole, {"matrix": "merge", "default": policy}))

    expected = m.merge(whole)
    for key in SHAPES:
        others = base[key] + 0.7 * weight * (a[key] + b[key] - 2 * base[key])
        wanted = expected[key] if key == "layers.0.q_proj.weight" else others
        torch.testing.assert_close(merged[key], wanted, rtol=1e-6, atol=1e-6, msg=key)


def test_methods_without_a_base_give_the_others_the_mean_of_their_models():
    merged = m.merge(for_keys(m.slerp(*EXPERTS, alpha=0.3), ["matrix", "head"]))

    key = "layers.0.norm.weight"
    torch.testing.assert_close(merged[key], (TENSORS[1][key] + TENSORS[2][key]) / 2)


@pytest.mark.parametrize("method", [m.tsv_m, m.iso_c, m.iso_cts, m.star])
def test_keys_of_the_paper_are_those_that_the_authors_decompose(method):
    made = m.merge(for_keys(method(BASE, *EXPERTS, scale=0.7, variant="rows"), "paper"))

    expected = m.merge(method(BASE, *EXPERTS, scale=0.7, variant="paper"))
    assert all(torch.equal(made[key], expected[key]) for key in SHAPES)


def test_stacked_experts_are_merged_one_by_one():
    key = "layers.0.mlp.experts.gate_up_proj"
    made = m.merge(for_keys(m.iso_c(BASE, *EXPERTS), "experts"))[key]

    each = [m.merge(m.iso_c(*({"w": model[key][i]} for model in TENSORS)))["w"] for i in range(3)]
    torch.testing.assert_close(made, torch.stack(each))


def test_a_number_of_the_whole_model_counts_the_keys_that_the_method_is_for():
    keys = ["layers.0.q_proj.weight", "lm_head.weight"]
    settings = {"trim": "global", "density": 0.3, "variant": "paper"}

    made = m.merge(for_keys(m.ties(BASE, *EXPERTS, **settings), ["matrix", "head"]))

    alone = m.merge(m.ties(*({key: model[key] for key in keys} for model in TENSORS), **settings))
    assert all(torch.equal(made[key], alone[key]) for key in keys)


def test_plan_report_tree_and_text_say_what_the_keys_get():
    recipe = for_keys(m.iso_c(BASE, *EXPERTS), {"embedding": "base", "matrix": "merge", "default": "mean"})

    with plan([Job(recipe, {})]) as planned:
        assert planned.choices() == {"base": 1, "iso_c": 1, "mean": 8}
    assert m.merge_many([Job(recipe, {})]).choices == ({"base": 1, "iso_c": 1, "mean": 8},)
    assert next(tree_of(recipe)) == "select  keys={kind:embedding: base, kind:matrix: iso_c, default: mean}"
    of_files = for_keys(m.iso_c("base", "a", "b"), "matrix")
    assert deserialize(serialize(of_files)) is of_files


def test_yaml_says_it_in_the_call():
    call = {"method": "iso_c", "base": "base", "models": ["a", "b"]}

    assert build_recipe({**call, "keys": "matrix"}) is for_keys(m.iso_c("base", "a", "b"), "matrix")
    assert build_recipe({**call, "keys": "all"}) is m.iso_c("base", "a", "b")


@pytest.mark.parametrize(
    ("merged", "keys", "message"),
    [
        (m.iso_c("x", "a"), {"matrix": "meen"}, "'kind:matrix' gets 'meen'.*Did you mean 'mean'"),
        (m.iso_c("x", "a"), 3, "expected kinds of keys, or a mapping of them to policies, got 3"),
        (
            m.ties("x", "a"),
            "paper",
            "the authors of 'ties' leave out are not known.*Name kinds of keys: matrix",
        ),
        (m.slerp("a", "b"), {"matrix": "base"}, "'slerp' has no base, so no key can get 'base'"),
        (m.model("a"), "matrix", "is not a call of a merge method"),
        (m.iso_c("x", "a"), [], "no key gets 'merge', so that the method would merge nothing"),
        (m.iso_c("x", "a"), {"matrix": "base"}, "no key gets 'merge'"),
        (
            m.iso_c("x", "a"),
            {"matrix": "base", "kind:matrix": "merge"},
            "a kind is named twice.*matrix, kind:",
        ),
        (for_keys(m.iso_c("x", "a"), "matrix"), "head", "the recipe says itself what each key gets"),
        (
            m.add_difference("x", m.subtract("a", "b")),
            "matrix",
            "keys: n_average: .*Give a recipe for these keys",
        ),
        (m.emr_mask("x", "a"), "matrix", "'values.0.' is a param .*Give a recipe for these keys"),
    ],
)
def test_what_cannot_be_is_an_error(merged, keys, message):
    with pytest.raises(RecipeError, match=message):
        for_keys(merged, keys)


def test_a_merge_for_keys_that_the_models_lack_is_an_error():
    recipe = for_keys(m.iso_c(*({"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2)},) * 2), "experts")

    with pytest.raises(RecipeError, match=r"no key that 'iso_c' would be for.*these kinds: matrix, vector"):
        m.merge(recipe)
    made = m.merge(for_keys(m.iso_c(BASE, *EXPERTS), {"running_statistics": "base", "default": "merge"}))
    assert all(torch.equal(x, made[key]) for key, x in m.merge(m.iso_c(BASE, *EXPERTS)).items())


def test_a_misspelt_kind_is_met_with_the_nearest():
    with pytest.raises(
        RecipeError, match=r"^the pattern 'matrx' matches none.*Did you mean 'kind:matrix'\?$"
    ):
        m.merge(for_keys(m.iso_c(BASE, *EXPERTS), "matrx"))
    with pytest.raises(RecipeError, match=r"'matrx' is not a kind of keys: matrix, .*Did you mean 'matrix'"):
        m.merge(m.weighted_sum(BASE, EXPERTS[0], alpha={"kind:matrx": 1.0, "default": 0.0}))
    with pytest.raises(RecipeError, match="'axes:two': expected the number of axes"):
        m.merge(m.weighted_sum(BASE, EXPERTS[0], alpha={"axes:two": 1.0, "default": 0.0}))
