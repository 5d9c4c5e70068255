"""The tensors of a PEFT adapter, sorted by the tensor of the model that they change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mecha_exp.architectures.lora import (
    DOWN,
    HADA,
    LOHA,
    LOKR,
    PEFT_PREFIX,
    UP,
    W1,
    W2,
    difference_shape,
    reshapes,
)
from mecha_exp.architectures.lora_deltas import difference, with_magnitudes
from mecha_exp.checkpoint import TensorInfo
from mecha_exp.errors import CheckpointError, ConfigError, Problems, counted, some
from mecha_exp.families import is_output

A, B, BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"
OF_ROWS, OF_COLUMNS = "lora_embedding_A", "lora_embedding_B"
"""The factors of an embedding: [rank, tokens] and [size, rank]."""
MAGNITUDE = "lora_magnitude_vector"
TOKENS = "token_adapter.trainable_tokens_delta"
"""The rows of some tokens (`trainable_token_indices`): those of the trained model, and no difference."""
_SUFFIXES = {name: name for name in (A, B, BIAS, OF_ROWS, OF_COLUMNS, MAGNITUDE, TOKENS)}
_SUFFIXES[f"{MAGNITUDE}.weight"] = MAGNITUDE
_SUFFIXES |= {name: name for name in (*LOHA, *LOKR)}
_FACTOR = re.compile(rf"(?P<module>.+)\.(?P<suffix>{'|'.join(map(re.escape, _SUFFIXES))})")

_BEFORE_TRAINING = ".original_module."
"""In the names of tensors that PEFT saves beside those of `modules_to_save`: what these were before."""
_WRAPPERS = (".token_adapter.base_layer.", ".base_layer.", ".modules_to_save.")
"""What PEFT puts into the names of whole tensors."""

_RANK_AXES = (
    *((A, 0), (B, 1), (OF_ROWS, 0), (OF_COLUMNS, 1)),
    *((W1[2], 0), (W2[2], 0), (HADA[0][1], 0), (HADA[1][1], 0)),
)
"""The axes of factors that have the rank."""

Shape = tuple[int, ...]
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Module:
    """What an adapter has for one tensor of a model.

    Attributes:
        name: of the module in the adapter, without PEFT's prefix.
        key: of the model's tensor.
        factors: the keys of its factors in the adapter, by suffix.
        whole: the key of a tensor that takes the place of the model's; empty without one.
        scale: of the product.
        is_transposed: whether the model's tensor is stored as (inputs, outputs).
        tokens: the rows that take the place of the model's, where the adapter has rows of some tokens.
    """

    name: str
    key: str
    factors: Mapping[str, str] = field(default_factory=dict)
    whole: str = ""
    scale: float = 1.0
    is_transposed: bool = False
    tokens: Sequence[int] = ()

    @property
    def reads_base(self) -> bool:
        """Whether the difference depends on the model's tensor."""
        return bool(self.whole) or not self.factors.keys().isdisjoint((MAGNITUDE, TOKENS))

    @property
    def is_lycoris(self) -> bool:
        """Whether its factors are those of LoHa or LoKr."""
        return bool(self.factors) and self.factors.keys() <= {*LOHA, *LOKR}

    @property
    def is_embedding(self) -> bool:
        """Whether its factors are those of an embedding."""
        return OF_ROWS in self.factors

    def product(self, read: Read) -> Tensor:
        """s B A in the shape of a linear or convolutional layer, s (B A)^T of an embedding.

        Of LoHa s (w1_a w1_b) * (w2_a w2_b), of LoKr s kron(w1, w2), in a shape that is still to be changed.

        Args:
            read: (key of the adapter) -> its tensor.
        """
        if BIAS in self.factors:
            return read(self.factors[BIAS]) * self.scale
        if self.is_lycoris:
            return difference({suffix: read(own) for suffix, own in self.factors.items()}) * self.scale
        up, down = (OF_COLUMNS, OF_ROWS) if self.is_embedding else (B, A)
        factors = {UP: read(self.factors[up]) * self.scale, DOWN: read(self.factors[down])}
        product = difference(factors)
        return torch.t(product) if self.is_embedding or self.is_transposed else product

    def delta(self, read: Read, base: Read) -> Tensor:
        """The difference to the model's tensor; with magnitudes m of DoRA m (W + D) / ||W + D|| - W.

        The norm is that of each output: over rows of a linear layer, over a kernel, over the tokens of an
        embedding.

        Args:
            read, base: (key) -> the tensor of the adapter, and of the model.

        Source: LoRA, Hu et al. 2021, arXiv:2106.09685; rsLoRA, Kalajdzievski 2023, arXiv:2312.03732; DoRA,
        Liu et al. 2024, arXiv:2402.09353; PEFT 0.21 for the names.
        """
        if not self.reads_base:
            return self.product(read)
        before = base(self.key)
        return self.adapted(read, before) - before

    def adapted(self, read: Read, before: Tensor) -> Tensor:
        """The model's tensor with all that the adapter changes in it, given the tensor before."""
        after = read(self.whole).to(before.dtype) if self.whole else before
        if TOKENS in self.factors:
            rows = read(self.factors[TOKENS]).to(after.dtype)
            return after.index_copy(0, torch.tensor(self.tokens), rows)
        if self.factors:
            after = after + self.product(read).reshape(after.shape)
        if MAGNITUDE in self.factors:
            outputs = after.ndim - 1 if self.is_embedding or self.is_transposed else 0
            by_axis = [-1 if axis == outputs else 1 for axis in range(after.ndim)]
            after = with_magnitudes(after, read(self.factors[MAGNITUDE]).reshape(by_axis))
        return after


def sorted_modules(keys: Iterable[str], name: str) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The factors of each module by suffix, and the whole tensors by their key in the model.

    Raises:
        CheckpointError: keys that are not PEFT's, or a module without one of its factors.
    """
    factors: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    unknown = []
    for key in keys:
        inner = key.removeprefix(PEFT_PREFIX)
        if match := _FACTOR.fullmatch(inner):
            factors.setdefault(match["module"], {})[_SUFFIXES[match["suffix"]]] = key
        elif inner == key or "lora_" in inner:
            unknown.append(key)
        elif _BEFORE_TRAINING not in inner:
            for wrapper in _WRAPPERS:
                inner = inner.replace(wrapper, ".")
            whole[inner] = key
    problems = Problems()
    if unknown:
        problems.add(
            f"{name}: {counted(len(unknown), 'key is not one', 'keys are not those')} of a LoRA of PEFT: "
            f"{some(unknown, 3)}. Expected {PEFT_PREFIX}MODULE.{A}, .{B} and their like."
        )
    for module, suffixes in factors.items():
        pairs = [(A, B), (OF_ROWS, OF_COLUMNS)]
        is_pair = any(suffixes.keys() & {*pair} == {*pair} for pair in pairs)
        if not is_pair and not suffixes.keys() <= {*LOHA, *LOKR} and suffixes.keys() != {TOKENS}:
            problems.add(f"{name}: the module {module} has only {some(sorted(suffixes))}.")
    problems.raise_as(CheckpointError)
    return factors, whole


def fault_of(module: Module, shapes: Mapping[str, Shape], rank: int, target: TensorInfo) -> str:
    """What does not fit in a module, or an empty string.

    Args:
        shapes: of the tensors of the adapter, by suffix; of a whole tensor by an empty string.
        rank: that the configuration says.
        target: the tensor of the model.
    """
    try:
        own_shape = _shape_of(module, shapes, target.shape)
    except ConfigError as error:
        return f"{module.name}: {error}"
    of_rank = {
        f"{suffix} {list(shape)}": shape[axis]
        for suffix, axis in _RANK_AXES
        if (shape := shapes.get(suffix)) and len(shape) > axis
    }
    if wrong := [described for described, size in of_rank.items() if size != rank]:
        return f"its configuration says rank {rank}, and {some(wrong)} has another"
    if own_shape is not None and own_shape != target.shape:
        listed = some((f"{suffix} {list(shape)}" for suffix, shape in shapes.items() if suffix), 4)
        return (
            f"{listed} make a difference of shape {list(own_shape)}, and {module.key} is {list(target.shape)}"
        )
    if "" in shapes and shapes[""] != target.shape:
        return f"{module.whole} is {list(shapes[''])}, and {module.key} of the base {list(target.shape)}"
    if (magnitude := shapes.get(MAGNITUDE)) is not None and own_shape is not None:
        outputs = own_shape[-1] if module.is_embedding or module.is_transposed else own_shape[0]
        if torch.Size(magnitude).numel() != outputs:
            return f"{MAGNITUDE} {list(magnitude)} does not have a number for each of {outputs} outputs"
    return ""


def _shape_of(module: Module, shapes: Mapping[str, Shape], target: Shape) -> Shape | None:
    """The shape of a module's product; None without factors.

    Raises:
        ConfigError: factors of LoHa or LoKr that do not belong together, or that PEFT multiplies otherwise.
    """
    if module.is_lycoris:
        _refuse_other_order(shapes)
        own_shape = difference_shape({suffix: shape for suffix, shape in shapes.items() if suffix})
        return target if reshapes(own_shape, target) else own_shape
    if BIAS in shapes:
        return shapes[BIAS]
    if TOKENS in shapes:
        return _with_rows(module, shapes[TOKENS], target)
    if OF_ROWS in shapes:
        return (shapes[OF_ROWS][-1], shapes[OF_COLUMNS][0])
    if A not in shapes:
        return None
    down, up = shapes[A], shapes[B]
    return (down[-1], up[0]) if module.is_transposed else (up[0], *down[1:])


def _with_rows(module: Module, rows: Shape, target: Shape) -> Shape:
    """The shape of a table some rows of which are replaced, which is the table's own."""
    if len(target) != 2 or rows != (len(module.tokens), target[1]):
        raise ConfigError(f"{TOKENS} {list(rows)} is not {len(module.tokens)} rows of {list(target)}")
    if not all(0 <= token < target[0] for token in module.tokens):
        raise ConfigError(f"there is no token {max(module.tokens)} in {list(target)}")
    return target


def _refuse_other_order(shapes: Mapping[str, Shape]) -> None:
    """Refuse the LoKr of one-dimensional convolutions.

    PEFT 0.21 aligns the last axes of w1 [a, b] and w2 [c, d, kernel] and trains what comes of it, which is
    not the Kronecker product of channels that LoKr defines.
    """
    for suffix in (W2[0], W2[3]):
        if len(shapes.get(suffix, ())) == 3:
            raise ConfigError(
                f"{suffix} {list(shapes[suffix])} is of a one-dimensional convolution, whose axes PEFT "
                "multiplies in another order. Merge the adapter into its model with PEFT first "
                "(merge_and_unload, save_pretrained)"
            )


CONV1D = ("c_attn", "c_proj", "c_fc", "q_attn")
"""The names of `Conv1D` layers of transformers, whose weights are stored as (inputs, outputs)."""


def is_transposed(
    name: str, shapes: Mapping[str, tuple[Shape, Shape, Shape]], fan_in_fan_out: bool
) -> bool | None:
    """Whether the tensor of a linear module is stored as (inputs, outputs); None where that cannot be told.

    Shapes tell, but for square tensors. There a module with the same last name decides, as all layers named
    `c_proj` are of one class, and else the configuration, unless other shapes contradict it or the name is
    not one of `CONV1D`: PEFT sets fan_in_fan_out to false for linear layers, and so it is in its own files.

    Args:
        name: of the module.
        shapes: of A, of B and of the model's tensor, by module.
        fan_in_fan_out: what the configuration says.
    """
    known = {other: told for other, each in shapes.items() if (told := _told_by_shapes(*each)) is not None}
    if name in known:
        return known[name]
    last = name.rpartition(".")[2]
    namesakes = {told for other, told in known.items() if other.rpartition(".")[2] == last}
    if len(namesakes) == 1:
        return namesakes.pop()
    is_unlikely = fan_in_fan_out and last not in CONV1D
    return None if namesakes or (not fan_in_fan_out) in known.values() or is_unlikely else fan_in_fan_out


def _told_by_shapes(down: Shape, up: Shape, target: Shape) -> bool | None:
    if len(target) != 2 or len(down) != 2 or down[-1] != up[0]:
        return len(target) == 2 and target == (down[-1], up[0]) and target != (up[0], *down[1:])
    return None


def base_keys(names: Sequence[str], keys: Iterable[str], ending: str = "") -> dict[str, str]:
    """The key of the model that each name of an adapter means; names without one are left out.

    A model alone and the same model below a head differ in the first part of their keys, such as `model.` or
    `transformer.`; an adapter for the one is read for the other. An output layer may have another name in
    memory, where PEFT sees it, than in the model's file, such as `lm_head` for `embed_out`.
    """
    known = set(keys)
    firsts = dict.fromkeys(f"{key.partition('.')[0]}." for key in known)
    full_keys: dict[str, str] = {}
    for name in names:
        last = f"{name}{ending}".rpartition(".")[2]
        heads = [key for key in known if is_output(key) and key.endswith(f".{last}")]
        ways = (
            [name],
            [name.partition(".")[2]],
            [f"{first}{name}" for first in firsts],
            [key.removesuffix(ending) for key in heads if is_output(f"{name}{ending}")],
        )
        matches = ([c for c in way if c and f"{c}{ending}" in known] for way in ways)
        match = next(filter(None, matches), [])
        if len(match) == 1:
            full_keys[name] = f"{match[0]}{ending}"
    return full_keys
