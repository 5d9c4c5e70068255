"""Strengths of blocks on a command line: lists of merge block weights, patterns, names with dots.

Hydra's keys hold neither `*` nor `:`, and `blocks` is one of its groups. So what a key cannot say goes into
the mapping `blocks.patterns`, which means the same as its items in `blocks` itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mecha_exp.app.words.quotes import KEY, parse, shell_word, split
from mecha_exp.app.words.wildcards import hide_stars
from mecha_exp.errors import ConfigError
from mecha_exp.graph.by_key import PATTERNS
from mecha_exp.graph.curves import PRESETS

BLOCKS = "blocks"
ALL_PRESETS = "all_presets"

_QUOTED_NAME = re.compile(r"""([{,]\s*)(["'])(.+?)\2\s*:""")
"""A name in a mapping in quotes, as JSON has it, which Hydra does not read."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def merge_block_weights(layers: int) -> list[str]:
    """The blocks of a list of merge block weights with that many IN and OUT blocks each, BASE first."""
    numbered = [f"{i:02}" for i in range(layers)]
    return ["BASE", *(f"IN{i}" for i in numbered), "M00", *(f"OUT{i}" for i in numbered)]


_LISTS = {26: merge_block_weights(12), 20: merge_block_weights(9)}
"""The blocks of Stable Diffusion 1 and of SDXL, by the length of a list; one less without BASE."""


def block_words(key: str, value: str) -> list[str]:
    """The overrides of a word `blocks=...` or `blocks.NAME=...`.

    Raises:
        ConfigError: a list of another length than those of merge block weights; a range for a pattern of
            more than stars.

    >>> block_words("blocks", "[GRAD_V, WRAP12]")
    ['blocks=GRAD_V,WRAP12']
    >>> block_words("blocks.IN*", "0.3")
    ['++blocks.patterns={IN*: 0.3}']
    >>> block_words("blocks", '{IN04: 0.2, "*attn2*": 0.9}')
    ['++blocks.patterns={IN04: 0.2, *attn2*: 0.9}']
    >>> block_words("blocks.IN*", "interval(0,1)")
    ['++blocks.IN$=interval(0,1)']
    """
    if key == BLOCKS:
        return _whole(value)
    name = key.removeprefix(f"{BLOCKS}.")
    if KEY.fullmatch(name):
        return [f"++{key}={value}"]
    override = parse(f"x={value}")
    if override is not None and override.is_interval_sweep() and (hidden := hide_stars(name)):
        return [f"++{BLOCKS}.{hidden}={value}"]
    return [as_pattern(name, value)]


def as_pattern(name: str, value: str) -> str:
    """An override of `blocks.patterns` that gives a selector of blocks or keys its strength.

    Raises:
        ConfigError: the value is a range.
    """
    override = parse(f"x={value}")
    if override is not None and override.is_interval_sweep():
        raise ConfigError(
            f"blocks.{name}={value}: only names and '*' can be drawn from a range. List the values: "
            f"{shell_word(f'blocks.{name}=0.3,0.5')}."
        )
    discrete = override is not None and override.is_discrete_sweep()
    values = list(override.sweep_string_iterator()) if override is not None and discrete else split(value)
    return f"++{BLOCKS}.{PATTERNS}=" + ",".join(f"{{{_escaped(name)}: {v.strip()}}}" for v in values)


def _escaped(name: str) -> str:
    """A name as Hydra reads it in a mapping."""
    return re.sub(r"([:\[\](){},=\\])", r"\\\1", name)


def apart(words: Sequence[str]) -> list[str]:
    """Words in which no block's name begins with that of another one, since a key holds a value or others."""
    start = f"++{BLOCKS}."
    names = [word.removeprefix(start).partition("=")[0] for word in words if word.startswith(start)]
    crossing = {a for a in names for b in names if a.startswith(f"{b}.")}
    return [
        as_pattern(name, value) if word.startswith(start) and name in crossing else word
        for word in words
        for name, _, value in [word.removeprefix(start).partition("=")]
    ]


def _whole(value: str) -> list[str]:
    """The overrides of `blocks=VALUE`."""
    if value == ALL_PRESETS:
        return [f"{BLOCKS}={','.join(PRESETS)}"]
    if value.startswith("{"):
        plain = _QUOTED_NAME.sub(lambda found: f"{found[1]}{_escaped(found[3])}:", value)
        return [f"++{BLOCKS}.{PATTERNS}={plain}"]
    is_list = value.startswith("[") and value.endswith("]") and "[" not in value[1:]
    parts = [part.strip() for part in split(value[1:-1] if is_list else value)]
    if all(map(_NUMBER.fullmatch, parts)):
        return _weights(value, parts)
    if value.startswith("[") and not is_list:
        raise ConfigError(
            f"{BLOCKS}={value}: expected the name of a preset, or one list of merge block weights. Several "
            "lists are points of a sweep: sweep=points sweep.file=points.csv."
        )
    return [f"{BLOCKS}={','.join(parts)}" if is_list else f"{BLOCKS}={value}"]


def _weights(value: str, numbers: Sequence[str]) -> list[str]:
    if len(numbers) == 1:
        raise ConfigError(
            f"{BLOCKS}={value}: one strength for all blocks is alpha={numbers[0]}. {BLOCKS} gives single "
            f"blocks their own: {BLOCKS}.IN04={numbers[0]}, or names a preset: {BLOCKS}=GRAD_V."
        )
    blocks = _LISTS.get(len(numbers)) or (_LISTS.get(len(numbers) + 1) or [])[1:]
    if not blocks:
        curve = f"alpha=[{','.join(numbers[:3])}]"
        raise ConfigError(
            f"{BLOCKS}=... has {len(numbers)} numbers. A list of merge block weights has 26 for Stable "
            "Diffusion 1 (BASE, IN00 to IN11, M00, OUT00 to OUT11), 20 for SDXL (BASE, IN00 to IN08, M00, "
            "OUT00 to OUT08), or one less without BASE. Points of a curve over the depth of any model are "
            f"given as alpha: {shell_word(curve)}."
        )
    return [f"++{BLOCKS}.{block}={number}" for block, number in zip(blocks, numbers, strict=True)]
