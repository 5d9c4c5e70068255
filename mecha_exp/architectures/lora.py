"""Model configs of LoRA files: modules that are named after tensors of another config and change them.

    identifier: sd1-kohya_kohya_lora
    adapter: {base: sd1-kohya, prefix: lora}

The module of `unet.mid_block.resnets.0.conv1.weight` is called `lora_unet_mid_block_resnets_0_conv1`; its
tensors have that name with a suffix, such as `.lora_up.weight`, and make the difference to the base's tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

from mecha_exp.architectures.config import DEFAULT_CONVENTION, ModelConfig
from mecha_exp.architectures.keys import KeyInfo
from mecha_exp.errors import ConfigError, some

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
OF_MATRICES = (*LORA, *LOKR, *LOHA, "diff", ALPHA)
"""The suffixes in modules of tensors with two and more axes."""
OF_VECTORS, OF_BIASES = ("diff", "w_norm"), ("diff_b", "b_norm")
"""The suffixes in modules of other tensors: the difference itself."""
FULL = (*OF_VECTORS, *OF_BIASES)

LORA_DELTA = "lora_delta"
"""The merge method that reads an adapter as a difference to a base."""

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of modules."""

OTHERS = {
    "DoRA": ("dora_scale",),
    "(IA)3": ("on_input",),
    "OFT or BOFT": ("oft_blocks", "oft_diag"),
    "GLoRA": ("a1.weight", "a2.weight", "b1.weight", "b2.weight", "bm1.weight", "bm2.weight"),
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
        prefix: the beginning of the names of modules.
    """

    def __init__(self, identifier: str, base: ModelConfig, prefix: str) -> None:
        super().__init__(identifier, ())
        self.base = base
        self.prefix = prefix

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AdapterConfig):
            return NotImplemented
        return (self.identifier, self.base, self.prefix) == (other.identifier, other.base, other.prefix)

    def __hash__(self) -> int:
        return hash((self.identifier, self.prefix))

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.identifier} {self.prefix} {self.base.digest}".encode()).hexdigest()

    def module_of(self, base_key: str) -> str:
        """The module that changes a tensor of the base; a bias has the module of its layer."""
        stem = base_key.removesuffix(".weight").removesuffix(".bias")
        return f"{self.prefix}_{stem.replace('.', '_')}"

    def names_of(self, base_key: str) -> tuple[str, ...]:
        """The keys that a file may have for a tensor of the base; none for integers."""
        module, info = self.module_of(base_key), self.base.keys()[base_key]
        if "float" not in info.dtype:
            return ()
        is_bias = base_key.endswith("bias")
        suffixes = OF_BIASES if is_bias else OF_VECTORS if len(info.shape) < 2 else OF_MATRICES
        return tuple(f"{module}.{suffix}" for suffix in suffixes)

    def base_key(self, key: str) -> str:
        """The base's tensor that a key changes; ConfigError for a key that is not in the config."""
        try:
            return self._base_keys[key]
        except KeyError:
            raise self._unknown(key) from None

    def modules(self, keys: Iterable[str]) -> dict[str, dict[str, str]]:
        """Group keys by the base's tensor, and by suffix; without those that are not in the config."""
        modules: dict[str, dict[str, str]] = {}
        for key in keys:
            if key in self._base_keys:
                modules.setdefault(self._base_keys[key], {})[key.partition(".")[2]] = key
        return modules

    def blocks(self, convention: str = DEFAULT_CONVENTION) -> tuple[str, ...]:
        return self.base.blocks(convention)

    @property
    def conventions(self) -> tuple[str, ...]:
        return self.base.conventions

    @cached_property
    def _base_keys(self) -> Mapping[str, str]:
        return {name: key for key in self.base.keys() for name in self.names_of(key)}

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
        return {name: self.base.block_of(key, convention) for name, key in self._base_keys.items()}


def difference_shape(shapes: Mapping[str, Shape]) -> Shape:
    """The shape of the difference that a module makes, from the shapes of its tensors by suffix.

    Tuples are enough: the first product of meta tensors imports torch code for half a second and more.

    Raises:
        ConfigError: a tensor is missing, is of rank 0, or does not fit the others.
    """
    suffixes = shapes.keys() - {ALPHA}
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
    config: AdapterConfig, base_key: str, names: Mapping[str, str], shapes: Mapping[str, Shape]
) -> str:
    """Describe what is wrong with a module; an empty string where it fits its tensor.

    Args:
        names: the module's keys by their suffixes.
        shapes: the shapes of the keys.
    """
    target = config.base.keys()[base_key].shape
    listed = ", ".join(f"{name} {list(shapes[name])}" for name in names.values())
    try:
        shape = difference_shape({suffix: shapes[name] for suffix, name in names.items()})
    except ConfigError as error:
        return f"{listed} make no difference to {base_key} {list(target)}: {error}"
    if not reshapes(shape, target):
        return f"{listed} make a difference of shape {list(shape)}, and {base_key} is {list(target)}"
    return ""


def foreign(config: AdapterConfig, shapes: Mapping[str, Shape]) -> str:
    """Describe the keys that are in no module of a config; an empty string where there are none."""
    unknown = [key for key in shapes if key not in config.keys()]
    if not unknown:
        return ""
    listed = some((f"{key} {list(shapes[key])}" for key in unknown), 5)
    return f"{len(unknown)} keys are of no module of '{config.identifier}': {listed}.{other_kind(unknown)}"


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
    return f" Modules of {some(kinds)} depend on the weights of the model and cannot be read as differences."
