"""The architectures of transformers: what the library says of each, and whether that is seen in its keys.

The list of cases is the library's own: the classes that its `AutoModel...` mappings name, built two layers
deep on the meta device. `.ci/families.py` checks all of them; some are stored for tests without it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.architectures.keys import KeyInfo
from mecha_exp.families import tied_to, token_tables

SAMPLE = Path(__file__).parent / "golden" / "families.json"

MAPPINGS = {
    "base": "MODEL_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "audio": "MODEL_FOR_CTC_MAPPING_NAMES",
}
"""The mappings of transformers whose classes are checked, by what they are for."""

_DEPTHS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth"),
    *("num_encoder_layers", "num_decoder_layers", "num_blocks", "decoder_num_hidden_layers"),
)
_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")

SETTINGS = {
    "is_decoder": True,
    "vocab_size": 33,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "mask_token_id": 1,
}
"""Entries that some classes ask for and that have no default; they are set where they are empty."""


@dataclass
class Family:
    """What the library says of one class.

    Attributes:
        name: of the class.
        purpose: one of `MAPPINGS`.
        keys: its keys with their shapes, as files have them.
        lists: the length of each list of modules.
        read, written: the weights of its embedding and of its output layer; empty where it has none.
        tokens: the keys that `resize_token_embeddings` changes, with the axis, by their names in memory.
        tables: the shapes of these.
        tied: the keys that have the values of others, with those.
        sides: the keys outside of the layers that a text passes before all layers (0) or after them (1).
    """

    name: str
    purpose: str
    keys: dict[str, list[int]]
    lists: dict[str, int]
    read: str = ""
    written: str = ""
    tokens: dict[str, int] = field(default_factory=dict)
    tables: list[list[int]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    sides: dict[str, int] = field(default_factory=dict)


def classes() -> Iterator[tuple[str, str, str]]:
    """The purpose, the type of the configuration and the name of each class of the library."""
    from transformers.models.auto import modeling_auto

    seen = set()
    for purpose, mapping in MAPPINGS.items():
        for kind, names in getattr(modeling_auto, mapping).items():
            for name in (names,) if isinstance(names, str) else names:
                if name not in seen:
                    seen.add(name)
                    yield purpose, kind, name


def shallow(config, depth=2):
    """Set every number of layers of a configuration and of the ones in it."""
    import transformers

    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shallow(value, depth)
        elif isinstance(value, list) and name in _PER_LAYER:
            setattr(config, name, value[:depth])
        elif name in _DEPTHS and isinstance(value, int) and value > depth:
            setattr(config, name, depth)
        elif name in SETTINGS and not value:
            setattr(config, name, SETTINGS[name])
    return config


def built(kind: str, name: str):
    """A model of a class, on the meta device."""
    import torch
    import transformers

    cls = getattr(transformers, name)
    make = cls.config_class or transformers.CONFIG_MAPPING[kind]
    with torch.device("meta"):
        try:
            return cls._from_config(shallow(make()))
        except Exception:  # another depth than its default one does not fit other settings
            return cls._from_config(make())


def described(purpose: str, kind: str, name: str) -> Family:
    """What the library says of a class."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    model = built(kind, name)
    sides = _sides(model) if purpose in ("causal", "masked") else {}
    state = model.state_dict()
    lists = {n: len(m) for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1}
    tied = model.all_tied_weights_keys if isinstance(model.all_tied_weights_keys, dict) else {}
    keys = {key: list(tensor.shape) for key, tensor in state.items()}
    try:
        filed = {
            key: list(tensor.shape) for key, tensor in revert_weight_conversion(model, dict(state)).items()
        }
    except Exception:  # of operations that need values
        filed = keys
    family = Family(
        name, purpose, filed, lists, tied={k: v for k, v in tied.items() if k in keys}, sides=sides
    )
    places = {id(module): n for n, module in model.named_modules()}
    try:
        read, written = model.get_input_embeddings(), model.get_output_embeddings()
        family.read = f"{places[id(read)]}.weight" if read is not None else ""
        family.written = f"{places[id(written)]}.weight" if written is not None else ""
        model.resize_token_embeddings(read.weight.shape[0] + 2, mean_resizing=False)
    except Exception:  # it has none, or none that the library can resize
        return family
    after = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    changed = {key: shape for key, shape in keys.items() if after.get(key, shape) != shape}
    family.tokens = {
        key: next(a for a, (old, new) in enumerate(zip(shape, after[key], strict=True)) if old != new)
        for key, shape in changed.items()
    }
    family.tables = [list(shape) for shape in changed.values()]
    return family


def _sides(model) -> dict[str, int]:
    """The side of each parameter outside of numbered layers, by the order in which a text passes modules."""
    import torch

    calls: dict[str, list[int]] = defaultdict(list)
    count = itertools.count()

    def note(name: str) -> Callable[..., None]:
        return lambda module, arguments: calls[name].append(next(count))

    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(note(name))
    with contextlib.suppress(Exception), torch.no_grad(), torch.device("meta"):
        model.eval()(input_ids=torch.zeros(1, 4, dtype=torch.long))
    inside = [call for name, own in calls.items() if _outermost(f"{name}.") for call in own]
    sides = {}
    for name, own in calls.items():
        if inside and not _outermost(f"{name}.") and (own[0] < min(inside) or own[-1] > max(inside)):
            parameters = model.get_submodule(name).named_parameters(recurse=False)
            sides |= {f"{name}.{key}": int(own[0] > min(inside)) for key, _ in parameters}
    return sides


def mistakes(family: Family) -> Iterator[str]:
    """A sentence about everything that is seen otherwise than the library has it."""
    infos = {
        key: KeyInfo(tuple(shape), "float32") for key, shape in family.keys.items() if key not in family.tied
    }
    anatomy = Anatomy.of(infos)
    tables = token_tables(family.keys)
    yield from _wrong_blocks(anatomy, family.lists)
    if family.lists and not anatomy.has_layers:
        yield "no layers are seen"
    for key, side in ((family.read, 0), (family.written, 1)):
        outside = key in infos and family.read != family.written and anatomy.layer(key) is None
        allowed = (side,) if key in tables else (side, None)  # None makes a gradient an error
        if outside and anatomy.side(key) not in allowed:
            yield f"{key} is on side {anatomy.side(key)} of the layers"
    for key, side in family.sides.items():
        if key in infos and anatomy.layer(key) is None and anatomy.side(key) not in (side, None):
            yield f"{key} is on side {anatomy.side(key)} of the layers"
    for key, axis in family.tokens.items():
        if key in family.keys and tables.get(key) != axis:
            yield f"the tokens of {key} are on axis {axis}, and {tables.get(key)} is seen"
    for key, shape in family.keys.items():
        if shape in family.tables and key not in tables:
            yield f"the tokens of {key} are not seen"
    for key, original in family.tied.items():
        shapes = {k: shape for k, shape in family.keys.items() if k not in family.tied}
        if key in tables and original in shapes and tied_to(key, shapes, family.keys[key]) != original:
            yield f"{key} is tied to {original}, and {tied_to(key, shapes, family.keys[key])} is seen"


def _wrong_blocks(anatomy: Anatomy, lists: dict[str, int]) -> Iterator[str]:
    if other := set(anatomy.keys) ^ set(anatomy.blocks):
        yield f"{sorted(other)[:3]} have no block"
    blocks: dict[tuple[str, str], set[str]] = defaultdict(set)
    places: dict[str, set[int]] = defaultdict(set)
    for key in anatomy.keys:
        if (place := _outermost(key)) is not None:
            blocks[place].add(anatomy.blocks[key])
            places[place[0]].add(int(place[1]))
    owners = Counter(block for held in blocks.values() for block in held)
    for place, held in blocks.items():
        if len(held) > 1 or owners[next(iter(held))] > 1:
            yield f"{'.'.join(place)} lies in {sorted(held)}, with others"
    for key in anatomy.keys:
        stack, number = _outermost(key) or ("", "")
        if stack not in lists:
            continue
        numbers = sorted(places[stack])
        if anatomy.layer(key) != (numbers.index(int(number)), len(numbers)) and len(numbers) > 1:
            yield f"{key} is layer {anatomy.layer(key)}"
            return


def _outermost(key: str) -> tuple[str, str] | None:
    """The outermost list that a key lies in, and its number there."""
    words = key.split(".")
    place = next((i for i, word in enumerate(words[:-1]) if word.isdecimal()), None)
    return None if place is None else (".".join(words[:place]), words[place])


EXCEPTIONS = ("FSMTModel", "FSMTForConditionalGeneration")
"""The library calls the decoder's embedding the output layer of these."""

SAMPLED = (
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM"),
    *(
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "StableLmForCausalLM",
        "Exaone4ForCausalLM",
        "Jais2ForCausalLM",
    ),
    *("Glm4MoeForCausalLM", "Ernie4_5_MoeForCausalLM", "MiniMaxM2ForCausalLM", "PhimoeForCausalLM"),
    *(
        "DeepseekV3ForCausalLM",
        "BitNetForCausalLM",
        "DiffLlamaForCausalLM",
        "DogeForCausalLM",
        "MambaForCausalLM",
    ),
    *("SeedOssForCausalLM", "AfmoeForCausalLM", "LlamaForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM"),
    *("Lfm2ForCausalLM", "BartForConditionalGeneration", "T5ForConditionalGeneration", "MarianMTModel"),
    *("WhisperForConditionalGeneration", "LayoutLMModel", "LayoutLMv3Model", "LukeModel", "TapasModel"),
    *("LongformerModel", "BigBirdModel", "RoFormerModel", "NystromformerModel", "YolosModel", "ViltModel"),
    *(
        "TimesformerModel",
        "Data2VecVisionModel",
        "SiglipModel",
        "ModernBertForMaskedLM",
        "RobertaForMaskedLM",
    ),
    *(
        "Gemma3ForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "LlavaForConditionalGeneration",
    ),
)
"""The classes whose keys `make test` checks: those that were once seen wrongly, and one of each kind."""


def sample() -> tuple[list[Family], list[str]]:
    """The stored classes, and the names of those that could not be built when they were stored."""
    stored = json.loads(SAMPLE.read_text(encoding="utf-8"))
    return [Family(**entry) for entry in stored["families"]], stored["not built"]
