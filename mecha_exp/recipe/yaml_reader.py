"""Builds recipe graphs from YAML.

A mapping with `method:` is a call, one with `model:` a leaf, one with `mecha:` loads a text recipe, one with
`parameter:` is a variable, and one with `align_tokens:` a model with the tokens of another. A string where a
tensor is expected is a model's path, a list fills a variadic parameter, and a mapping of key patterns in the
place of a hyperparameter gives its value per key. A call with `keys:` is for these keys, and what
the others get stands there, too; see `for_keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mecha_exp.errors import MechaError, Problems, RecipeError, brief, did_you_mean
from mecha_exp.graph.by_key import BLOCKS, by_key
from mecha_exp.graph.literals import node_by_key
from mecha_exp.graph.nodes import ModelNode, Node
from mecha_exp.graph.selectors import has_nodes
from mecha_exp.method_api.binding import UNKNOWN
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.parameters import ParameterSpec
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.recipe.keys import for_keys
from mecha_exp.recipe.templates import parameter
from mecha_exp.recipe.tokens import align_tokens

KEYS = "keys"
"""The word in a call for the keys that it is for; no merge method has a parameter of that name."""

TITLE = "title"
"""The word of a whole recipe for its name in tables of papers, such as `TSV-M`; it decides nothing else."""

NODE_WORDS = ("method", "model", "mecha", "parameter", "align_tokens")


def build_recipe(
    config: Any,
    where: str = "recipe",
    load_text: Callable[[str], Node] | None = None,
    model_dirs: Sequence[Path] = (),
) -> Node:
    """Build the graph that a configuration describes.

    Args:
        config: a mapping (see the module), which may have a `title:`, or a model's path.
        where: its name in messages.
        load_text: (path of a `.mecha` file) -> its graph; None refuses such files.
        model_dirs: where the models of `align_tokens` are looked for, after the current folder.

    Raises:
        RecipeError: every mistake, with its place and the nearest valid name.
    """
    problems = Problems()
    if isinstance(config, Mapping) and TITLE in config:
        if not isinstance(config[TITLE], str):
            problems.add(f"{where}.{TITLE}: expected a name, got {brief(config[TITLE])}")
        config = {name: value for name, value in config.items() if name != TITLE}
    node = _Builder(problems, load_text, model_dirs).node(config, where)
    problems.raise_as(RecipeError)
    assert node is not None
    return node


class _Builder:
    def __init__(
        self, problems: Problems, load_text: Callable[[str], Node] | None, model_dirs: Sequence[Path]
    ) -> None:
        self._problems = problems
        self._load_text = load_text
        self._model_dirs = model_dirs

    def node(self, config: Any, where: str) -> Node | None:
        """The node of a configuration; None after noting a mistake."""
        if isinstance(config, Node):
            return config
        if isinstance(config, str):
            return ModelNode(config)
        if not isinstance(config, Mapping):
            self._problems.add(
                f"{where}: expected a model's path or a mapping with 'method:', got {brief(config)}"
            )
            return None
        words = [word for word in NODE_WORDS if word in config]
        if len(words) != 1:
            near = did_you_mean(str(next(iter(config), "")), NODE_WORDS) if not words else ""
            self._problems.add(
                f"{where}: expected exactly one of 'method:', 'model:', 'mecha:', 'parameter:' and "
                f"'align_tokens:', got {list(config)}.{near}"
            )
            return None
        make = {
            "method": self._call,
            "model": self._model,
            "mecha": self._text,
            "parameter": self._parameter,
            "align_tokens": self._aligned,
        }
        return make[words[0]](config, where)

    def _model(self, config: Mapping[str, Any], where: str) -> Node | None:
        self._check_names(config, ("model", "merge_space", "model_config"), where)
        if not isinstance(config["model"], str):
            self._problems.add(f"{where}.model: expected a path, got {brief(config['model'])}")
            return None
        with self._problems.collected(RecipeError, f"{where}: "):
            return ModelNode(config["model"], config.get("merge_space", "weight"), config.get("model_config"))
        return None

    def _parameter(self, config: Mapping[str, Any], where: str) -> Node | None:
        self._check_names(config, ("parameter", "merge_space", "model_config"), where)
        with self._problems.collected(RecipeError, f"{where}: "):
            return parameter(
                str(config["parameter"] or ""), config.get("merge_space"), config.get("model_config")
            )
        return None

    def _text(self, config: Mapping[str, Any], where: str) -> Node | None:
        self._check_names(config, ("mecha", "path"), where)
        if self._load_text is None or not isinstance(config["mecha"], str):
            got = brief(config["mecha"])
            self._problems.add(f"{where}.mecha: expected the path of a .mecha file, got {got}")
            return None
        with self._problems.collected(RecipeError, f"{where}: "):
            return self._load_text(config["mecha"])
        return None

    def _aligned(self, config: Mapping[str, Any], where: str) -> Node | None:
        self._check_names(config, ("align_tokens", "tokenizer", "others", "missing", "k"), where)
        others = config.get("others") or []
        others = others if isinstance(others, list | tuple) else [others]
        models = [config["align_tokens"], config.get("tokenizer"), *others]
        if not all(isinstance(model, str) for model in models):
            self._problems.add(
                f"{where}: expected the paths of models in 'align_tokens:', 'tokenizer:' and 'others:', got "
                f"{brief(models)}"
            )
            return None
        options = {name: config[name] for name in ("missing", "k") if name in config}
        with self._problems.collected(MechaError, f"{where}: "):
            return align_tokens(*models, **options, model_dirs=self._model_dirs)
        return None

    def _call(self, config: Mapping[str, Any], where: str) -> Node | None:
        try:
            method = resolve_method(str(config["method"]))
        except RecipeError as error:
            self._problems.add(f"{where}.method: {error}")
            return None
        arguments = {
            str(name): self._argument(method, str(name), value, f"{where}.{name}")
            for name, value in config.items()
            if name not in ("method", KEYS)
        }
        node, problems = method.bind(arguments)
        for problem in problems:
            self._problems.add(f"{where}.{problem}")
        return node if node is None or KEYS not in config else self._for_keys(node, config[KEYS], where)

    def _for_keys(self, node: Node, keys: Any, where: str) -> Node | None:
        with self._problems.collected(RecipeError, f"{where}."):
            return for_keys(node, keys)
        return None

    def _argument(self, method: MergeMethod, name: str, value: Any, where: str) -> Any:
        if name not in method.signature.names:
            return value  # the binding reports it
        spec = method.signature[name]
        if spec.variadic:
            values = value if isinstance(value, list | tuple) else [value]
            return [self._value(spec, v, f"{where}[{i}]") for i, v in enumerate(values)]
        return self._value(spec, value, where)

    def _value(self, spec: ParameterSpec, value: Any, where: str) -> Any:
        if _is_node(value) or (spec.is_model and isinstance(value, str | Mapping)):
            return self.node(value, where) or UNKNOWN
        if not isinstance(value, Mapping):
            return value
        words = {
            str(name): (self.node(item, f"{where}.{name}") or UNKNOWN)
            if _is_node(item) and name != BLOCKS  # `blocks.model.layers.2=0.9` means a block
            else item
            for name, item in value.items()
        }
        with self._problems.collected(RecipeError, f"{where}: "):
            return node_by_key(words) if has_nodes(words) else by_key(value)
        return UNKNOWN

    def _check_names(self, config: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
        for name in config:
            if name not in known:
                self._problems.add(f"{where}: unknown word '{name}'.{did_you_mean(str(name), known)}")


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and any(word in value for word in NODE_WORDS)
