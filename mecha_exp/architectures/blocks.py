"""Blocks by the names of keys: of an unknown architecture, and of keys that a model config does not list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping


def infer_blocks(keys: Iterable[str]) -> dict[str, str]:
    """The block of each key of an unknown architecture.

    A key below a numbered layer belongs to the block of that number: `model.layers.12.mlp.weight` to `12`.
    Where several stacks of layers are numbered, the shortest distinct ends of their names precede the number:
    `encoder.layers.3` and `decoder.layers.3`. Any other key belongs to the module that holds it.

    >>> infer_blocks(["model.layers.12.mlp.up.weight", "model.layers.12.mlp.down.weight", "head.weight"])
    {'model.layers.12.mlp.up.weight': '12', 'model.layers.12.mlp.down.weight': '12', 'head.weight': 'head'}
    """
    placed = {key: stack_and_number(key) for key in keys}
    names = _short_names({stack for stack, number in placed.values() if number})
    return {
        key: stack if not number else ".".join(filter(None, (names[stack], number)))
        for key, (stack, number) in placed.items()
    }


def blocks_beside(known: Mapping[str, str], others: Iterable[str]) -> dict[str, str]:
    """The blocks of keys that a model config does not list, beside the blocks of those that it lists.

    The innermost module around a key that has listed keys decides, where these are of one block: the bias of
    `layers.0.self_attn.q_proj` belongs to layer 0. A layer that has no listed keys is named like the others
    of its stack. What lies in no module of one block is in a block by the name of its layer or module.

    >>> known = {f"model.layers.{i}.q.weight": str(i) for i in range(2)} | {"model.norm.weight": "norm"}
    >>> blocks_beside(known, ["model.layers.0.q.bias", "model.layers.1.k.weight", "model.layers.2.k.weight"])
    {'model.layers.0.q.bias': '0', 'model.layers.1.k.weight': '1', 'model.layers.2.k.weight': '2'}
    >>> blocks_beside(known, ["model.extra.weight", "model.heads.3.weight"])
    {'model.extra.weight': 'model.extra', 'model.heads.3.weight': 'model.heads.3'}
    """
    inside: dict[str, set[str]] = {}
    stems: dict[str, set[str | None]] = {}
    for key, block in known.items():
        for module in _modules(key):
            inside.setdefault(module, set()).add(block)
        stack, number = stack_and_number(key)
        if number:
            stem = block.removesuffix(number) if block.endswith(number) else None
            stems.setdefault(stack, set()).add(stem)

    def block_of(key: str) -> str:
        around = next((inside[module] for module in _modules(key) if module in inside), set())
        if len(around) == 1:
            return next(iter(around))
        stack, number = stack_and_number(key)
        if not number:
            return stack
        known_stems = stems.get(stack, {None})
        stem = next(iter(known_stems)) if len(known_stems) == 1 else None
        return f"{stack}.{number}" if stem is None else stem + number

    return {key: block_of(key) for key in others}


def in_order(blocks: Iterable[str]) -> list[str]:
    """Sort the blocks of each stack by number, since files sort `10` before `2`; stacks stay in order."""
    stacks: dict[str, list[str]] = {}
    for block in dict.fromkeys(blocks):
        stack, _, number = block.rpartition(".")
        stacks.setdefault(stack if number.isdecimal() else block + ".", []).append(block)
    return [block for stack in stacks.values() for block in sorted(stack, key=_number)]


def _modules(key: str) -> Iterator[str]:
    """The modules that a key lies in, the innermost first."""
    while key := key.rpartition(".")[0]:
        yield key


def stack_and_number(key: str) -> tuple[str, str]:
    """`("model.layers", "12")`; for a key below no numbered layer its module and no number."""
    parts = key.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[:i]), part
    return ".".join(parts[:-1]) or key, ""


def _short_names(stacks: set[str]) -> dict[str, str]:
    """The shortest end of each dotted name that no other has; an empty one for a single name."""
    if len(stacks) == 1:
        return dict.fromkeys(stacks, "")
    shared = Counter(end for stack in stacks for end in _ends(stack))
    return {stack: next((end for end in _ends(stack) if shared[end] == 1), stack) for stack in stacks}


def _ends(name: str) -> list[str]:
    """The last word of a dotted name, the last two words, and so on."""
    words = name.split(".")
    return [".".join(words[i:]) for i in reversed(range(len(words)))]


def _number(block: str) -> int:
    number = block.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0
