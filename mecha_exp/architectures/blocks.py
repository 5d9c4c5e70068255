"""The blocks of an unknown architecture, inferred from numbered layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def infer_blocks(keys: Iterable[str]) -> dict[str, str]:
    """The block of each key of an unknown architecture.

    A key below a numbered layer belongs to the block of that number: `model.layers.12.mlp.weight` to `12`.
    Where several stacks of layers are numbered, the shortest distinct ends of their names precede the number:
    `encoder.layers.3` and `decoder.layers.3`. Any other key belongs to the module that holds it.

    >>> infer_blocks(["model.layers.12.mlp.up.weight", "model.layers.12.mlp.down.weight", "head.weight"])
    {'model.layers.12.mlp.up.weight': '12', 'model.layers.12.mlp.down.weight': '12', 'head.weight': 'head'}
    """
    placed = {key: _stack_and_number(key) for key in keys}
    names = _short_names({stack for stack, number in placed.values() if number})
    return {
        key: stack if not number else ".".join(filter(None, (names[stack], number)))
        for key, (stack, number) in placed.items()
    }


def in_order(blocks: Iterable[str]) -> list[str]:
    """Sort the blocks of each stack by number, since files sort `10` before `2`; stacks stay in order."""
    stacks: dict[str, list[str]] = {}
    for block in dict.fromkeys(blocks):
        stack, _, number = block.rpartition(".")
        stacks.setdefault(stack if number.isdecimal() else block + ".", []).append(block)
    return [block for stack in stacks.values() for block in sorted(stack, key=_number)]


def _stack_and_number(key: str) -> tuple[str, str]:
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
