# mypy: disable-error-code="no-untyped-call"
"""Finds methods that are declared elementwise and are not: their results would hang on the tile size.

A method is called on a few numbers while its torch operations are watched. An operation on tiles is
elementwise if torch says so, or if it commutes with reordering and cutting the entries. In the end the method
itself has to give the same for the whole as for its parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from mecha_exp.engine.ir.calls import Call, Extent
from mecha_exp.engine.ir.program import Program
from mecha_exp.engine.ir.reductions import is_by_entry
from mecha_exp.errors import RecipeError
from mecha_exp.graph.nodes import MergeNode, Node
from mecha_exp.method_api.method import Kind
from mecha_exp.method_api.registry import BUILTIN_METHODS
from mecha_exp.method_api.state_dict import Tile

_SIZE = 13
"""The entries of a tile that a method is tried on: a prime, so that a tile's axis is known by its length."""

_CUT = 5
_ORDER = torch.tensor([7, 2, 11, 0, 9, 4, 12, 5, 1, 10, 3, 8, 6])
_SIZE_READERS = {"numel", "size", "__len__", "nelement"}
_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


def check_elementwise(programs: Iterable[Program]) -> None:
    """Refuse users' methods that are declared elementwise and look at more than one entry.

    Raises:
        RecipeError: the method, and the operation that gives it away.
    """
    tried: set[Any] = set()
    for program in programs:
        for node, call in program.calls.items():
            if not isinstance(node, MergeNode) or is_builtin(node) or not works_on_entries(node, program):
                continue
            settings = {k: v for k, v in call.hyperparameters.items() if isinstance(v, str | bool | int)}
            mark = (node.method, len(program.tile_children(node)), repr(settings))
            if mark not in tried:
                tried.add(mark)
                refuse_unless_elementwise(node, call, program)


def is_builtin(node: MergeNode) -> bool:
    """Whether a method belongs to mecha_exp, whose tests try each of them."""
    return str(node.method.__wrapped__.__module__).startswith(BUILTIN_METHODS)


def works_on_entries(node: MergeNode, program: Program) -> bool:
    """Whether a call receives flat tiles, of which it must not see more than one entry at a time."""
    if node.method.kind is Kind.REDUCTION:
        return is_by_entry(node)
    return node.method.kind is Kind.ELEMENTWISE and program.extents[node] is Extent.TILE


def refuse_unless_elementwise(node: MergeNode, call: Call, program: Program) -> None:
    """Try a call on a few numbers; what fails on them without being found out is let through.

    Raises:
        RecipeError: as `check_elementwise`.
    """
    for least in (0.5, -1.0):
        trial = _Trial(node, call, program, least)
        with torch.no_grad():
            reason = trial.watched() or trial.compared()
        if not reason:
            continue
        kind = "a sum or rank by entry" if node.method.kind is Kind.REDUCTION else "elementwise"
        raise RecipeError(
            f"the merge method '{node.method.identifier}' is declared {kind}, but {reason}. It would see "
            "tiles of a tensor, and its result would depend on their size. Declare it with `@merge_method` "
            "for whole tensors or `@merge_method(rowwise=True)` for rows, or compute a number of the whole "
            "tensor in a `@reduction`."
        )


class _Trial:
    """Calls a method on numbers from `least` to 1, all at once and in parts."""

    def __init__(self, node: MergeNode, call: Call, program: Program, least: float) -> None:
        self._call = call
        self._partial = node.method.kind is Kind.REDUCTION
        self._knows_places = bool(node.method.signature.wants_tile)
        generator = torch.Generator().manual_seed(0)
        self._tiles: dict[Node, torch.Tensor] = {}
        self._small: dict[Node, torch.Tensor] = {}
        for child in node.children:
            if child in program.tile_children(node):
                drawn = torch.rand(_SIZE, generator=generator, dtype=torch.float64)
                self._tiles[child] = (least + drawn * (1 - least)).to(call.dtype)
            elif program.extents.get(child) is Extent.SMALL:
                self._small[child] = torch.tensor(0.5, dtype=torch.float64)

    def watched(self) -> str:
        """The reason that an operation of the method gives; empty where none does."""
        watch = _Watch(self._tiles.values())
        with contextlib.suppress(Exception), watch.names, watch:  # of a user's function
            self._results(self._tiles)
        self._suspect = watch.suspect
        return watch.reason

    def compared(self) -> str:
        """The reason that the method's results give; empty where they are those of an elementwise one."""
        try:
            whole = self._results(self._tiles)
            again = self._results(self._tiles)
            parts = [self._results(self._tiles, slice(*ends)) for ends in ((0, _CUT), (_CUT, _SIZE))]
            joined = [torch.cat(pair, -1) for pair in zip(*parts, strict=True)]
            turned = self._results({node: tile[_ORDER] for node, tile in self._tiles.items()})
        except Exception:
            return ""
        if not all(map(_is_close, whole, again)):
            return "it gives other numbers when it is called again"
        ordered = whole if self._knows_places else [_reordered(result) for result in whole]
        same_order = self._knows_places or all(map(_is_close, turned, ordered))
        if same_order and all(map(_is_close, whole, joined)):
            return ""
        return self._suspect or "what it gives for an entry depends on the other entries, or on their number"

    def _results(self, tiles: Mapping[Node, torch.Tensor], part: slice | None = None) -> list[torch.Tensor]:
        if part is not None:
            tiles = {node: tile[part].clone() for node, tile in tiles.items()}
        start, stop = (part.start, part.stop) if part else (0, _SIZE)
        values = {**self._small, **tiles}
        tile = Tile("a toy tile", start, stop, (_SIZE,))
        results = self._call.partial(values, tile, None) if self._partial else [self._call(values, tile)]
        return [result.detach().clone() for result in results]


class _Names(TorchFunctionMode):
    """Remembers the torch function that a method has called, in the user's words."""

    def __init__(self) -> None:
        super().__init__()
        self.current = ""
        self.reads_size = ""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _SIZE_READERS or function == _SHAPE:
            self.reads_size = name if name in _SIZE_READERS else "shape"
        before, self.current = self.current, self.current or name
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.current = before


class _Watch(TorchDispatchMode):
    """Watches the operations on tiles.

    Attributes:
        names: to be entered with it.
        reason: why the method is not elementwise; empty where nothing says so.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes a second

    def __init__(self, tiles: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.names = _Names()
        self.reason = ""
        self._odd = ""
        self._alive: list[Any] = [*tiles]  # so that no other tensor gets an id that is in use
        self._large = {id(tile) for tile in self._alive}

    @property
    def suspect(self) -> str:
        """The reason if the results show that there is one: what could not be told by the operations."""
        if self._odd:
            return f"'{self._odd}' looks at more than one entry"
        return f"it reads the number of entries ('{self.names.reads_size}')" if self.names.reads_size else ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = self.names.current or function.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in function.tags:
            self._refuse(f"'{name}' draws random numbers (use `mecha_exp.uniform`)")
        flat, _ = tree_flatten((args, kwargs))
        is_large = any(id(value) in self._large for value in flat)
        result = function(*args, **kwargs)
        self._alive.append((args, kwargs, result))
        if is_large:
            self._check(name, function, args, kwargs, result)
        return result

    def _check(self, name: str, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        results = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        if not results or any(not value.numel() or value.numel() % _SIZE for value in results):
            self._refuse(f"'{name}' looks at more than one entry")
        self._large.update(map(id, results))
        if torch.Tag.pointwise in function.tags or "empty" in function.overloadpacket.__name__:
            return
        inputs = [value for value in tree_flatten((args, kwargs))[0] if id(value) in self._large]
        if function._schema.is_mutable or any(_axis(value) is None for value in (*inputs, *results)):
            self._odd = self._odd or name
            return
        for change in (_reordered, _cut):
            if not self._commutes(name, change, function, args, kwargs, results):
                self._refuse(f"'{name}' looks at more than one entry")

    def _commutes(
        self,
        name: str,
        change: Callable[[torch.Tensor], torch.Tensor],
        function: Any,
        args: Any,
        kwargs: Any,
        results: list[torch.Tensor],
    ) -> bool:
        """Whether an operation on other entries gives what it gave for them; true where it cannot be told."""

        def changed(value: Any) -> Any:
            return change(value) if id(value) in self._large else value

        try:
            again = function(*tree_map(changed, args), **tree_map(changed, kwargs))
        except Exception:  # sizes that the method has given
            self._odd = self._odd or name
            return True
        others = [value for value in tree_flatten(again)[0] if isinstance(value, torch.Tensor)]
        return all(_is_close(b, changed(a)) for a, b in zip(results, others, strict=True))

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason
        raise RuntimeError(reason)


def _axis(tensor: torch.Tensor) -> int | None:
    """The only axis that is as long as a tile; None where there are several or none."""
    axes = [axis for axis, size in enumerate(tensor.shape) if size == _SIZE]
    return axes[0] if len(axes) == 1 else None


def _reordered(tensor: torch.Tensor) -> torch.Tensor:
    axis = _axis(tensor)
    return tensor if axis is None else tensor.index_select(axis, _ORDER)


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    axis = _axis(tensor)
    return tensor if axis is None else tensor.narrow(axis, 0, _CUT)


def _is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    size = a.abs().nan_to_num(0, 0, 0).max().item() if a.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * size, equal_nan=True)
