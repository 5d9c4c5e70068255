"""The tokens of the output, and the rows that each model gets for them, by mergekit's rules.

Source: mergekit 0.1.5, tokenizer/build.py and tokenizer/embed.py. Its union lists new tokens in the order of
a hash table; here they have that of their models and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mecha_exp.checkpoint.sidecars import folder_of
from mecha_exp.errors import CheckpointError, ConfigError, counted, some
from mecha_exp.mergekit.reader import Configuration, Slice
from mecha_exp.mergekit.references import Reference, StoredModel
from mecha_exp.mergekit.tokenizer_settings import UNION, TokenizerSettings, TokenSource
from mecha_exp.recipe.tokens import require_tokenizer, token_rows
from mecha_exp.sources.tokenizer import Tokenizer
from mecha_exp.sources.views.row_table import RowTable

Rows: TypeAlias = "tuple[tuple[Reference, int], ...]"
"""The rows that one row is the mean of, as pairs of a model and a row of it; none for zeros."""

_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}


@dataclass(frozen=True)
class RowsOf:
    """The rows of a model in the output.

    Attributes:
        table: where they come from.
        others: the models of the table after the first, which is the model itself.
    """

    table: RowTable
    others: tuple[Reference, ...]

    @property
    def own(self) -> RowTable:
        """The table with zeros for the rows of other models."""
        own = ((run, run.origins if [m for m, _ in run.origins] == [0] else ()) for run in self.table.runs)
        rows = (tuple((0, row + n) for _, row in origins) for run, origins in own for n in range(run.count))
        return RowTable.of((*rows, *((),) * self.table.padding))


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of the output.

    Attributes:
        settings: what the configuration says about them.
        donor: the model whose tokenizer it is.
        tokens: by number.
        added: the entries of `added_tokens` that the donor's tokenizer lacks.
        numbers: by model the row of each token that it has.
        counts: by model how many rows it has.
        same: the models whose tokenizer is that of the donor.
    """

    settings: TokenizerSettings
    donor: Reference
    tokens: tuple[str, ...] = field(repr=False)
    added: tuple[Mapping[str, Any], ...] = field(repr=False)
    numbers: Mapping[Reference, Mapping[str, int]] = field(repr=False)
    counts: Mapping[Reference, int] = field(repr=False)
    same: frozenset[Reference] = field(repr=False)

    @staticmethod
    def of(configuration: Configuration, models: Mapping[Reference, StoredModel]) -> Vocabulary | None:
        """The tokens that a configuration asks for; None where it says nothing about them.

        Raises:
            CheckpointError: a tokenizer cannot be read, or has tokens without a row.
            ConfigError: a token of a model is not there.
        """
        settings = configuration.tokenizer
        if settings is None:
            return None
        tokenizers = {r: _tokenizer_of(r, model) for r, model in models.items()}
        base = configuration.base or configuration.slices[0].inputs[0].reference
        donor = base if isinstance(settings.source, str) else settings.source
        counts = {r: token_rows(model.infos, str(r)) for r, model in models.items()}
        numbers = {r: _numbers(tokenizers[r], counts[r]) for r in models}
        tokens = tokenizers[donor].in_order()
        order = dict.fromkeys([base, *configuration.inputs]) if settings.source == UNION else {}
        for reference in dict.fromkeys([donor, *order]):  # whose tokens would be lost otherwise
            _require_rows([*tokenizers[reference].tokens.values()], numbers[reference], reference, settings)
        added = _missing_tokens(tokens, [(tokenizers[r], numbers[r]) for r in order])
        known = {*tokens, *(entry["content"] for entry in added)}
        added += [_plain(token) for token in settings.tokens if token not in known]
        new = [entry for entry in added if entry["content"] not in set(tokens)]
        place = {token: n for n, token in enumerate([*tokens, *(e["content"] for e in new)])}
        entries = tuple({"id": place[e["content"]], **e} for e in added)
        same = frozenset(r for r in models if not any(tokenizers[donor].differences(tokenizers[r])))
        return Vocabulary(settings, donor, tuple(place), entries, numbers, counts, same)

    @property
    def padding(self) -> int:
        """How many rows follow the tokens."""
        return -len(self.tokens) % self.settings.multiple

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.tokens) + self.padding

    def rows_of(self, part: Slice, models: Mapping[Reference, StoredModel]) -> dict[Reference, RowsOf]:
        """The rows that each input of a slice gets; none for inputs whose rows stay as they are.

        Raises:
            ConfigError: a token's source is not an input, or does not have it.
        """
        inputs = [entry.reference for entry in part.inputs]
        defaults = [self._default(token, inputs, part.base) for token in self.tokens]
        by_reference = {reference: self._table(reference, inputs, defaults) for reference in inputs}
        return {
            r: rows
            for r, rows in by_reference.items()
            if r not in self.same or not _is_as_stored(rows.table, models[r])
        }

    def _table(
        self, reference: Reference, inputs: Sequence[Reference], defaults: Sequence[Rows | None]
    ) -> RowsOf:
        """The rows of one input: its own, or the default where it has none or that is forced."""
        own = self.numbers[reference]
        rows: list[Rows] = []
        for token, default in zip(self.tokens, defaults, strict=True):
            source = self.settings.tokens.get(token)
            keeps = token in own and not (source and source.force)
            rows.append(((reference, own[token]),) if keeps or default is None else default)
        used = {model for each in rows for model, _ in each}
        others = tuple(model for model in inputs if model in used and model != reference)
        number = {model: n for n, model in enumerate((reference, *others))}
        origins = (tuple((number[model], row) for model, row in each) for each in rows)
        return RowsOf(RowTable.of(origins, self.padding), others)

    def _default(self, token: str, inputs: Sequence[Reference], base: Reference | None) -> Rows | None:
        """The rows for inputs that lack a token; None where all have it and keep theirs."""
        holders = [reference for reference in inputs if token in self.numbers[reference]]
        source = self.settings.tokens.get(token)
        if len(holders) == len(inputs) and not (source and source.force):
            return None
        if source is not None:
            return self._given(token, source, inputs)
        if base in holders and base is not None:
            holders = [base]
        return tuple((reference, self.numbers[reference][token]) for reference in holders)

    def _given(self, token: str, source: TokenSource, inputs: Sequence[Reference]) -> Rows:
        """The row that a configuration names for a token."""
        if source.model is None:
            return ()
        if source.model not in inputs:
            raise ConfigError(
                f"{source.where}: {source.model} is not among the models that are merged, and mergekit takes "
                "rows of these alone. Name one of them."
            )
        numbers = self.numbers[source.model]
        source_token = token if source.token is None else source.token
        row = source_token if isinstance(source_token, int) else numbers.get(source_token, -1)
        if not 0 <= row < self.counts[source.model]:
            raise ConfigError(f"{source.where}: {source.model} has no row for the token {source_token!r}.")
        return ((source.model, row),)


def _tokenizer_of(reference: Reference, model: StoredModel) -> Tokenizer:
    """The tokenizer of a model; ConfigError for one that is not written."""
    folder = folder_of(model.path)
    if any(content != folder / name for name, content in model.small_files.items()):
        raise ConfigError(
            f"tokenizer: {reference}, a merge of this file, has a tokenizer that is not written. Put that "
            "merge into a file of its own, and merge it first."
        )
    return require_tokenizer(model.path)


def _numbers(tokenizer: Tokenizer, count: int) -> dict[str, int]:
    """The row of each token that a model with some rows has one for."""
    return {token: number for number, token in tokenizer.tokens.items() if number < count}


def _require_rows(
    tokens: Sequence[str], numbers: Mapping[str, int], model: Reference, settings: TokenizerSettings
) -> None:
    """Check that a model has a row for each token of its tokenizer."""
    lacking = [repr(token) for token in tokens if token not in numbers]
    if lacking:
        tokens_are = counted(len(lacking), f"token of {model} is", f"tokens of {model} are")
        raise CheckpointError(
            f"{settings.where}: {tokens_are} beyond the rows of its embedding: {some(lacking, 3)}. Take the "
            "tokenizer of another model (tokenizer_source: MODEL), or resize the embedding."
        )


def _missing_tokens(
    tokens: Sequence[str], models: Sequence[tuple[Tokenizer, Mapping[str, int]]]
) -> list[Mapping[str, Any]]:
    """The entries of `added_tokens` that a tokenizer needs for the tokens of models, the plain ones first."""
    known, ours = set(tokens), set(models[0][0].added) if models else set()
    entries: dict[str, Mapping[str, Any]] = {}
    for tokenizer, numbers in models:
        for token, entry in tokenizer.added.items():
            if token in numbers and token not in ours:
                entries.setdefault(token, {name: entry.get(name, value) for name, value in _PLAIN.items()})
    plain = [
        _plain(token)
        for token in dict.fromkeys(
            token for _, numbers in models for token in sorted(numbers, key=numbers.__getitem__)
        )
        if token not in known and token not in entries
    ]
    return [*plain, *({"content": token, **entry} for token, entry in entries.items())]


def _plain(token: str) -> dict[str, Any]:
    """The entry of a token that is added without settings."""
    return {"content": token, **_PLAIN}


def _is_as_stored(table: RowTable, model: StoredModel) -> bool:
    """Whether a table says the rows that a model has anyway."""
    counts = {model.infos[key].shape[axis] for key, axis in model.token_axes.items()}
    return table.start == 0 and counts == {table.total}
