"""The files that arguments of merge methods name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node


def path_arguments(call: MergeNode) -> Iterator[tuple[str, Path]]:
    """The files and folders that the arguments of a call name, each with the name of its parameter."""
    names = {spec.name for spec in call.method.signature.paths}
    for name, child in call.named_children if names else ():
        if name in names and isinstance(child, LiteralNode) and isinstance(child.value, str):
            yield name, Path(child.value).expanduser()


def missing_paths(nodes: Iterable[Node]) -> Iterator[str]:
    """A sentence for each file that a call names and that does not exist."""
    for call in nodes:
        if not isinstance(call, MergeNode):
            continue
        for name, path in path_arguments(call):
            if not path.exists():
                yield f"{call.method.identifier}: {name}: there is no file or folder {path}"
