"""Model configs of LoRA files: modules that are named after tensors of another config and change them.

    identifier: sd1-kohya_kohya_lora
    adapter: {base: sd1-kohya, prefix: lora}

The module of `unet.mid_block.resnets.0.conv1.weight` is called `lora_unet_mid_block_resnets_0_conv1`; its
tensors have that name with a suffix, such as `.lora_up.weight`, and make the difference to the base's tensor.
Projects begin the names otherwise, and keep the dots or not:

    identifier: flux-flux_lora
    adapter: {base: flux-flux, names: {model.diffusion_model.: [lora_unet_, diffusion_model.]}}
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from mecha_exp.architectures.config import DEFAULT_CONVENTION, ModelConfig
from mecha_exp.architectures.keys import KeyInfo
from mecha_exp.errors import ConfigError, counted, some

Shape = tuple[int, ...]

ANY_SHAPE: Shape = (-1,)
"""The shape of a key whose dimensions depend on the file, as the rank of a module does."""

UP, MID, DOWN = "lora_up.weight", "lora_mid.weight", "lora_down.weight"
W1, W2 = ("lokr_w1", "lokr_w1_a", "lokr_w1_b"), ("lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
HADA = (("hada_w1_a", "hada_w1_b", "hada_t1"), ("hada_w2_a", "hada_w2_b", "hada_t2"))
ALPHA = "alpha"
LORA = (UP, MID, DOWN)
LOKR = (*W1, *W2)
LOHA = (*HADA[0], *HADA[1])
DORA = "dora_scale"
IA3 = (IA3_WEIGHT, IA3_ON_INPUT) = ("weight", "on_input")
OFT = (OFT_BLOCKS, OFT_RESCALE) = ("oft_blocks", "rescale")
GLORA = ("a1.weight", "a2.weight", "b1.weight", "b2.weight")
READ_BASE = frozenset({DORA, *IA3, *OFT, *GLORA})
"""The suffixes of modules whose difference depends on the tensor that they change."""

OF_MATRICES = (*LORA, *LOKR, *LOHA, "diff", ALPHA, DORA, *IA3, *OFT, *GLORA)
"""The suffixes in modules of tensors with two and more axes."""
OF_VECTORS, OF_BIASES = ("diff", "w_norm"), ("diff_b", "b_norm")
"""The suffixes in modules of other tensors: the difference itself."""
FULL = (*OF_VECTORS, *OF_BIASES)

SPELLINGS = {
    "lora_B.weight": UP,
    "lora_A.weight": DOWN,
    "lora_magnitude_vector": DORA,
    "lora_magnitude_vector.weight": DORA,
}
"""Suffixes of diffusers in modules whose names keep their dots, and what the same is called elsewhere."""

LORA_DELTA = "lora_delta"
"""The merge method that reads an adapter as a difference to a base."""

MAKERS_OF_LORAS = frozenset({"extract_kohya_lora", "extract_lycoris_lora"})
"""The merge methods that make LoRA files in which the alpha of each module is its rank."""

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of modules."""

OTHERS = {
    "an older OFT": ("oft_diag",),
    "GLoRA with a core": ("bm.weight", "bm1.weight", "bm2.weight"),
    "PEFT": (
        "lora_A.weight",
        "lora_B.weight",
        "lora_linear_layer.up.weight",
        "lora_linear_layer.down.weight",
        "lora.up.weight",
        "lora.down.weight",
    ),
}
"""The suffixes of kinds of modules that cannot be read."""


class AdapterConfig(ModelConfig):
    """The config of LoRA files for the models of another config; every key is optional.

    Attributes:
        base: the config of the models.
        prefix: the beginning of the names of modules, without the underscore behind it; or empty.
        names: the beginnings of modules by those of the base's keys. The character that one ends with, `_`
            or `.`, stands for the dots of the key.
    """

    def __init__(
        self,
        identifier: str,
        base: ModelConfig,
        prefix: str = "",
        names: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(identifier, ())
        self.base = base
        self.prefix = prefix
        self.names = {begin: tuple(others) for begin, others in (names or {"": [f"{prefix}_"]}).items()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AdapterConfig):
            return NotImplemented
        return (self.identifier, self.base, self.names) == (other.identifier, other.base, other.names)

    def __hash__(self) -> int:
        return hash((self.identifier, self.prefix))

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.identifier} {self.names} {self.base.digest}".encode()).hexdigest()

    @property
    def beginnings(self) -> tuple[str, ...]:
        """All beginnings of modules."""
        return tuple(dict.fromkeys(begin for others in self.names.values() for begin in others))

    def on(self, base: ModelConfig) -> AdapterConfig:
        """The config for another member of the base's family."""
        return AdapterConfig(self.identifier, base, self.prefix, self.names)

    def modules_of(self, base_key: str) -> list[str]:
        """The names of the module that changes a tensor of the base; a bias has that of its layer."""
        stem = base_key.removesuffix(".weight").removesuffix(".bias")
        return [
            other + stem.removeprefix(begin).replace(".", other[-1])
            for begin, others in self.names.items()
            for other in others
            if stem.startswith(begin)
        ]

    def names_of(self, base_key: str) -> tuple[str, ...]:
        """The keys that a file may have for a tensor of the base; none for integers."""
        suffixes = self._suffixes_of(base_key)
        spelt = (*suffixes, *(other for other, suffix in SPELLINGS.items() if suffix in suffixes))
        return tuple(
            f"{module}.{suffix}"
            for module in self.modules_of(base_key)
            for suffix in (spelt if "." in module else suffixes)
            if "." not in module or suffix not in IA3
        )

    def base_key(self, key: str) -> str:
        """The base's tensor that a key changes; ConfigError for a key that is not in the config."""
        place = self._place_of(key)
        if place is None:
            raise self._unknown(key)
        return place[0]

    def modules(self, keys: Iterable[str]) -> dict[str, dict[str, str]]:
        """Group keys by the base's tensor, and by suffix; without those that are not in the config."""
        modules: dict[str, dict[str, str]] = {}
        for key in keys:
            if (place := self._place_of(key)) is not None:
                modules.setdefault(place[0], {})[place[1]] = key
        return modules

    def _suffixes_of(self, base_key: str) -> tuple[str, ...]:
        info = self.base.keys()[base_key]
        if "float" not in info.dtype:
            return ()
        return OF_BIASES if base_key.endswith("bias") else OF_VECTORS if len(info.shape) < 2 else OF_MATRICES

    def _place_of(self, key: str) -> tuple[str, str] | None:
        """The base's tensor that a key of a file changes, and the key's suffix; None for other keys."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        is_dotted, suffix = "." in match["module"], match["suffix"]
        if suffix in (IA3 if is_dotted else SPELLINGS):
            return None
        suffix = SPELLINGS.get(suffix, suffix)
        bases = self._base_keys.get(match["module"], ())
        return next(((base, suffix) for base in bases if suffix in self._suffixes_of(base)), None)

    def blocks(self, convention: str = DEFAULT_CONVENTION) -> tuple[str, ...]:
        return self.base.blocks(convention)

    @property
    def conventions(self) -> tuple[str, ...]:
        return self.base.conventions

    @cached_property
    def _base_keys(self) -> Mapping[str, Sequence[str]]:
        """The base's tensors by the names of the modules that change them."""
        bases: dict[str, list[str]] = {}
        for key in self.base.keys():
            for module in self.modules_of(key):
                bases.setdefault(module, []).append(key)
        return bases

    @cached_property
    def _components(self) -> Mapping[str, Mapping[str, KeyInfo]]:
        return {
            name: {
                own: KeyInfo(() if own.endswith(f".{ALPHA}") else ANY_SHAPE, info.dtype, optional=True)
                for key, info in keys.items()
                for own in self.names_of(key)
            }
            for name, keys in self.base.components().items()
        }

    def _assign_blocks(self, convention: str) -> Mapping[str, str]:
        keys = self.base.keys()
        return {name: self.base.block_of(key, convention) for key in keys for name in self.names_of(key)}


_SUFFIXES = sorted({*OF_MATRICES, *OF_VECTORS, *OF_BIASES, *SPELLINGS})
_KEY = re.compile(rf"(?P<module>.+?)\.(?P<suffix>{'|'.join(map(re.escape, _SUFFIXES))})")
"""A key of a module: the shortest name that leaves a suffix."""


def is_key_of(beginning: str, key: str) -> bool:
    """Whether a key may be of a module whose name has this beginning; with dots the suffix must tell, too."""
    return key.startswith(beginning) and (beginning.endswith("_") or _KEY.fullmatch(key) is not None)


def difference_shape(shapes: Mapping[str, Shape], target: Shape | None = None) -> Shape:
    """The shape of the difference that a module makes, from the shapes of its tensors by suffix.

    Tuples are enough: the first product of meta tensors imports torch code for half a second and more.

    Args:
        target: the shape of the tensor that it changes, for modules that depend on it.

    Raises:
        ConfigError: a tensor is missing, is of rank 0, or does not fit the others.
    """
    suffixes = shapes.keys() - {ALPHA, DORA}
    several = [name for name in (ALPHA, IA3_ON_INPUT) if math.prod(shapes.get(name, ())) != 1]
    if target is not None and several:
        raise ConfigError(f"{several[0]} is not one number")
    if target is not None and (DORA in shapes or suffixes & READ_BASE):
        return _shape_on(target, shapes)
    if len(suffixes) == 1 and (whole := next(iter(suffixes))) in FULL:
        return shapes[whole]
    empty = next((name for name, shape in shapes.items() if 0 in shape), None)
    if empty is not None:
        raise ConfigError(f"{empty} is of rank 0")
    if suffixes and suffixes <= set(LORA):
        return _lora_shape(shapes)
    if suffixes and suffixes <= set(LOHA):
        first, second = (_pair_shape(shapes, *names) for names in HADA)
        if first != second:
            raise ConfigError(f"its products are {list(first)} and {list(second)}")
        return first
    if suffixes and suffixes <= set(LOKR):
        first = shapes[W1[0]] if W1[0] in shapes else _pair_shape(shapes, *W1[1:])
        second = shapes[W2[0]] if W2[0] in shapes else _pair_shape(shapes, *W2[1:])
        return (first[0] * second[0], first[1] * second[1], *second[2:])
    raise ConfigError("these tensors do not belong together")


def reshapes(shape: Shape, target: Shape) -> bool:
    """Whether a difference can be reshaped into that of a tensor: it has as many rows and elements."""
    return math.prod(shape) == math.prod(target) and shape[:1] == target[:1]


def _shape_on(target: Shape, shapes: Mapping[str, Shape]) -> Shape:
    """The shape of a difference that depends on the tensor, which is the tensor's own."""
    if 0 in target or len(target) < 2:
        raise ConfigError("the tensor is not a matrix")
    rest = {suffix: shape for suffix, shape in shapes.items() if suffix != DORA}
    suffixes = rest.keys() - {ALPHA}
    if DORA in shapes:
        magnitude = shapes[DORA]
        ones = (1,) * (len(target) - 1)
        if magnitude not in ((target[0],), (target[0], *ones), (1, target[1], *ones[1:])):
            raise ConfigError(f"{DORA} {list(magnitude)} is not a number for each output or input")
        return difference_shape(rest)
    if suffixes <= set(IA3) and IA3_WEIGHT in rest and math.prod(rest[IA3_WEIGHT]) in target[:2]:
        return target
    blocks = rest.get(OFT_BLOCKS, ())
    if (
        suffixes <= set(OFT)
        and len(blocks) == 3
        and blocks[1] == blocks[2]
        and blocks[0] * blocks[1] == target[0]
        and math.prod(rest.get(OFT_RESCALE, target[:1])) == target[0]
    ):
        return target
    if suffixes == set(GLORA):
        a1, a2, b1, b2 = (_present(rest, name) for name in GLORA)
        if (a1[0], a2[1]) == (target[1], target[1]) and a1[1] == a2[0] == b2[0]:
            return _product_shape(b1, b2)
    raise ConfigError("modules of this kind and shape are not known")


def _lora_shape(shapes: Mapping[str, Shape]) -> Shape:
    up, down = (_present(shapes, name) for name in (UP, DOWN))
    if MID in shapes:
        return _tucker_shape(shapes[MID], (up[1], up[0]), down)
    return _product_shape(up, down)


def _pair_shape(shapes: Mapping[str, Shape], a: str, b: str, core: str = "") -> Shape:
    first, second = _present(shapes, a), _present(shapes, b)
    return _tucker_shape(shapes[core], first, second) if core in shapes else _product_shape(first, second)


def _present(shapes: Mapping[str, Shape], name: str) -> Shape:
    if name not in shapes:
        raise ConfigError(f"{name} is missing")
    if len(shapes[name]) < 2:
        raise ConfigError(f"{name} is not a matrix")
    return shapes[name]


def _product_shape(a: Shape, b: Shape) -> Shape:
    if math.prod(a[1:]) != b[0]:
        raise ConfigError(f"their ranks are {math.prod(a[1:])} and {b[0]}")
    return (a[0], *b[1:])


def _tucker_shape(core: Shape, a: Shape, b: Shape) -> Shape:
    if core[:2] != (a[0], b[0]):
        raise ConfigError(f"the ranks are {list(core[:2])} in the middle, and {a[0]} and {b[0]} outside")
    return (a[1], b[1], *core[2:])


def fault_of(
    config: AdapterConfig,
    base_key: str,
    names: Mapping[str, str],
    shapes: Mapping[str, Shape],
    any_size: bool = False,
) -> str:
    """Describe what is wrong with a module; an empty string where it fits its tensor.

    Args:
        names: the module's keys by their suffixes.
        shapes: the shapes of the keys.
        any_size: whether the base is a family whose sizes are not known, so that the tensor may be larger.
    """
    target = None if any_size else config.base.keys()[base_key].shape
    listed = ", ".join(f"{name} {list(shapes[name])}" for name in names.values())
    try:
        own = {suffix: shapes[name] for suffix, name in names.items()}
        shape = difference_shape(own, target) if target or not READ_BASE & own.keys() else None
    except ConfigError as error:
        return f"{listed} make no difference to {base_key} {list(target or ())}: {error}"
    if target and shape is not None and not reshapes(shape, target):
        return f"{listed} make a difference of shape {list(shape)}, and {base_key} is {list(target)}"
    return ""


def foreign(config: AdapterConfig, shapes: Mapping[str, Shape]) -> str:
    """Describe the keys that are in no module of a config; an empty string where there are none."""
    known = {name for names in config.modules(shapes).values() for name in names.values()}
    unknown = [key for key in shapes if key not in known]
    if not unknown:
        return ""
    listed = some((f"{key} {list(shapes[key])}" for key in unknown), 5)
    count = counted(len(unknown), "key is", "keys are")
    return f"{count} of no module of '{config.identifier}': {listed}.{other_kind(unknown)}"


def is_peft(keys: Collection[str]) -> bool:
    """Whether all keys are named as PEFT names those of an adapter."""
    return bool(keys) and all(key.startswith(PEFT_PREFIX) for key in keys)


def other_kind(keys: Iterable[str]) -> str:
    """A hint for keys of modules of a kind that cannot be read; otherwise an empty string."""
    ends = tuple((kind, f".{end}") for kind, named in OTHERS.items() for end in named)
    kinds = dict.fromkeys(kind for key in keys for kind, end in ends if key.endswith(end))
    if not kinds:
        return ""
    if "PEFT" in kinds:
        return (
            " These are names of PEFT or diffusers: name the folder of an adapter of PEFT, which has "
            "adapter_config.json, convert another file to kohya's names first, as "
            "`convert_state_dict_to_kohya` of diffusers does, or merge it into its model with PEFT's "
            "`merge_and_unload`."
        )
    return f" Modules of {some(kinds)} cannot be read."
