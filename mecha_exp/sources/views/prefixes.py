"""Models whose keys are equal but for their prefixes, such as `bert.encoder.layer.0` and `encoder.layer.0`.

Trainers and releases of libraries put models under other names: a task's model has its base model under
`bert.`, DDP has all of it under `module.`, and transformers 4.52 moved the language tower of vision-language
models from `language_model.model.` to `model.language_model.`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mecha_exp.errors import some
from mecha_exp.sources.source import Source
from mecha_exp.sources.views.names import Rule

_TRIED = 16
"""How many pairs of prefixes are tried, from the likeliest on."""

_FEW = 4
"""How many keys may end alike so that the pair of two of them counts as a likely one."""


@dataclass(frozen=True)
class Prefixes:
    """How the keys of a model become those of another one.

    Attributes:
        names: its keys with those in their places.
        shared: how many of these the other model has, with another name before.
        pairs: the prefixes of these keys, and those in their place; empty ones for none.
        rules: the same as rules of `rename_keys`.
    """

    names: Mapping[str, str]
    shared: int
    pairs: tuple[tuple[str, str], ...]
    rules: str

    def __str__(self) -> str:
        return some([_in_words(old, new) for old, new in self.pairs], 4)


def prefixes_between(source: Source, other: Source) -> Prefixes | None:
    """The prefixes by which the keys of one model differ from those of another.

    A key has a counterpart if both are equal after some prefix of each, and their tensors have one shape but
    for the rows. All keys below a prefix that most counterparts have get the other one. None if fewer than
    half of the keys of the smaller model are then in the other, or if two keys would get one name.

    >>> prefixes_between(encoder, bert).rules
    '* -> bert.*'
    """
    forms = {key: _form(other, key) for key in other.keys() if key not in source}
    free = {key: _form(source, key) for key in source.keys() if key not in other}
    pairs = _pairs(free, forms)
    rules = _rules(source.keys(), pairs)
    names = {key: next(name for rule in rules if (name := rule.renamed(key))) for key in source.keys()}
    shared = sum(name in forms for name in names.values())
    same = sum(name in other and name not in forms for name in names.values())
    fewest = min(len(names), len(forms) + len(source.keys()) - len(free))
    if not shared or shared + same < fewest / 2 or len({*names.values()}) < len(names):
        return None
    text = ", ".join(f"{rule.old} -> {rule.new}" for rule in rules)
    return Prefixes(names, shared, tuple(dict.fromkeys(pairs.values())), text)


def _in_words(old: str, new: str) -> str:
    if old and new:
        return f"'{old}.' in place of '{new}.'"
    return f"with '{old}.'" if old else f"without '{new}.'"


def _form(source: Source, key: str) -> tuple[int, ...]:
    """The axes of a tensor but for its rows, which may be those of more tokens."""
    shape = source.info(key).shape
    return (len(shape), *shape[1:])


def _pairs(
    keys: Mapping[str, tuple[int, ...]], targets: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, str]]:
    """The pair of prefixes of each key that has a counterpart, from the pair of most keys on."""
    left, found = dict(keys), dict[str, tuple[str, str]]()
    free = dict(targets)
    for pair, _ in _likely_pairs(keys, targets).most_common(_TRIED):
        below = {key: name for key in left if (name := _moved(key, pair))}
        fitting = {key: name for key, name in below.items() if free.get(name) == left[key]}
        if pair[0] and len(fitting) < len(below) / 2:  # an end that other layers have, too
            continue
        for key, name in fitting.items():
            found[key] = pair
            del left[key], free[name]
    return found


def _moved(key: str, pair: tuple[str, str]) -> str:
    """A key with one prefix for another; empty where it has not the first."""
    old, new = pair
    if old and not key.startswith(f"{old}."):
        return ""
    rest = key[len(old) + 1 :] if old else key
    return f"{new}.{rest}" if new else rest


def _likely_pairs(keys: Iterable[str], targets: Iterable[str]) -> Counter[tuple[str, str]]:
    """The pairs of prefixes before the longest common ends of keys, with how often each is there."""
    ending: dict[str, list[str]] = defaultdict(list)
    for target in targets:
        for prefix, end in _splits(target):
            ending[end].append(prefix)
    votes: Counter[tuple[str, str]] = Counter()
    for key in keys:
        found = next(((old, ending[end]) for old, end in _splits(key) if end in ending), None)
        if found is not None and len(found[1]) <= _FEW and not _has_layer(found[0]):
            votes.update((found[0], new) for new in found[1] if not _has_layer(new))
    return votes


def _has_layer(prefix: str) -> bool:
    """Whether a prefix leads into a numbered layer, of which the others would have other prefixes."""
    return any(word.isdecimal() for word in prefix.split(".")[1:])


def _splits(key: str) -> Iterator[tuple[str, str]]:
    """A key in two, at each dot, from an empty prefix on."""
    modules = key.split(".")
    for place in range(len(modules)):
        yield ".".join(modules[:place]), ".".join(modules[place:])


def _rules(keys: Iterable[str], pairs: Mapping[str, tuple[str, str]]) -> list[Rule]:
    """Rules that give keys with these pairs, and all below their prefixes, other names, and no others."""
    if len(pairs) == len([*keys]) and len({*pairs.values()}) == 1:
        ((old, new),) = {*pairs.values()}
        return [Rule(_below(old), _below(new))]
    rules = {_rule(key, *pair) for key, pair in pairs.items()}
    ordered = sorted(rules, key=lambda rule: (-rule.old.count("."), rule.old))
    left = [key for key in keys if not any(rule.renamed(key) for rule in ordered)]
    return [*ordered, *([Rule("*", "*")] if left else [])]


def _rule(key: str, old: str, new: str) -> Rule:
    """The rule for a key and all that is below the same prefix, or else in the same outermost module."""
    if old:
        return Rule(_below(old), _below(new))
    module, dot, _ = key.partition(".")
    return Rule(f"{module}{dot}*", f"{new}.{module}{dot}*") if dot else Rule(key, f"{new}.{key}")


def _below(prefix: str) -> str:
    return f"{prefix}.*" if prefix else "*"
