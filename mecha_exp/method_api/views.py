"""Views: calls that are read, tile by tile, in place of being computed.

A view is made of the models of a call when a merge is planned, from their headers. It is known by its call,
so that equal calls are one leaf, read once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

from mecha_exp.checkpoint.model import StateDictSource
from mecha_exp.errors import RecipeError
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, calls_of, walk
from mecha_exp.method_api.method import Arranges, Kind, MergeMethod

if TYPE_CHECKING:
    from mecha_exp.conversion.inference import ConfigInference

Sources = Mapping[ModelNode, StateDictSource]


@dataclass(frozen=True, eq=False)
class ModelView(ModelNode):
    """A model that is read as a call says: in another format, under other keys, as differences.

    Attributes:
        call: of the method whose view it is, on the models that are read.
    """

    call: MergeNode | None = None

    def identity(self) -> tuple[Any, ...]:
        return (*super().identity(), self.call)


@dataclass(frozen=True)
class Reading:
    """What is at hand where calls become views.

    Attributes:
        sources: the opened models, and the views of them.
        configs: infers the model configs of the sources.
        budget: how many bytes of computed values a view may cache.
    """

    sources: Sources
    configs: ConfigInference
    budget: int


class Reads(Protocol):
    """How the models of a call are read that are not models by themselves, such as files of statistics."""

    def __call__(self, source: StateDictSource, /, **hyperparameters: Any) -> StateDictSource:
        """The source in place of one of them."""

    def check(self, call: MergeNode, files: Sequence[ModelNode], sources: Sources, /) -> None:
        """Raise a MechaError where what was read is not right for the call that takes it."""


class View(NamedTuple):
    """How a call is read.

    Attributes:
        call: what it is known by.
        open: opens its source.
        config: the model config of its keys, where that is known.
    """

    call: MergeNode
    open: Callable[[], StateDictSource]
    config: str | None = None

    @property
    def leaf(self) -> ModelView:
        """The leaf that takes the place of the call."""
        first = self.call.children[0]
        assert isinstance(first, ModelNode)
        return ModelView(first.source, self.call.space, self.config or self.call.declared_config, self.call)


class ViewMethod(MergeMethod):
    """A method of `Kind.VIEW`: a function of opened models and hyperparameters to the source that is read.

    Attributes:
        reads_rows: (hyperparameters) -> whether it reads rows of tokens where they lie; None: where the
            source that it returns has them.
    """

    def __init__(
        self,
        function: Callable[..., StateDictSource],
        identifier: str,
        reads_rows: Callable[..., bool] | None = None,
    ) -> None:
        super().__init__(function, identifier, Kind.VIEW)
        self.reads_rows = reads_rows
        if not self.signature.parameters or not self.signature.parameters[0].is_model:
            raise RecipeError(
                f"{identifier}: the first parameter of a view is the model that it reads: "
                "a: Parameter(StateDict[T])"
            )

    def read(self, call: MergeNode, asked: MergeNode, reading: Reading) -> View:
        for name, child in call.named_children:
            if self.signature[name].is_model and not isinstance(child, ModelNode):
                raise RecipeError(
                    f"{self.identifier}: {name} is {child!r}, a merge, and it reads models where they are "
                    f"stored, without computing. Take {self.identifier} of the models that are merged."
                )
        return View(call, partial(self.open, call, reading.sources))

    def open(self, call: MergeNode, sources: Mapping[Any, StateDictSource]) -> StateDictSource:
        """The source that a call stands for.

        Args:
            call: of the method, on models that are opened.
            sources: these, by their nodes.

        Raises:
            MechaError: see the function.
        """
        models = {
            name: [sources[node] for node in value] if isinstance(value, tuple) else sources[value]
            for name, value in call.arguments
            if self.signature[name].is_model
        }
        args, kwargs = self.signature.arrange(hyperparameters(call) | models)
        source: StateDictSource = self.function(*args, **kwargs)
        return source


def is_data(node: object) -> TypeGuard[ModelView]:
    """Whether a leaf reads data beside models, such as statistics, and not a model."""
    return isinstance(node, ModelView) and node.call is not None and node.call.method.reads is not None


def data_of(*recipes: Node) -> set[Node]:
    """The files of data beside models that recipes read."""
    calls = (call for call in calls_of(*recipes) if call.method.reads is not None)
    return {child for call in calls for child in call.children if isinstance(child, ModelNode)}


def hyperparameters(call: MergeNode) -> dict[str, Any]:
    """The values of the hyperparameters of a call, each the same at all keys; defaults where none is given.

    Raises:
        RecipeError: one is not such a value.
    """
    arguments = dict(call.arguments)
    values: dict[str, Any] = {}
    for spec in call.method.signature.parameters:
        node = arguments.get(spec.name)
        if node is None:
            values[spec.name] = () if spec.variadic else spec.default
        elif not spec.is_model:
            if not isinstance(node, LiteralNode) or isinstance(node.value, ByKey):
                raise RecipeError(
                    f"{call.method.identifier}: {spec.name} is {node!r}: expected one value for all keys."
                )
            values[spec.name] = node.value
    return values


def opened_views(
    roots: Sequence[Node], sources: Sources, of_rows: bool = True
) -> dict[MergeNode, StateDictSource]:
    """The sources of the calls of `Kind.VIEW` below some nodes whose models, or views, are opened.

    Args:
        roots: the nodes.
        sources: the opened models.
        of_rows: whether views that arrange rows of tokens are opened too.
    """
    opened: dict[Any, StateDictSource] = dict(sources)
    views: dict[MergeNode, StateDictSource] = {}
    for node in walk(*roots):
        if not isinstance(node, MergeNode) or not isinstance(node.method, ViewMethod):
            continue
        if of_rows or node.method.arranges is not Arranges.ROWS:
            models = [child for name, child in node.named_children if node.method.signature[name].is_model]
            if all(model in opened for model in models):
                opened[node] = views[node] = node.method.open(node, opened)
    return views
