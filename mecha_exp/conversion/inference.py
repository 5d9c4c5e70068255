"""Infers the model config of each node of a recipe, from declared configs and from the keys of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from mecha_exp.architectures import Detection, ModelConfig, candidates, detect, resolve, sized_for
from mecha_exp.architectures.keys import HasShape
from mecha_exp.architectures.lora import LORA_DELTA, is_peft, other_kind
from mecha_exp.errors import MechaError, RecipeError, some
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, ParameterNode, models_of, walk
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.sources.source import Source

Keys: TypeAlias = Mapping[str, HasShape]
Shapes: TypeAlias = frozenset[tuple[str, tuple[int, ...]]]


class ConfigInference:
    """The model config of each node; models with equal keys and shapes are compared with the configs once.

    Args:
        keys_of: reads the keys and shapes of a model. It is called only for models whose keys are needed.
    """

    def __init__(self, keys_of: Callable[[ModelNode], Keys]) -> None:
        self._keys_of = keys_of
        self._fits_by_shapes: dict[Shapes, list[Detection]] = {}
        self._seen: list[tuple[Keys, list[Detection]]] = []
        self._fits: dict[ModelNode, list[Detection]] = {}
        self._of_models: dict[ModelNode, ModelConfig] = {}
        self._constant: dict[Node, bool] = {}
        self._origins: dict[Node, tuple[Node, str | None]] = {}

    @staticmethod
    def over(sources: Mapping[ModelNode, Source]) -> ConfigInference:
        """An inference over opened models; models may be added to `sources` later."""
        return ConfigInference(lambda model: sources[model].infos())

    def over_views(self, sources: Mapping[ModelNode, Source]) -> ConfigInference:
        """An inference over the same models read in other ways; it shares the results for equal keys."""
        inference = ConfigInference.over(sources)
        inference._fits_by_shapes, inference._seen = self._fits_by_shapes, self._seen
        return inference

    def is_constant(self, node: Node) -> bool:
        """Whether no model is read for a node: it is a hyperparameter, known when a merge is planned."""
        if node not in self._constant:
            for below in walk(node, skip=self._constant):
                is_leaf = isinstance(below, ModelNode | ParameterNode)
                self._constant[below] = not is_leaf and all(self._constant[c] for c in below.children)
        return self._constant[node]

    def of(self, node: Node) -> ModelConfig | None:
        """The model config of a node: the declared one, or that of the first model below; None for values.

        Raises:
            ConfigError: several configs fit that model equally well.
        """
        origin, declared = self._origin(node)
        if isinstance(origin, ModelNode):
            return self.of_model(origin)
        return resolve(declared) if declared else None

    def possible(self, node: Node) -> list[str]:
        """The identifiers of all configs that a node may have; none for values and for unknown models."""
        origin, declared = self._origin(node)
        if declared or not isinstance(origin, ModelNode):
            return [declared] if declared else []
        return [fit.config.identifier for fit in self.fits(origin)]

    def _possible_configs(self, node: Node) -> list[ModelConfig]:
        """The configs that a node may have; of a family those of the sizes of its file."""
        origin, declared = self._origin(node)
        if declared is None:
            return [fit.config for fit in self.fits(origin)] if isinstance(origin, ModelNode) else []
        config = resolve(declared)
        if config.sizes and isinstance(origin, ModelNode):
            config = sized_for(self._keys_of(origin), config)
        return [config]

    def of_model(self, model: ModelNode) -> ModelConfig:
        """The declared config of a model, or the one that its keys fit; a structural one if none fits.

        Raises:
            ConfigError: several configs fit equally well.
        """
        if model not in self._of_models:
            self._of_models[model] = resolve(model.config) if model.config else self._detected(model)
        return self._of_models[model]

    def only_fit(self, model: ModelNode) -> ModelConfig | None:
        """The known config that the keys of a model fit, whatever is declared; None unless it is one."""
        fits = self.fits(model)
        return fits[0].config if len(fits) == 1 else None

    def fits(self, model: ModelNode) -> list[Detection]:
        """The known configs that the keys of a model fit equally well."""
        if model not in self._fits:
            self._fits[model] = self.fits_of_keys(self._keys_of(model))
        return self._fits[model]

    def fits_of_keys(self, keys: Keys) -> list[Detection]:
        """The known configs that keys and shapes fit equally well."""
        for seen, fits in self._seen:
            if keys is seen or keys == seen:  # of files with equal headers
                return fits
        shapes = frozenset((key, tuple(info.shape)) for key, info in keys.items())
        if shapes not in self._fits_by_shapes:
            self._fits_by_shapes[shapes] = candidates(keys)
        self._seen.append((keys, self._fits_by_shapes[shapes]))
        return self._fits_by_shapes[shapes]

    def chosen(self, call: MergeNode) -> MergeMethod:
        """The method that a call of an interface with `choose` stands for.

        Raises:
            MechaError: no method fits the model configs of the arguments.
        """
        assert call.method.choose is not None
        configs = {
            name: self._possible_configs(child)
            for name, child in call.arguments
            if isinstance(child, Node)
            and (call.method.signature[name].is_state_dict or not self.is_constant(child))
        }
        try:
            return call.method.choose(configs)
        except MechaError as error:
            unknown = [child for name, child in call.arguments if name in configs and not configs[name]]
            raise type(error)(f"{error}{self._kinds_of_adapters(unknown)}") from None

    def require_known_keys(self, merged: Node, source: str) -> None:
        """Refuse to convert a merge from a config whose keys are not those of the models in it.

        The keys of a converted merge are those of the config: of a family the published member's.

        Raises:
            RecipeError: a model has more layers than that one, or keys without the prefix of the config.
        """
        known = set(resolve(source).keys())
        for model in models_of(merged):
            for fit in self.fits(model):
                others = [*set(fit.config.keys()) - known, *fit.renamed]
                if fit.config.identifier == source and others:
                    raise RecipeError(
                        f"a merge is converted from the keys of '{source}', and {model!r} has others: "
                        f"{some(sorted(others), 3)}. Convert the models, and merge what they become."
                    )

    def _kinds_of_adapters(self, nodes: Sequence[Any]) -> str:
        """A hint for models with the keys of adapters that cannot be read; otherwise an empty string."""
        models = [model for node in nodes for model in models_of(node)]
        return next(filter(None, (other_kind(self._keys_of(model)) for model in models)), "")

    def _origin(self, node: Node) -> tuple[Node, str | None]:
        """The first node from this one downwards that decides the config, and the config it declares."""
        way: list[Node] = []
        while node not in self._origins:
            way.append(node)
            below = self._next_below(node)
            if below is None:
                self._origins[node] = (node, self._declared(node))
            else:
                node = below
        origin = self._origins[node]
        self._origins.update(dict.fromkeys(way, origin))
        return origin

    def _declared(self, node: Node) -> str | None:
        """The config that a node declares; of an interface that chooses, that of the chosen method."""
        if isinstance(node, MergeNode) and node.method.choose is not None:
            return self.chosen(node).signature.returned.config
        return node.declared_config

    def _next_below(self, node: Node) -> Node | None:
        """The child that decides the config of a call; None where the node decides."""
        if not isinstance(node, MergeNode):
            return None
        if self._is_of_peft(node):
            return node.children[1]  # the adapter has the names of its base
        if node.method.choose is not None or node.declared_config:
            return None
        return next((c for c in node.children if not self.is_constant(c)), next(iter(node.children), None))

    def _is_of_peft(self, node: MergeNode) -> bool:
        """Whether a call of `lora_delta` reads an adapter of PEFT."""
        adapter = node.children[0] if node.method.identifier == LORA_DELTA else None
        return isinstance(adapter, ModelNode) and is_peft(self._keys_of(adapter))

    def _detected(self, model: ModelNode) -> ModelConfig:
        fits = self.fits(model)
        return fits[0].config if len(fits) == 1 else detect(self._keys_of(model), None if fits else ()).config
