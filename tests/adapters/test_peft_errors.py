"""What cannot be read exactly from an adapter of PEFT is refused with the reason, before the work."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft_tensors import O, Q, lora, rand
from safetensors.torch import save_file
from torch import Tensor

import mecha_exp as m

PREFIX = "base_model.model."
Adapter = Callable[..., str]


def merge() -> Any:
    return m.merge(m.model("base") + m.lora_delta("lora", m.model("base")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3: (IA)3 multiplies activations"),
        ({"peft_type": "VERA"}, "peft_type VERA: its random matrices"),
        (
            {"peft_type": "XYZ"},
            "peft_type XYZ: only LoRA, DoRA, LoHa and LoKr are read. Merge it into its model with PEFT",
        ),
        ({"target_parameters": ["experts.gate"]}, "target_parameters: factors of single parameters"),
        (
            {"layer_replication": [[0, 2], [1, 2]]},
            "layer_replication: the adapter is for a model with layers",
        ),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens: it is active only after certain tokens"),
        ({"use_quantum": True}, "use_quantum: it is not known what this setting of a newer PEFT adds"),
        ({"wave_config": {"size": 3}}, "wave_config: it is not known what this setting of a newer PEFT"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the weights of the base when"),
        ({"use_dora": True}, f"its configuration says use_dora, and {Q} has no lora_magnitude_vector"),
        ({"r": 3}, "its configuration says rank 3, and lora_A.weight [2, 6], lora_B.weight [8, 2] has"),
        ({"r": "two"}, "r: expected a whole number of at least 1, got 'two'"),
        ({"rank_pattern": {"q_(": 2}}, "rank_pattern: 'q_(' is not a regular expression"),
        ({"rank_pattern": [1]}, "rank_pattern: expected numbers by the names of modules, got [1]"),
    ],
)
def test_a_configuration_that_is_not_additive_is_refused(
    base: dict[str, Tensor], adapter: Adapter, config: dict[str, Any], message: str
):
    adapter("lora", lora(Q), **config)

    with pytest.raises(m.CheckpointError, match=re.escape(message)):
        merge()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{PREFIX}x.y.lora_A.weight": rand(2, 6), f"{PREFIX}x.y.lora_B.weight": rand(6, 2)},
         "lora: it changes x.y, and base has no such tensors. Is it the model that the adapter was trained "
         "on (org/base), with the same head?"),
        ({f"{PREFIX}{Q}.lora_A.weight": rand(2, 6)}, f"the module {Q} has only lora_A.weight"),
        ({f"{PREFIX}{Q}.lora_A.weight": rand(2, 5), f"{PREFIX}{Q}.lora_B.weight": rand(8, 2)},
         f"make a difference of shape [8, 5], and {Q}.weight is [8, 6]"),
        ({f"{PREFIX}{Q}.lora_E": rand(2, 1)}, f"1 key is not one of a LoRA of PEFT: {PREFIX}{Q}.lora_E"),
        ({f"{PREFIX}lm_head.weight": rand(21, 6)},
         "lora: it was trained with 21 tokens, base has fewer, and the adapter lacks the new rows of "
         "model.embed_tokens.weight. Save it with all tables: save_pretrained(..., save_embedding_layers"),
        ({f"{PREFIX}{Q}.lora_A.weight": rand(2, 6).int(), f"{PREFIX}{Q}.lora_B.weight": rand(8, 2)},
         "the factors of a LoRA are floating point"),
        ({f"{PREFIX}{Q}.hada_w1_a": rand(8, 2), f"{PREFIX}{Q}.hada_w1_b": rand(2, 6)},
         f"lora: {Q}: hada_w2_a is missing"),
        ({**lora(Q), f"{PREFIX}{Q}.lora_magnitude_vector": rand(7)},
         "lora_magnitude_vector [7] does not have a number for each of 8 outputs"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(
    base: dict[str, Tensor], adapter: Adapter, tensors: dict[str, Tensor], message: str
):
    adapter("lora", {k: v.contiguous() for k, v in tensors.items()})

    with pytest.raises(m.CheckpointError, match=re.escape(message)):
        merge()


def test_lokr_of_a_convolution_of_one_axis_is_refused(adapter: Adapter, tmp_path: Path):
    """PEFT 0.21 trains torch.kron of [2, 2] and [3, 2, 3] there, which is not the product of channels."""
    save_file({"conv.weight": rand(6, 4, 3)}, tmp_path / "base.safetensors")
    factors = {f"{PREFIX}conv.lokr_w1": rand(2, 2), f"{PREFIX}conv.lokr_w2": rand(3, 2, 3)}
    adapter("lora", factors, peft_type="LOKR", alpha=4)

    with pytest.raises(m.CheckpointError, match=r"conv: lokr_w2 \[3, 2, 3\] is of a one-dimensional conv"):
        merge()


def test_a_square_tensor_whose_order_nothing_tells_is_refused(base: dict[str, Tensor], adapter: Adapter):
    adapter("lora", lora(Q, O), fan_in_fan_out=True)

    with pytest.raises(m.CheckpointError, match=r"o_proj\.weight is square, and nothing tells whether"):
        merge()


def test_a_linear_layer_is_not_read_transposed_because_a_configuration_says_so(
    base: dict[str, Tensor], adapter: Adapter
):
    """PEFT warns, sets fan_in_fan_out to false for torch.nn.Linear, and merges the product as it is."""
    adapter("lora", lora(O), fan_in_fan_out=True)

    with pytest.raises(m.CheckpointError, match=r"o_proj\.weight is square.* set it to false in adapter_con"):
        merge()


def test_an_adapter_without_a_base_asks_for_one(base: dict[str, Tensor], adapter: Adapter, tmp_path: Path):
    adapter("lora", lora(Q))
    save_file(base, tmp_path / "other.safetensors")

    with pytest.raises(
        m.RecipeError, match=r"lora is an adapter, and 0 models .* It was trained on org/base"
    ):
        m.merge(m.weighted_sum("lora", "lora"))
    with pytest.raises(m.RecipeError, match=r"2 models of the recipe could be its base: say which one"):
        m.merge(m.n_average("base", "other", "lora"))


def test_the_base_of_a_difference_is_a_model(base: dict[str, Tensor], adapter: Adapter):
    adapter("lora", lora(Q))
    mean = m.weighted_sum("base", "base", alpha=0.25)

    with pytest.raises(m.RecipeError, match=r"lora_delta: lora is a difference to a model that is read"):
        m.merge(mean + m.lora_delta("lora", mean))


def test_a_file_without_its_configuration_is_not_an_adapter(
    base: dict[str, Tensor], adapter: Adapter, tmp_path: Path
):
    adapter("lora", lora(Q))
    (tmp_path / "lora" / "adapter_config.json").unlink()

    with pytest.raises(m.RecipeError, match=r"name the folder of an adapter of PEFT, which has adapter_c"):
        merge()


def test_a_configuration_that_is_no_mapping_is_refused(
    base: dict[str, Tensor], adapter: Adapter, tmp_path: Path
):
    adapter("lora", lora(Q))
    config = tmp_path / "lora" / "adapter_config.json"

    for text, message in (("[1]", "expected a mapping, got"), ("{", "it is not JSON")):
        config.write_text(text)
        with pytest.raises(m.CheckpointError, match=message):
            merge()
    config.write_text(json.dumps({}))
    with pytest.raises(m.CheckpointError, match="peft_type NONE: only LoRA, DoRA, LoHa and LoKr are read"):
        merge()
