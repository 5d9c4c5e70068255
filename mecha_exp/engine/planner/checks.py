"""What can be wrong with a merge before data is read: each check gives its messages, none stops another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mecha_exp.architectures import resolve
from mecha_exp.checkpoint import Destination, is_arithmetic
from mecha_exp.engine.planner.keys.specialisation import PerKeyGraph, Specialisation
from mecha_exp.errors import CheckpointError, did_you_mean, some
from mecha_exp.graph.by_key import ByKey, NoValueError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, walk
from mecha_exp.sources.source import Source

SHOWN_KEYS = 10

Sources = Mapping[ModelNode, Source]


def mismatched_configs(graph: PerKeyGraph) -> Iterator[str]:
    """State dicts of another model config than is declared, or than the values beside them are for."""
    calls = [node for node in walk(*graph.roots) if isinstance(node, MergeNode)]
    for node in calls:
        for name, child in node.named_children:
            spec = node.method.signature[name]
            wrong = _not_of(spec.config, child, graph) if spec.config else None
            if wrong is None and not spec.is_state_dict:
                wrong = _for_other_keys(child, node.children, graph)
            if wrong is not None:
                yield f"{node.method.identifier}: {name}: {wrong}"


def _not_of(wanted: str, node: Node, graph: PerKeyGraph) -> str | None:
    """Why a node is not of a model config."""
    if isinstance(node, LiteralNode) and node.config is None:
        if not isinstance(node.value, ByKey):
            return None
        known = resolve(wanted).keys()
        unknown = next((pattern for pattern, _ in node.value.patterns if pattern not in known), None)
        return unknown and f"'{wanted}' has no key '{unknown}'.{did_you_mean(unknown, known)}"
    found = graph.configs.possible(node)
    if not found or wanted in found:
        return None
    named = " or ".join(map(repr, found))
    return f"expected '{wanted}', got {node!r} of {named}. Try convert(..., '{wanted}')."


def _for_other_keys(value: Node, beside: Sequence[Node], graph: PerKeyGraph) -> str | None:
    """Why values are not for the keys of the state dicts that they are used with."""
    if not isinstance(value, LiteralNode) or not isinstance(value.value, ByKey) or not value.config:
        return None
    wanted = resolve(value.config)
    for node in beside:
        if graph.is_constant(node):
            continue
        names, keys = graph.configs.possible(node), graph.candidates((node,))
        if names and wanted.identifier not in names:
            return (
                f"the values are for the keys of '{wanted.identifier}', and {node!r} is of "
                f"{' or '.join(map(repr, names))}, whose keys are others. Say them for that."
            )
        if not any(wanted.resolve_alias(key) in wanted.keys() for key in keys):
            return (
                f"the values are for the keys of '{wanted.identifier}', and {node!r} has none of them, "
                f"but {some(keys, 3)}. Say them for its own keys, components or blocks."
            )
    return None


def unmatched_patterns(values: Iterable[ByKey], keys: Sequence[str]) -> Iterator[str]:
    """Patterns of per-key values that no key matches."""
    for value in values:
        yield from value.unmatched(keys)


def missing_values(situations: Mapping[str, Specialisation]) -> Iterator[str]:
    """Values by key that have none for a key of the models that they are used with."""
    told: set[Node] = set()
    for key, situation in situations.items():
        for node in (node for lacking in situation.lacking for node in lacking):
            if isinstance(node, LiteralNode) and isinstance(node.value, ByKey) and node not in told:
                told.add(node)
                try:
                    node.value(key)
                except NoValueError as error:
                    yield str(error)


def different_shapes(models: Mapping[str, Sequence[ModelNode]], sources: Sources) -> Iterator[str]:
    """Keys whose shape is not the same in all models that one recipe merges at that key."""

    def shape(model: ModelNode, key: str) -> str:
        return str(list(sources[model].info(key).shape))

    cure = "Only models of one architecture can be merged."
    yield from _different(models, sources, shape, "shapes that differ", cure)


def different_kinds(models: Mapping[str, Sequence[ModelNode]], sources: Sources) -> Iterator[str]:
    """Keys that are floating point in one input of a recipe and not in another."""

    def kind(model: ModelNode, key: str) -> str:
        dtype = sources[model].info(key).dtype
        return "floating point" if is_arithmetic(dtype) else dtype

    cure = "Convert them to one dtype first."
    yield from _different(models, sources, kind, "kinds of numbers that differ", cure)


def clashing_outputs(outputs: Sequence[Path], sources: Sources) -> Iterator[str]:
    """Outputs that are an input, or another output."""
    inputs = {file.resolve(): file for source in sources.values() for file in source.files}
    folders = {folder: file for resolved, file in inputs.items() for folder in resolved.parents}
    seen: set[Path] = set()
    for output in outputs:
        target = output.resolve()
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
    """Outputs for which there is no permission or no room, or where other things are in the way."""
    for destination in destinations:
        try:
            if destination is not None:
                destination.check()
        except CheckpointError as error:
            yield str(error)


def _different(
    models: Mapping[str, Sequence[ModelNode]],
    sources: Sources,
    trait: Callable[[ModelNode, str], str],
    what: str,
    cure: str,
) -> Iterator[str]:
    """One message for all keys of which a trait differs between the models that are merged there."""
    lines = []
    for key, merged in models.items():
        found: dict[str, str] = {}
        for model in merged:
            if key in sources[model]:
                found.setdefault(trait(model, key), sources[model].name)
        if len(found) > 1:
            lines.append(f"{key}: " + ", ".join(f"{value} in {name}" for value, name in found.items()))
    if lines:
        shown = "".join(f"\n    {line}" for line in lines[:SHOWN_KEYS])
        rest = f"\n    and {len(lines) - SHOWN_KEYS} more" if len(lines) > SHOWN_KEYS else ""
        yield f"{len(lines)} keys have {what} between the inputs:{shown}{rest}\n    {cure}"
