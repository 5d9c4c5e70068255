"""The architectures of transformers: what the library says of each, and whether that is seen in its keys.

The list of cases is the library's own: the classes that its `AutoModel...` mappings name, built two layers
deep on the meta device. `.ci/families.py` checks all of them; some are stored for tests without it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import mecha_exp as m
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.architectures.keys import KeyInfo
from mecha_exp.families import tied_to, token_tables

SAMPLE = Path(__file__).parents[1] / "golden" / "families.json"

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
        adapter: the keys of a LoRA of PEFT.
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
    adapter: dict[str, list[int]] = field(default_factory=dict)


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


TASKS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "CausalLM", "MaskedLM")
HEADED = tuple(f"For{task}" for task in (*TASKS, "ImageClassification"))
"""The ends of the names of classes that have a head beside a base model."""


def with_heads() -> dict:
    """The classes of transformers with heads, by name, as its auto classes list them."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto import modeling_auto

    mappings = [value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    values = [value for mapping in mappings for value in mapping.values() if value]
    names = {name for value in values for name in ([value] if isinstance(value, str) else value)}
    return {name: getattr(transformers, name) for name in sorted(names) if name.endswith(HEADED)}


def made(cls):
    """A model of default sizes without values, two layers deep where its config lets that be; None if not."""
    import torch

    for arrange in (shallow, lambda config: config):
        with contextlib.suppress(Exception), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cls(arrange(cls.config_class()))
    return None


def diffusion_classes() -> list[tuple[str, str, str]]:
    """The same for the transformers and UNets of diffusers, whose configurations are their arguments."""
    import diffusers

    names = [name for name in dir(diffusers.models) if "Transformer" in name or "UNet" in name]
    found = [getattr(diffusers.models, name) for name in names]
    models = [c for c in found if isinstance(c, type) and issubclass(c, diffusers.ModelMixin)]
    return [("diffusion", "diffusers", cls.__name__) for cls in models]


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

    if kind == "diffusers":
        import diffusers

        with torch.device("meta"):
            return getattr(diffusers.models, name)()
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

    model = built(kind, name)
    lists = ((n, len(m)) for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList))
    family = Family(name, purpose, _shapes(model), {n: length for n, length in lists if length > 1})
    if kind != "diffusers":
        _describe_tokens(family, model)
    if purpose == "causal":
        with contextlib.suppress(ValueError):  # it has no linear layers that PEFT knows
            family.adapter = _adapter_of(model)
    return family


def _shapes(model) -> dict[str, list[int]]:
    return {key: list(tensor.shape) for key, tensor in model.state_dict().items()}


def _adapter_of(model) -> dict[str, list[int]]:
    """The keys of a LoRA of PEFT on all linear layers of a model, which it changes."""
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    return {key: list(value.shape) for key, value in peft.get_peft_model_state_dict(adapted).items()}


def _describe_tokens(family: Family, model) -> None:
    """Add the names in files, the tables of tokens, the ties and the sides of the layers."""
    from transformers.core_model_loading import revert_weight_conversion

    if family.purpose in ("causal", "masked"):
        family.sides = _sides(model)
    keys = family.keys
    tied = model.all_tied_weights_keys if isinstance(model.all_tied_weights_keys, dict) else {}
    family.tied = {key: original for key, original in tied.items() if key in keys}
    with contextlib.suppress(Exception):  # of operations that need values
        filed = revert_weight_conversion(model, model.state_dict())
        family.keys = {key: list(tensor.shape) for key, tensor in filed.items()}
    places = {id(module): n for n, module in model.named_modules()}
    try:
        read, written = model.get_input_embeddings(), model.get_output_embeddings()
        family.read = f"{places[id(read)]}.weight" if read is not None else ""
        family.written = f"{places[id(written)]}.weight" if written is not None else ""
        model.resize_token_embeddings(read.weight.shape[0] + 2, mean_resizing=False)
    except Exception:  # it has none, or none that the library can resize
        return
    after = _shapes(model)
    changed = {key: shape for key, shape in keys.items() if after.get(key, shape) != shape}
    family.tokens = {
        key: next(a for a, (old, new) in enumerate(zip(shape, after[key], strict=True)) if old != new)
        for key, shape in changed.items()
    }
    family.tables = list(changed.values())


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
    yield from _wrong_blocks(anatomy, family.lists, by_config=family.purpose == "diffusion")
    if family.adapter:
        lora = {key: KeyInfo(tuple(shape), "float32") for key, shape in family.adapter.items()}
        yield from _wrong_blocks(Anatomy.of(lora), {})
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


def _wrong_blocks(anatomy: Anatomy, lists: dict[str, int], *, by_config: bool = False) -> Iterator[str]:
    """What is wrong with blocks and layers.

    Configs of diffusion models put small lists into one block, and number several lists in one row.
    """
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
        if len(held) > 1 or (owners[next(iter(held))] > 1 and not by_config):
            yield f"{'.'.join(place)} lies in {sorted(held)}, with others"
    for key in anatomy.keys:
        stack, number = _outermost(key) or ("", "")
        if stack not in lists or by_config:
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


SMALL = {
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "hidden_size", "d_model", "n_embd", "dim"), 64
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 64
    ),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "image_size"), 32),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "hidden_size_per_layer_input", "num_mel_bins"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "num_experts"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_local_experts"), 4),
    **dict.fromkeys(("n_routed_experts", "moe_num_experts"), 4),
    "num_experts_per_tok": 2,
}
"""Entries of configurations, and what they are at most in a model that is small enough to be saved."""

OTHER_VOCABULARIES = ("vision_config", "protein_encoder_config")
"""Sections whose vocabularies are not those of texts, and so have another size."""

LARGEST = 120_000_000
"""Parameters of the largest model that is saved; what cannot be made smaller is left out."""


class NotACase(Exception):
    """A class that cannot be built small, has no tokens, or cannot be loaded again by the library itself."""


def resized(kind: str, name: str, folder: Path) -> str:
    """Merge a model with itself with two more tokens; what is wrong with the result, or nothing.

    Raises:
        NotACase: the class says nothing about this.
    """
    import torch
    import transformers

    cls = getattr(transformers, name)
    try:
        model = _small(kind, name)
        model.save_pretrained(folder / "a")
        rows = model.get_input_embeddings().weight.shape[0]
        model.resize_token_embeddings(rows + 2, mean_resizing=False)
        model.save_pretrained(folder / "b")
        wanted = cls.from_pretrained(folder / "b").state_dict()
    except Exception as error:
        raise NotACase(" ".join(str(error).split())[:100] or repr(error)) from None
    recipe = m.weighted_sum(folder / "a", folder / "b", alpha=0.5)
    try:
        m.merge(recipe, folder / "cut", m.EngineOptions(resize_embeddings="truncate"))
        m.merge(recipe, folder / "merged", m.EngineOptions(resize_embeddings="pad"))
        merged, report = cls.from_pretrained(folder / "merged", output_loading_info=True)
    except Exception as error:
        return " ".join(str(error).split())
    if any(report.values()):
        return ", ".join(f"{kind} {sorted(map(str, keys))[:3]}" for kind, keys in report.items() if keys)
    if _contents(folder / "cut") != _contents(folder / "a"):
        return "cut to the smaller vocabulary, it is not the first model"
    found = merged.state_dict()
    other = [key for key in wanted if key not in found or not torch.equal(found[key], wanted[key])]
    return f"{other[:3]} differ" if other else ""


def _contents(folder: Path) -> list[bytes | dict]:
    """The tensors and the configuration of a model in a folder."""
    from safetensors.torch import load_file, save

    tensors = {k: t for file in sorted(folder.glob("*.safetensors")) for k, t in load_file(file).items()}
    return [save(dict(sorted(tensors.items()))), json.loads((folder / "config.json").read_bytes())]


def _small(kind: str, name: str):
    """A small model of a class with random weights."""
    import torch
    import transformers

    cls = getattr(transformers, name)
    make = cls.config_class or transformers.CONFIG_MAPPING[kind]
    why: Exception = ValueError("there is no model")
    for sizes in (SMALL, {entry: size for entry, size in SMALL.items() if entry.startswith("vocab")}):
        try:
            config = _shrunk(shallow(make()), sizes)
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in cls._from_config(config).parameters())
            if count < LARGEST:
                torch.manual_seed(0)
                return cls._from_config(config)
            why = ValueError(f"{count / 1e9:.1f}e9 parameters")
        except Exception as error:  # these sizes do not fit others
            why = error
    raise why


def _shrunk(config, sizes: dict[str, int]):
    import transformers

    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _shrunk(value, {**sizes, "vocab_size": 48} if name in OTHER_VOCABULARIES else sizes)
        elif name in sizes and isinstance(value, int) and value > sizes[name]:
            setattr(config, name, sizes[name])
        elif name.endswith("_token_id") and isinstance(value, int) and value >= sizes["vocab_size"]:
            setattr(config, name, 3)
    return config


EXCEPTIONS = ("FSMTModel", "FSMTForConditionalGeneration", "ReformerModelWithLMHead")
"""Of two the library calls the decoder's embedding the output layer; of Reformer it loses a bias."""

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


def sample() -> tuple[list[Family], set[str]]:
    """The stored classes, and the names of those that were no cases when they were stored."""
    stored = json.loads(SAMPLE.read_text(encoding="utf-8"))
    return [Family(**entry) for entry in stored["families"]], set(stored["no cases"])
