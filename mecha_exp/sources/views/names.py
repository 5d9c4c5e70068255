"""A model under other keys, by rules such as `layers.*.mlp.up.weight -> layers.*.experts.0.up.weight`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mecha_exp.errors import CheckpointError, RecipeError, brief, some
from mecha_exp.sources.source import RenamedSource, Source


@dataclass(frozen=True)
class Rule:
    """A rule that renames keys or leaves them out.

    Attributes:
        old: a key, where each `*` stands for any text.
        new: the new key, with the same texts for its `*` in order; empty to leave the keys out.
    """

    old: str
    new: str

    @staticmethod
    def parse_all(text: str) -> tuple[Rule, ...]:
        """Read rules, which are separated by commas.

        Raises:
            RecipeError: a rule has no arrow, or not as many `*` on its right as on its left.
        """
        rules = []
        for word in text.split(","):
            old, arrow, new = (part.strip() for part in word.partition("->"))
            if not arrow or not old:
                raise RecipeError(f"rules: expected OLD -> NEW, got {brief(word.strip())}.")
            if new and old.count("*") != new.count("*"):
                raise RecipeError(
                    f"rules: {brief(word.strip())} has {old.count('*')} and {new.count('*')} stars. The text "
                    "of each star on the left goes to one on the right."
                )
            rules.append(Rule(old, new))
        return tuple(rules)

    def renamed(self, key: str) -> str | None:
        """The new name of a key, empty to leave it out; None where the rule is not about it."""
        match = re.fullmatch("(.*?)".join(map(re.escape, self.old.split("*"))), key)
        if match is None:
            return None
        first, *others = self.new.split("*")
        return first + "".join(text + other for text, other in zip(match.groups(), others, strict=False))


def in_other_names(source: Source, text: str) -> RenamedSource:
    """A source under the names that rules give; keys that no rule is about are left out.

    Args:
        source: the source to read.
        text: the rules; the first that is about a key decides.

    Raises:
        RecipeError: a rule cannot be read.
        CheckpointError: two keys get one name, or a rule is about no key.
    """
    rules = Rule.parse_all(text)
    originals: dict[str, str] = {}
    used: set[Rule] = set()
    for key in source.all_keys():
        rule, name = _first(rules, key)
        if rule is not None:
            used.add(rule)
        if not name:
            continue
        if name in originals:
            raise CheckpointError(
                f"rename_keys: '{originals[name]}' and '{key}' of {source.name} would both be '{name}'."
            )
        originals[name] = key
    _require_used(rules, used, source)
    return RenamedSource(source, originals)


def _first(rules: Sequence[Rule], key: str) -> tuple[Rule | None, str]:
    """The first rule that is about a key, and the name that it gives; an empty one without a rule."""
    named = ((rule, rule.renamed(key)) for rule in rules)
    return next(((rule, name) for rule, name in named if name is not None), (None, ""))


def _require_used(rules: Iterable[Rule], used: Collection[Rule], source: Source) -> None:
    unused = [rule.old for rule in rules if rule not in used]
    if unused:
        raise CheckpointError(
            f"rename_keys: {source.name} has no keys for {some(unused, 3)}. It has "
            f"{some(list(source.keys()), 3)}."
        )
