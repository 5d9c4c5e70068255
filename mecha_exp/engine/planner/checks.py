"""Checks of a merge before data is read: each yields its messages, and none stops another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mecha_exp.architectures import resolve
from mecha_exp.checkpoint import Destination, TensorInfo, is_arithmetic
from mecha_exp.engine.planner.keys.specialisation import KeyClass, PerKeyGraph
from mecha_exp.errors import CheckpointError, counted, did_you_mean, some
from mecha_exp.graph.by_key import ByKey, NoValueError
from mecha_exp.graph.nodes import LiteralNode, ModelNode, Node, calls_of
from mecha_exp.method_api.views import is_data
from mecha_exp.recipe.keys import merges_nothing
from mecha_exp.sources.inputs import Sources
from mecha_exp.sources.views.channels import is_of_channels

SHOWN_KEYS = 10

Classes = Mapping[str, KeyClass]
MergedModels = Mapping[KeyClass, Sequence[ModelNode]]
"""The models that one recipe merges at the keys of each class."""


def mismatched_configs(graph: PerKeyGraph) -> Iterator[str]:
    """Arguments of another model config than the method declares, and values by key for another config."""
    for node in calls_of(*graph.roots):
        for name, child in node.named_children:
            spec = node.method.signature[name]
            problem = _not_of(spec.config, child, graph) if spec.config else None
            if problem is None and not spec.is_state_dict:
                problem = _for_other_keys(child, node.children, graph)
            if problem is not None:
                yield f"{node.method.identifier}: {name}: {problem}"


def _not_of(config: str, node: Node, graph: PerKeyGraph) -> str | None:
    """Why a node is not of a model config, or None."""
    if isinstance(node, LiteralNode) and node.config is None:
        if not isinstance(node.value, ByKey):
            return None
        keys = resolve(config).keys()
        unknown = next((pattern for pattern, _ in node.value.patterns if pattern not in keys), None)
        return unknown and f"'{config}' has no key '{unknown}'.{did_you_mean(unknown, keys)}"
    possible = graph.configs.possible(node)
    if not possible or config in possible:
        return None
    named = " or ".join(map(repr, possible))
    return f"expected '{config}', got {node!r} of {named}. Try convert(..., '{config}')."


def _for_other_keys(value: Node, beside: Sequence[Node], graph: PerKeyGraph) -> str | None:
    """Why values by key are not for the state dicts that they are used with, or None."""
    if not isinstance(value, LiteralNode) or not isinstance(value.value, ByKey) or not value.config:
        return None
    config = resolve(value.config)
    for node in beside:
        if graph.is_constant(node):
            continue
        names, keys = graph.configs.possible(node), graph.candidates((node,))
        if names and config.identifier not in names:
            return (
                f"the values are for the keys of '{config.identifier}', and {node!r} is of "
                f"{' or '.join(map(repr, names))}, which has other keys. Give values for that."
            )
        if not any(map(config.info_of, keys)):
            return (
                f"the values are for the keys of '{config.identifier}', and {node!r} has none of them "
                f"(it has {some(keys, 3)}). Give values for its own keys, components or blocks."
            )
    return None


def unmatched_patterns(values: Iterable[ByKey], keys: Sequence[str]) -> Iterator[str]:
    """Selectors of values by key that match no key."""
    for value in values:
        yield from value.unmatched(keys)


def keys_outside_blocks(values: Iterable[ByKey], keys: Iterable[str]) -> Iterator[str]:
    """A message for each value that goes by blocks about the keys that lie in none."""
    merged = set(keys)
    outside: dict[tuple[str, ...], ByKey] = {}
    for value in values:
        outside.setdefault(tuple(key for key in value.outside_blocks if key in merged), value)
    for lost, value in outside.items():
        if lost and value.anatomy is not None:
            blocks = dict.fromkeys(value.anatomy.blocks[key] for key in lost)
            are = counted(len(lost), "key is", "keys are")
            known = value.anatomy.config.identifier
            yield (
                f"{are} in no block that {known} knows, and get what all others get: {some(lost, 3)}. "
                f"Their own blocks are {some(list(blocks), 3)}, as in "
                f"'blocks={{{next(iter(blocks))}: 0.5}}'."
            )


def merges_of_no_key(recipes: Iterable[Node]) -> Iterator[str]:
    """Merges that are for some keys, where the models have none of these."""
    yield from filter(None, map(merges_nothing, calls_of(*recipes)))


def repeated_models(recipes: Iterable[Node], sources: Sources) -> Iterator[str]:
    """Calls in whose lists of models one file or folder stands more than once, or which have the base too.

    Other parameters of one method may have the same model: the change from a to b, added to a.
    """
    for call in calls_of(*recipes):
        given: dict[Path, list[tuple[str, str]]] = {}  # the parameters of each path, with its name
        for name, value in call.arguments:
            for child in value if isinstance(value, tuple) else (value,) if name == "base" else ():
                if isinstance(child, ModelNode) and not is_data(child):
                    source = sources[child]
                    if source.path is not None:
                        given.setdefault(source.path.resolve(), []).append((name, source.name))
        for several in given.values():
            if len(several) > 1:
                names, models = zip(*several, strict=True)
                yield (
                    f"{call.method.identifier}: {' and '.join(dict.fromkeys(names))}: one model is given "
                    f"{len(several)} times, and counts as often: {', '.join(models)}. Leave out all but one, "
                    "unless that is meant."
                )


def missing_values(classes: Classes) -> Iterator[str]:
    """Values by key that have no value for some keys of the models that they are used with."""
    keys_by_value: dict[ByKey, dict[str, None]] = {}
    for key, each in classes.items():
        for node in itertools.chain.from_iterable(each.specialised.lacking):
            if isinstance(node, LiteralNode) and isinstance(node.value, ByKey):
                keys_by_value.setdefault(node.value, {})[key] = None
    for value, keys in keys_by_value.items():
        first, *others = keys
        try:
            value(first)
        except NoValueError as error:
            yield f"{error} The same holds for {some(others)}." if others else str(error)


def different_shapes(classes: Classes, merged: MergedModels, sources: Sources) -> Iterator[str]:
    """Keys whose shapes differ between the models that one recipe merges at that key."""
    cure = "Only models of one architecture can be merged."
    channels = (
        "They take other numbers of channels, as inpainting models do. on_channels=base merges the channels "
        "that both have, and gives the result those of the first input."
    )
    of_channels = {key for key, each in classes.items() if _is_of_channels(key, each, merged)}
    for keys, its_cure in ((of_channels, channels), (classes.keys() - of_channels, cure)):
        some_classes = {key: each for key, each in classes.items() if key in keys}
        yield from _different(
            some_classes, merged, sources, lambda info: info.shape, "shapes that differ", its_cure
        )


def _is_of_channels(key: str, each: KeyClass, merged: MergedModels) -> bool:
    shapes = {each.stored[model].shape for model in merged[each] if model in each.stored}
    return len(shapes) > 1 and is_of_channels(key, list(shapes))


def different_kinds(classes: Classes, merged: MergedModels, sources: Sources) -> Iterator[str]:
    """Keys that are floating point in one input of a recipe and not in another."""

    def kind(info: TensorInfo) -> str:
        return "floating point" if is_arithmetic(info.dtype) else info.dtype

    cure = "Convert them to one dtype first."
    yield from _different(classes, merged, sources, kind, "kinds of numbers that differ", cure)


def clashing_outputs(outputs: Sequence[Path], sources: Sources) -> Iterator[str]:
    """Outputs at the path of an input or of another output."""
    inputs = {file.resolve(): file for source in sources.values() for file in source.files}
    folders = {folder: file for resolved, file in inputs.items() for folder in resolved.parents}
    seen: set[Path] = set()
    elsewhere = {source.name for source in sources.values()}
    for output in outputs:
        if (address := Destination(output, {}).address) in elsewhere:
            yield f"the output {address} is an input, which would be replaced. Write to another path."
        try:
            target = output.resolve()
        except (OSError, RuntimeError):  # a link that leads back to itself, which cannot be written to
            continue
        if target in inputs:
            yield (
                f"the output {output} is the input {inputs[target]}, which would be destroyed. Write to "
                "another path."
            )
        inside = next((file for folder, file in folders.items() if target == folder), None)
        if inside is not None and target not in inputs:
            yield f"the output {output} is the folder of the input {inside}. Write to another folder."
        if target in seen:
            yield f"two outputs go to {output}. Give each its own path."
        seen.add(target)


def unwritable_outputs(destinations: Iterable[Destination | None]) -> Iterator[str]:
    """Outputs without permission or space, or whose path is in use for something else."""
    for destination in destinations:
        try:
            if destination is not None:
                destination.check()
        except CheckpointError as error:
            yield str(error)


def _shown(trait: str | tuple[int, ...]) -> str:
    return str(list(trait)) if isinstance(trait, tuple) else trait


def _different(
    classes: Classes,
    merged: MergedModels,
    sources: Sources,
    trait: Callable[[TensorInfo], str | tuple[int, ...]],
    what: str,
    cure: str,
) -> Iterator[str]:
    """One message for all keys whose trait differs between the models that are merged there."""
    differences: dict[KeyClass, str] = {}
    for each, models in merged.items():
        traits: dict[str | tuple[int, ...], str] = {}
        for model in models:
            if model in each.stored:
                traits.setdefault(trait(each.stored[model]), sources[model].name)
        if len(traits) > 1:
            differences[each] = ", ".join(f"{_shown(value)} in {name}" for value, name in traits.items())
    if any(each in differences for each in classes.values()):
        lines = [f"{key}: {differences[each]}" for key, each in classes.items() if each in differences]
        shown = "".join(f"\n    {line}" for line in lines[:SHOWN_KEYS])
        rest = f"\n    and {len(lines) - SHOWN_KEYS} more" if len(lines) > SHOWN_KEYS else ""
        count = counted(len(lines), "key has", "keys have")
        yield f"{count} {what} between the inputs:{shown}{rest}\n    {cure}"
