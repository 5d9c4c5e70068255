"""Which keys share one weight: by the rules of a config, or inferred from numbered layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mecha_exp.architectures.patterns import Pattern
from mecha_exp.errors import ConfigError

EVERYTHING = "*"


def blocks_by_rules(
    identifier: str,
    prefix: str,
    keys: Iterable[str],
    rules: Sequence[tuple[Pattern, Pattern]],
    sizes: Mapping[str, int],
) -> dict[str, str]:
    """The block of each key: that of the longest rule that it matches, and of equal ones the last.

    A rule's left side is a key below the prefix, or `part.of.a.name.*` for all keys that begin so.
    """
    exact: dict[str, str] = {}
    below: dict[str, str] = {}
    for left, right in rules:
        for name, block in left.pairs(right, sizes):
            if name.endswith(EVERYTHING):
                below[prefix + name[:-1]] = block
            else:
                exact[prefix + name] = block
    lengths = sorted({len(name) for name in below}, reverse=True)
    found: dict[str, str] = {}
    for key in keys:
        length = next((n for n in lengths if key[:n] in below), None)
        if key in exact:
            found[key] = exact[key]
        elif length is not None:
            found[key] = below[key[:length]]
        else:
            raise ConfigError(f"{identifier}: no block rule matches {key!r}. Add a rule for '*'.")
    return found


def infer_blocks(keys: Iterable[str]) -> dict[str, str]:
    """The block of each key of an unknown architecture.

    A key below a numbered layer belongs to the block of that number: `model.layers.12.mlp.weight` to `12`.
    Where several stacks of layers are numbered, their names tell them apart, as briefly as that is possible:
    `encoder.layers.3` and
    `decoder.layers.3`. Any other key belongs to the module that holds it.

    >>> infer_blocks(["model.layers.12.mlp.up.weight", "model.layers.12.mlp.down.weight", "head.weight"])
    {'model.layers.12.mlp.up.weight': '12', 'model.layers.12.mlp.down.weight': '12', 'head.weight': 'head'}
    """
    placed = {key: _stack_and_number(key) for key in keys}
    names = _short_names({stack for stack, number in placed.values() if number})
    return {
        key: stack if not number else ".".join(filter(None, (names[stack], number)))
        for key, (stack, number) in placed.items()
    }


def _stack_and_number(key: str) -> tuple[str, str]:
    """`("model.layers", "12")`; for a key below no numbered layer its module and no number."""
    parts = key.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[:i]), part
    return ".".join(parts[:-1]) or key, ""


def _short_names(stacks: set[str]) -> dict[str, str]:
    """For each dotted name as many of its last words as tell it from the others; none where it is alone."""
    if len(stacks) == 1:
        return dict.fromkeys(stacks, "")
    shared = Counter(end for stack in stacks for end in _ends(stack))
    return {stack: next((end for end in _ends(stack) if shared[end] == 1), stack) for stack in stacks}


def _ends(name: str) -> list[str]:
    """Its last word, its last two words, and so on."""
    words = name.split(".")
    return [".".join(words[i:]) for i in reversed(range(len(words)))]
