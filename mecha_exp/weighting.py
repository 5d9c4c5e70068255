"""A hyperparameter with a value for each key: patterns over key names, the most specific one winning."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from mecha_exp.errors import RecipeError

Scalar: TypeAlias = float | int | bool | str | None


class NoValueError(RecipeError):
    """A key for which a value by key says nothing."""


@dataclass(frozen=True)
class ByKey:
    """A value that depends on the key: shell patterns over key names, and a default for the rest.

    Of the patterns that match a key the most specific one wins (the most characters that are not
    wildcards); two that are equally specific and disagree are an error. A pattern without wildcards also
    stands for the whole sub-tree of that name: `conv1` means `conv1` and `conv1.*`.
    """

    patterns: tuple[tuple[str, Scalar], ...]
    default: Scalar = None

    def __call__(self, key: str) -> Scalar:
        """The value for `key`; RecipeError where nothing matches or two patterns disagree."""
        matches = [(_specificity(p), p, v) for p, v in self.patterns if _matches(p, key)]
        if not matches:
            if self.default is None:
                raise NoValueError(
                    f"no pattern of {[p for p, _ in self.patterns]} matches the key '{key}', and there is no "
                    "'default'. Add a 'default'."
                )
            return self.default
        best = max(specificity for specificity, _, _ in matches)
        winners = [(p, v) for specificity, p, v in matches if specificity == best]
        if len({repr(v) for _, v in winners}) > 1:
            raise RecipeError(
                f"the key '{key}' is matched by {', '.join(f'{p!r} = {v}' for p, v in winners)}, which are "
                "equally specific and disagree. Make one of them more specific."
            )
        return winners[0][1]

    def unmatched(self, keys: Iterator[str] | list[str]) -> list[str]:
        """The patterns that match none of the keys: most likely misspelt."""
        names = list(keys)
        return [p for p, _ in self.patterns if not any(_matches(p, k) for k in names)]

    @property
    def values(self) -> list[Scalar]:
        """Every value that some key may get."""
        return [v for _, v in self.patterns] + ([] if self.default is None else [self.default])


def by_key(value: Mapping[str, Any]) -> Scalar | ByKey:
    """A per-key value from a mapping of patterns; `default` is for the keys that no pattern matches.

    A nested mapping named `blocks` is merged in, so that a preset can stand beside a default; without any
    pattern the result is the plain default.
    """
    patterns = {str(k): v for k, v in value.items() if k != "default"}
    if "blocks" in patterns and isinstance(patterns["blocks"], Mapping | None):
        patterns.update(_flat(patterns.pop("blocks") or {}))
    default = patterns.pop("default", value.get("default"))
    if not patterns:
        return default  # type: ignore[no-any-return]
    return ByKey(tuple(sorted(patterns.items())), default)


def _flat(blocks: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by dots: a command line's `blocks.model.layers=0.3` is the block `model.layers`."""
    flat: dict[str, Any] = {}
    for name, value in blocks.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _matches(pattern: str, key: str) -> bool:
    if any(c in pattern for c in "*?["):
        return fnmatch.fnmatchcase(key, pattern)
    return key == pattern or key.startswith(pattern + ".")


def _specificity(pattern: str) -> int:
    return sum(c not in "*?[]" for c in pattern)
