"""The decorators that make merge methods of functions: `merge_method`, `reduction`, `factor`."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from mecha_exp.errors import RecipeError
from mecha_exp.graph.nodes import Node
from mecha_exp.method_api.method import (
    BASE,
    STATISTICS,
    Arranges,
    Choose,
    Factor,
    Kind,
    MergeMethod,
    Reduction,
    RowLength,
)
from mecha_exp.method_api.registry import register_method, resolve_method
from mecha_exp.method_api.views import Reads, ViewMethod

_Method = TypeVar("_Method", bound=MergeMethod)


@overload
def merge_method(function: Callable[..., Any], /) -> MergeMethod: ...
@overload
def merge_method(
    *,
    identifier: str | None = None,
    elementwise: bool = False,
    rowwise: bool | RowLength = False,
    composite: bool = False,
    choice: bool = False,
    view: bool = False,
    register: bool = True,
    is_conversion: bool = False,
    is_interface: bool = False,
    implements: str | MergeMethod | None = None,
    choose: Choose | None = None,
    reuse_outputs: bool = True,
    cache_factory: Callable[[], Any] = dict,
    depends: Sequence[str | os.PathLike[str]] = (),
    variables: Sequence[str] = (),
    without: Callable[..., Node] | None = None,
    skip_unchanged: bool = False,
    arranges: str = "nothing",
    reads_rows: Callable[..., bool] | None = None,
    statistics: str | None = None,
    measured: str | None = None,
    paper_keys: Mapping[str, str] | None = None,
    empty: float | None = None,
    title: str = "",
    base: str = BASE,
) -> Callable[[Callable[..., Any]], MergeMethod]: ...
def merge_method(
    function: Callable[..., Any] | None = None,
    /,
    *,
    identifier: str | None = None,
    elementwise: bool = False,
    rowwise: bool | RowLength = False,
    composite: bool = False,
    choice: bool = False,
    view: bool = False,
    register: bool = True,
    is_conversion: bool = False,
    is_interface: bool = False,
    implements: str | MergeMethod | None = None,
    choose: Choose | None = None,
    reuse_outputs: bool = True,
    cache_factory: Callable[[], Any] = dict,
    depends: Sequence[str | os.PathLike[str]] = (),
    variables: Sequence[str] = (),
    without: Callable[..., Node] | None = None,
    skip_unchanged: bool = False,
    arranges: str = "nothing",
    reads_rows: Callable[..., bool] | None = None,
    statistics: str | None = None,
    measured: str | None = None,
    paper_keys: Mapping[str, str] | None = None,
    empty: float | None = None,
    title: str = "",
    base: str = BASE,
) -> MergeMethod | Callable[[Callable[..., Any]], MergeMethod]:
    """Make a merge method of a function, or of a class with `__call__`, and register it under its name.

    Args:
        function: a pure function of tensors; its parameters are annotated with `Parameter`, what it returns
            with `Return`. It must not write into its inputs. With `**kwargs` it receives the `key`, its
            `key_relation` to the keys of the arguments, and a `cache` (see `merge`).
        identifier: its name in recipes; the function's name by default.
        elementwise: `Kind.ELEMENTWISE`. Tensors are flat tiles in the dtype of the arithmetic, small values
            are zero-dimensional tensors.
        rowwise: `Kind.ROWWISE`; true for rows along the last axis, or (shape) -> the length of a row.
        composite: `Kind.COMPOSITE`: the function receives nodes for tensors (None for those left out) and
            returns a node.
        choice: `Kind.CHOICE`: the function returns one of its state dicts, or skips the key.
        view: `Kind.VIEW`: the function receives opened models (`StateDictSource`) and returns one, such as a
            `SourceView`. It is called when a merge is planned, and reads nothing then but headers.
        register: whether recipes can find it by name.
        is_conversion: whether `convert` may use it; it declares its source and target model configs.
        is_interface: whether it is a name for several methods with `implements=`; the one whose model configs
            are those of the arguments is called. The function's body is not used.
        implements: the interface that it implements.
        choose: for an interface, (possible model configs by argument) -> the method to call. An argument may
            have several configs, or none that is known. The method receives the arguments that it names.
        reuse_outputs: accepted for methods written for sd-mecha; it changes nothing.
        cache_factory: makes the result of `MergeNode.create_cache`.
        depends: files and folders that the function reads, relative to its own file. Their content is part of
            the signature of results: after an edit points are merged again.
        variables: the names of environment variables that the function reads, likewise.
        without: for a method of whole tensors that takes factors, (arguments as a composite gets them) -> a
            node. It stands for a call at keys of which a factor makes nothing, and gives what the function
            gives for (): such keys need no whole tensors then.
        skip_unchanged: for a method with `map_keys` whose result is an output: whether the keys that are made
            together are left out where they need a difference of two models that are read, `a - b`, alone,
            and both have the same bytes there. It costs a look into both when a merge is planned.
        arranges: what it settles itself about its models: `keys`, which the option `on_prefix` leaves as they
            are then, or `rows`, the keys and the rows of tokens, which may be others in each model then.
        reads_rows: for a view, (hyperparameters) -> whether it reads rows of tokens where they lie, so that
            these must be the same tokens as in other models. By default the keys of what it returns tell.
        statistics: the kind of statistics of its models that it needs (`fisher`, `gram`, ...) as its argument
            `statistics`: the call `statistics(FILE, ..., kind=KIND)`, which is checked to be of its models.
        measured: for statistics that belong to one merge and not to one model: `scaled` are of
            base + scale (expert - base), with the call's `scales`; `along_merge` with its `alpha`.
        paper_keys: what `keys=paper` gives keys of which kind; see `for_keys`.
        empty: its value where it is called with tensors and given none, such as 0 for a sum.
        title: its name in papers, which makes it one of the recipes that the help lists.
        base: the parameter that its recipe gives `models.base`.

    Raises:
        RecipeError: a parameter has no usable annotation, the name is taken by another function, or options
            exclude each other.
    """
    kinds = {
        Kind.ELEMENTWISE: elementwise,
        Kind.ROWWISE: bool(rowwise),
        Kind.COMPOSITE: composite,
        Kind.CHOICE: choice,
        Kind.INTERFACE: is_interface,
        Kind.VIEW: view,
    }
    chosen = [kind for kind, is_set in kinds.items() if is_set] or [Kind.WHOLE]
    if len(chosen) > 1:
        raise RecipeError(f"a merge method is one of {', '.join(k.value for k in chosen)}, not several")
    if choose is not None and not is_interface:
        raise RecipeError("`choose=` says what an interface stands for, so it needs `is_interface=True`")
    if without is not None and chosen != [Kind.WHOLE]:
        raise RecipeError(
            f"`without=` is for methods of whole tensors, not for one that is {chosen[0].value}"
        )
    if not register and (is_conversion or is_interface or implements):
        raise RecipeError("a conversion, an interface and what implements one must be registered")

    def decorate(fn: Callable[..., Any]) -> MergeMethod:
        name, columns = identifier or fn.__name__, _row_length(rowwise)
        method = MergeMethod(fn, name, chosen[0], is_conversion, cache_factory, columns)
        if view:
            method = ViewMethod(fn, name, reads_rows)
        method.choose = choose
        method.without = without
        method.skip_unchanged = skip_unchanged
        method.arranges = Arranges(arranges)
        method.statistics, method.measured = statistics, measured
        method.paper_keys, method.empty = paper_keys, empty
        method.title, method.base = title, base
        if statistics is not None and STATISTICS not in method.signature.names:
            raise RecipeError(f"{name}: it needs the statistics {statistics}, as a parameter `{STATISTICS}`")
        if base != BASE and base not in method.signature.names:
            raise RecipeError(f"{name}: base={base!r} is none of its parameters")
        if skip_unchanged and method.map_keys is None:
            raise RecipeError(
                f"{method.identifier}: `skip_unchanged=True` leaves out keys by what they are made of, which "
                "`map_keys` says: write one"
            )
        method.depends = _beside(fn, depends)
        method.variables = tuple(variables)
        if implements is not None:
            _implement(method, implements)
        return _registered(method, register)

    return decorate if function is None else decorate(function)


@overload
def reduction(function: Callable[..., Any], /) -> Reduction: ...
@overload
def reduction(
    *,
    sums: bool = False,
    rank: Callable[..., int] | None = None,
    rounds: Callable[[torch.dtype], int] = ...,
    finish: Callable[..., torch.Tensor] | None = None,
    rowwise: bool | RowLength = False,
    register: bool = True,
) -> Callable[[Callable[..., Any]], Reduction]: ...
def reduction(
    function: Callable[..., Any] | None = None,
    /,
    *,
    sums: bool = False,
    rank: Callable[..., int] | None = None,
    rounds: Callable[[torch.dtype], int] = lambda _: 1,
    finish: Callable[..., torch.Tensor] | None = None,
    rowwise: bool | RowLength = False,
    register: bool = True,
) -> Reduction | Callable[[Callable[..., Any]], Reduction]:
    """Make a reduction of a function of elements or blocks; see `Reduction` and, for rows, `merge_method`.

    >>> @reduction(sums=True)
    ... def dot(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor, "param"):
    ...     return a.double() * b.double()

    Raises:
        RecipeError: as `merge_method`; or `rank` is combined with `sums` or `finish`, or `rowwise` with
            `sums` or `rank`.
    """
    if rank and (sums or finish):
        raise RecipeError("a reduction by rank gives the entry of that rank: it has no sums and no finish")
    if rowwise and (rank or sums):
        raise RecipeError("a reduction by rows gets blocks of rows: it has no sums and no rank of entries")

    def decorate(fn: Callable[..., Any]) -> Reduction:
        method = Reduction(fn, fn.__name__, rounds, finish, sums, rank, _row_length(rowwise))
        return _registered(method, register)

    return decorate if function is None else decorate(function)


def whole_model(method: Reduction, identifier: str | None = None, *, register: bool = False) -> Reduction:
    """Make a reduction over all keys of a model, which gives one number, of one over a tensor.

    Composites call it as they call the other one. The engine finds the number in one more trip over the
    data, before the pass that makes the model; an entry of a rank rarely takes two. The sums of the keys are
    added in the order of the keys, in halves, so that the number has the same bits for any tiles and threads.

    >>> model_norm_squared = whole_model(squared_norm)
    >>> @merge_method(composite=True)
    ... def normalised(a: Parameter(Tensor)) -> Return(Tensor):
    ...     return divide(a, model_norm_squared(a))

    The keys that count are those at which the recipe calls the method that asks for the number, with all its
    models: floating-point tensors, and none that a policy copies or that an input lacks.

    Args:
        method: a reduction by sums in one round, or by rank.
        identifier: its name in recipes; `model_` and the method's name by default.
        register: whether recipes can find it by name.

    Raises:
        RecipeError: the method is another one.
    """
    name = identifier or f"model_{method.identifier}"
    if not isinstance(method, Reduction) or not (method.sums or method.rank):
        raise RecipeError(
            f"{name}: a number of the whole model is a reduction with `sums` or `rank`, which "
            f"'{method.identifier}' is not: results for blocks of one tensor do not add up over others"
        )
    if method.of_model or (method.sums and method.rounds(torch.float64) > 1):
        raise RecipeError(
            f"{name}: '{method.identifier}' has several rounds, or is of the whole model already"
        )
    wide = Reduction(method.function, name, method.rounds, method.finish, method.sums, method.rank)
    wide.of_model = True
    wide.__doc__ = f"As `{method.identifier}`, over all keys of the model, in one more trip over the data."
    return _registered(wide, register)


def factor(
    *,
    elements: Callable[..., int | None] = math.prod,
    register: bool = False,
    reads: Reads | None = None,
) -> Callable[[Callable[..., Any]], Factor]:
    """Make a factor of a function of whole tensors; see `Factor`. Whole-tensor methods take it as a `param`.

    >>> @factor(elements=lambda shape: 2 * math.prod(shape))
    ... def decomposition(a: Parameter(Tensor)) -> Return(Tensor, "param"):
    ...     return torch.linalg.svd(a.flatten(1), full_matrices=False)

    Args:
        elements: see `Factor`.
        register: whether recipes can find it by name.
        reads: opens each of its models, (source, **hyperparameters) -> source, where these hold data beside
            models, such as statistics.

    Raises:
        RecipeError: as `merge_method`.
    """

    def decorate(fn: Callable[..., Any]) -> Factor:
        method = Factor(fn, fn.__name__, elements)
        if reads is not None:
            method.reads, method.arranges = reads, Arranges.KEYS
        return _registered(method, register)

    return decorate


def _implement(method: MergeMethod, interface: str | MergeMethod) -> None:
    """Add a method to the implementations of an interface."""
    known = resolve_method(interface) if isinstance(interface, str) else interface
    if known.kind is not Kind.INTERFACE:
        raise RecipeError(
            f"{method.identifier}: '{known.identifier}' is not an interface (`is_interface=True`)"
        )
    if method.signature.names != known.signature.names:
        raise RecipeError(
            f"{method.identifier}: the parameters of '{known.identifier}' are "
            f"{', '.join(known.signature.names)}; what implements it has the same"
        )
    others = [m for m in known.implementations if m.identifier != method.identifier]
    known.implementations = [*others, method]


def _beside(function: Callable[..., Any], names: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Declared paths, which are relative to the file of the function that declares them."""
    if isinstance(names, str):
        raise RecipeError(f"depends={names!r}: write a list, depends=[{names!r}]")
    return tuple(Path(inspect.getfile(function)).absolute().parent / name for name in names)


def _registered(method: _Method, register: bool) -> _Method:
    if register:
        register_method(method)
    return method


def _row_length(rowwise: bool | RowLength) -> RowLength | None:
    return rowwise if callable(rowwise) else _last_axis if rowwise else None


def _last_axis(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1
