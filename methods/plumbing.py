"""Putting recipes together without arithmetic: fallbacks for missing keys, parts of models, dtypes."""

import math
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mecha_exp import Parameter, RecipeError, Return, StateDict, factor, merge_method, skip_key
from mecha_exp.extensions.merge_methods import (
    ApproximatedRows,
    Approximation,
    LayersSource,
    RowsSource,
    RowTable,
    Span,
    did_you_mean,
    floating_dtype,
    in_other_names,
    round_to,
)

T = TypeVar("T")


@merge_method(choice=True)
def fallback(a: Parameter(StateDict[T]), default: Parameter(StateDict[T]), **kwargs: object) -> Return(T):
    """a where it has the key, else default: `a | default`."""
    return a if kwargs["key"] in a else default


@merge_method(choice=True)
def select(which: Parameter(int, ge=0, help="a number, by key"), *values: Parameter(StateDict[T])) -> Return(
    T
):
    """At each key the value whose number, counted from 0, `which` is there.

    A dictionary of recipes is written so: `{"encoder": a, "default": b}` is
    `select({"encoder": 0, "default": 1}, a, b)`. Source: sd-mecha, whose dictionaries may hold nodes.
    """
    return values[which]


@merge_method(choice=True)
def omit_non_finite(a: Parameter(StateDict[T])) -> Return(T):
    """A model without the keys where it has a NaN or an infinity: `omit_non_finite(a) | b` takes those of b.

    a is a model that is read, all of whose values are looked at before the merge; the keys count as missing
    from it wherever the merge uses it. For all models at once there is the engine's `on_nonfinite=skip`.
    Source: sd-mecha.
    """
    return a  # the engine reads it without those keys


@merge_method(choice=True)
def pick_component(
    a: Parameter(StateDict[T]), component: Parameter(str, help="such as `vae`"), **kwargs: object
) -> Return(T):
    """The keys of one component of a model; the others are left out.

    Raises a RecipeError where the model config of a has no such component. `python -m mecha_exp info FILE`
    names those of a model.
    """
    return a if _is_in(a, component, kwargs["key"]) else skip_key(kwargs["key"])


@merge_method(choice=True)
def omit_component(
    a: Parameter(StateDict[T]), component: Parameter(str, help="such as `vae`"), **kwargs: object
) -> Return(T):
    """The keys of all components of a model but one, which is left out; see `pick_component`."""
    return skip_key(kwargs["key"]) if _is_in(a, component, kwargs["key"]) else a


def _is_in(a: StateDict[T], component: str, key: str) -> bool:
    components = a.model_config.components()
    if component not in components:
        raise RecipeError(
            f"the model config '{a.model_config.identifier}' has no component '{component}'."
            f"{did_you_mean(component, components)}"
        )
    return a.model_config.resolve_alias(key) in components[component]


@merge_method(view=True, reads_rows=lambda rest, **_: rest != "none")
def take_layers(
    a: Parameter(StateDict[T]),
    first: Parameter(int, ge=0, help="the first layer that is taken, counted from 0"),
    end: Parameter(int, ge=1, help="the one after the last that is taken"),
    at: Parameter(int, ge=0, help="the new number of the first") = 0,
    rest: Parameter(
        str, choices=("all", "none", "before", "after"), help="which keys outside the layers are taken"
    ) = "none",
) -> Return(T):
    """The layers first, ..., end - 1 of a model, numbered from `at` on; `stack_layers` puts them together.

    Of the keys outside the layers (embeddings, the last norm, the output layer) it has all, none, those
    before or those after the layers. They are read in place: nothing is copied. `a` is a model that is read.
    Source: mergekit, slices.
    """
    return LayersSource(a, Span(first, end, at, rest))


@merge_method(view=True, arranges="rows")
def take_rows(
    *models: Parameter(StateDict[T]),
    rows: Parameter(str, help="such as `0:32000 1@32000:32002`"),
    tokenizer: Parameter(Path, help="the tokenizer.json that the new rows are for") = None,
) -> Return(T):
    """The first model, with other rows of tokens in its embedding and output layer; `align_tokens` does it.

    The words of `rows` stand for rows, in order: `5` and `0:32000` are rows of the first model (the end is
    left out), `1@5` and `1@0:9` rows of the second, `0@5+1@7` is the mean of rows, `zero*3` are rows of
    zeros, and `mean*62` at the end is the mean of all rows before. They are read in place, row by row, from
    models that are read. A folder that is written gets the tokenizer beside `tokenizer`, or none.
    Source: mergekit, tokenizer.
    """
    return RowsSource(models[0], RowTable.parse(rows), models[1:])


@merge_method(view=True, arranges="rows")
def approximate_rows(
    a: Parameter(StateDict[T]),
    donor: Parameter(StateDict[T]),
    shared: Parameter(str, help="such as `0@0:100+1@3:103`"),
    rows: Parameter(str, help="such as `5 9:12`"),
    k: Parameter(int, ge=1, help="how many rows of a are added at most") = 64,
) -> Return(T):
    """Rows of a for tokens that it lacks: c_1 a[i_1] + ... + c_k a[i_k], as `align_tokens` asks for them.

    The tokens i and the coefficients c are those by which orthogonal matching pursuit writes the donor's row
    as a sum of the donor's rows. `rows` are the rows of the donor that are made, and `shared` the tokens that
    both have, each a row of a and one of the donor. Embedding and output layer are approximated apart; a and
    the donor may have rows of different sizes. Both are models that are read.
    Agrees: mergekit, `omp` of tokensurgeon, to 1e-5 where k is below the size of the donor's rows.
    Source: Goddard and Fernandes Neto, arXiv:2506.06607; mergekit, tokensurgeon.
    """
    return ApproximatedRows(a, donor, Approximation(shared, rows, k))


@merge_method(view=True, arranges="keys")
def rename_keys(
    a: Parameter(StateDict[T]),
    rules: Parameter(str, help="such as `layers.*.mlp.* -> layers.*.experts.0.*`"),
) -> Return(T):
    """A model under other keys, by rules `OLD -> NEW` between commas; the first about a key decides.

    A `*` stands for any text, which goes to the `*` of the same place in the new key. Keys that no rule is
    about, or whose new name is empty, are left out. They are read in place: nothing is copied. `a` is a model
    that is read. Source: this project.
    """
    return in_other_names(a, rules)


@merge_method(elementwise=True)
def cast(
    a: Parameter(Tensor),
    device: Parameter(str, help="for recipes of sd-mecha; it changes nothing") = None,
    dtype: Parameter(str, help="such as `float16` or `bfloat16`") = None,
) -> Return(Tensor):
    """The values of a rounded to a floating dtype: `a.to(dtype=...)`.

    Where nothing comes after it, the keys of the output have that dtype too. `device` is what recipes of
    sd-mecha may say, and changes nothing: the engine chooses where it computes.
    """
    if dtype is None:
        return a
    return round_to(a, floating_dtype(dtype)).to(a.dtype)


@merge_method
def get_dtype(a: Parameter(StateDict[Tensor]), **kwargs: object) -> Return(str, "param"):
    """The dtype in which a stores each key, read from its header: `merged.to(dtype=get_dtype(a))`.

    Of a merge it is that of its first model. Source: sd-mecha.
    """
    return str(a[str(kwargs["key"])].dtype).removeprefix("torch.")


@merge_method
def get_device(a: Parameter(StateDict[Tensor]), **kwargs: object) -> Return(str, "param"):
    """Where the tensors of a are when a recipe sees them: always `cpu`. The engine chooses where it computes.

    Source: sd-mecha.
    """
    return "cpu"


@factor(elements=lambda shape, *, values: len(values) * math.prod(shape), register=True)
def stack(*values: Parameter(Tensor)) -> Return(Tensor):
    """The values along a new first axis, for methods of your own that take them all as one tensor.

    Only methods of whole tensors and factors take it: its shape is not that of the key, so it is not a model.
    Source: sd-mecha.
    """
    return torch.stack(values)


@merge_method
def exchange_ema(model: Parameter(StateDict[Tensor]), **kwargs: object) -> Return(Tensor):
    """The weights of a Stable Diffusion 1 checkpoint and their running mean (EMA), each in the other's place.

    `model.a.b.weight` has its mean in `model_ema.abweight`; keys without one stay as they are.
    Source: sd-mecha.
    """
    key = str(kwargs["key"])
    partners = (name for name in model.keys() if _ema_of(name) == key)
    other = _ema_of(key) if _ema_of(key) in model else next(partners, key)
    return model[other]


def _ema_of(key: str) -> str:
    before, _, name = key.partition("model.")
    return "" if before or not name else f"model_ema.{name.replace('.', '')}"
