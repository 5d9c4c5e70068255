"""The vocabulary that adapters were trained with: the rows and the output layer that their base gets.

After `resize_token_embeddings` PEFT saves whole tables with an adapter, since its base lacks rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mecha_exp.checkpoint import TensorInfo
from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.errors import CheckpointError, Problems, some
from mecha_exp.families import Shapes, embeddings, output_tied_to, tied_to, token_tables
from mecha_exp.peft.config import PeftConfig, config_of
from mecha_exp.peft.modules import TOKENS, Module, base_keys, sorted_modules
from mecha_exp.sources.source import Source, SourceView, infos_of, read_values_as_bytes
from mecha_exp.sources.vocabulary import VocabularyView, vocabulary_donor, with_tokens
from mecha_exp.system.byte_cache import ByteCache

IS_ADAPTER = " is an adapter: "
"""In each line about how an adapter is read."""

_FLOAT32 = torch.float32
_ZEROS = "logits_bias"
"""The end of the keys of biases whose entries for new tokens are 0, as transformers adds them."""


def tied_heads(shapes: Shapes) -> dict[str, str]:
    """The output layers that a tied model lacks, each with the embedding that it uses instead."""
    heads = ((output_tied_to(embedding), embedding) for embedding in embeddings(shapes))
    return {h: e for h, e in heads if h is not None and h not in shapes and tied_to(h, shapes) == e}


def tied_names(
    config: PeftConfig, factors: Mapping[str, Collection[str]], whole: Collection[str], shapes: Shapes
) -> set[str]:
    """The modules and whole tensors of an adapter that a tied base has once, under another name.

    PEFT saves a tied table under each of its names. It is still tied unless it was trained whole
    (`modules_to_save`) without `ensure_weight_tying`: each name has a table of its own from then on.

    Args:
        factors, whole: of the adapter; see `sorted_modules`.
        shapes: of the base.
    """

    def is_tied(name: str, ending: str = "") -> bool:
        other = None if base_keys([name], shapes, ending) else tied_to(f"{name}{ending}", shapes)
        modules = (f"{name}{ending}".rpartition(".")[0], (other or "").rpartition(".")[0])
        return other is not None and (config.ties_embeddings or not any(map(config.saves, modules)))

    names = {name for name in whole if is_tied(name)}
    shared = (name for name, own in factors.items() if TOKENS in own or config.ties_embeddings)
    return names | {name for name in shared if is_tied(name, ".weight")}


def with_vocabulary(base: Source, adapters: Sequence[Source], on_tied: str) -> Source:
    """A base with the rows of tokens, and the output layer of its own, that its adapters were trained with.

    A tied base gets an output layer where PEFT trained one beside the embedding (`modules_to_save`), or with
    `on_tied=untie` where an adapter changes one of both. Rows that the base lacks are those of the adapted
    model, at any strength of the adapter.

    Raises:
        CheckpointError: adapters with different numbers of tokens, or without the rows of some table.
    """
    shapes = {key: info.shape for key, info in infos_of(base).items()}
    parts = [_Parts(adapter, config, base) for adapter in adapters if (config := config_of(adapter))]
    heads = {head: e for part in parts for head, e in part.heads(shapes, on_tied).items()}
    full_shapes = {**shapes, **{head: shapes[embedding] for head, embedding in heads.items()}}
    tables = {part: part.tables(full_shapes, heads) for part in parts}
    rows = _rows(base.name, full_shapes, tables)
    return VocabularyView(base, heads, rows=rows) if heads or rows else base


def resized_lines(base: Source, adapters: Sequence[Source]) -> Iterator[str]:
    """A line about the rows of tokens that a base gets or loses with its adapters."""
    view = with_vocabulary(base, adapters, "error")
    for key in embeddings({key: info.shape for key, info in infos_of(base).items()}):
        before, after = base.info(key).shape[0], view.info(key).shape[0]
        if before != after and (donor := vocabulary_donor(view)) is not None:
            yield (f"{donor.name}{IS_ADAPTER}{base.name} gets its {after:,} rows of '{key}', not {before:,}")


def _rows(
    name: str, shapes: Shapes, tables: Mapping[_Parts, Mapping[str, Module]]
) -> dict[str, tuple[tuple[int, ...], Source]]:
    """The new shape of each table, with the source of its rows."""
    axes = {key: axis for key, axis in token_tables(shapes).items() if "per_layer" not in key}
    sizes = {part: part.count(own, shapes) for part, own in tables.items() if own}
    resizing = {
        part: count for part, count in sizes.items() if any(shapes[k][0] != count for k in tables[part])
    }
    if not resizing:
        return {}
    part, count = next(iter(resizing.items()))
    problems = Problems()
    if len({*sizes.values()}) > 1:
        listed = " and ".join(f"{size:,} in {each.adapter.name}" for each, size in sizes.items())
        problems.add(
            f"the adapters have different numbers of tokens: {listed}. Merge each with its base first "
            "(recipe=lora), and then these models with resize_embeddings=pad."
        )
    old = {shapes[key][0] for key in tables[part]}
    others = [key for key, axis in axes.items() if shapes[key][axis] in old and key not in tables[part]]
    if lacking := [key for key in others if not key.endswith(_ZEROS) and count > shapes[key][axes[key]]]:
        problems.add(
            f"{part.adapter.name}: it was trained with {count:,} tokens, {name} has fewer, and the adapter "
            f"lacks the new rows of {some(lacking, 3)}. Save it with all tables: save_pretrained(..., "
            "save_embedding_layers=True)."
        )
    problems.raise_as(CheckpointError)
    donor = _AddedRows(part.adapter, part.base, tables[part], shapes, count)
    keys = (*tables[part], *others)
    return {key: (with_tokens(tuple(shapes[key]), axes[key], count), donor) for key in keys}


@dataclass(frozen=True, eq=False)
class _Parts:
    """What an adapter has, sorted by module.

    Attributes:
        adapter: its opened folder.
        config: its configuration.
        base: the model that it changes.
    """

    adapter: Source
    config: PeftConfig
    base: Source

    @cached_property
    def _sorted(self) -> tuple[Mapping[str, Mapping[str, str]], Mapping[str, str]]:
        return sorted_modules(self.adapter.keys(), self.adapter.name)

    def heads(self, shapes: Shapes, on_tied: str) -> dict[str, str]:
        """The output layers that a tied base gets, with their embeddings."""
        factors, whole = self._sorted
        changed = {*factors, *(key.rpartition(".")[0] for key in whole)}
        heads = {}
        for head, embedding in tied_heads(shapes).items():
            modules = [key.removesuffix(".weight") for key in (head, embedding)]
            own = [name for name in changed if any(f".{name}".endswith(f".{module}") for module in modules)]
            is_untied = not self.config.ties_embeddings and any(map(self.config.saves, own))
            if own and (on_tied == "untie" or (is_untied and on_tied != "tie")):
                heads[head] = embedding
        return heads

    def tables(self, shapes: Shapes, heads: Mapping[str, str]) -> dict[str, Module]:
        """The tables of tokens that the adapter has whole, or with rows of new tokens, by key of the base."""
        factors, whole = self._sorted
        known = token_tables(shapes)
        modules = {
            key: Module(inner.rpartition(".")[0], key, whole=whole[inner])
            for inner, key in base_keys(list(whole), shapes).items()
            if known.get(key) == 0 and tuple(shapes[key][1:]) == self.adapter.info(whole[inner]).shape[1:]
        }
        for head, embedding in heads.items():
            for one, other in ((head, embedding), (embedding, head)):
                if one in modules and other not in modules:
                    modules[other] = replace(modules[one], key=other)
        for name, key in base_keys(list(factors), shapes, ".weight").items():
            if key in modules or (TOKENS in factors[name] and self._adds_tokens(name, shapes[key][0])):
                module = modules.get(key, Module(name, key))
                modules[key] = replace(
                    module,
                    factors=factors[name],
                    scale=self.config.scale_of(name),
                    tokens=self.config.tokens_of(name),
                )
        return modules

    def count(self, tables: Mapping[str, Module], shapes: Shapes) -> int:
        """How many tokens the adapted model has."""
        whole = [self.adapter.info(module.whole).shape[0] for module in tables.values() if module.whole]
        return max(whole, default=max(max(module.tokens, default=-1) + 1 for module in tables.values()))

    def _adds_tokens(self, name: str, count: int) -> bool:
        """Whether the rows of some tokens go on where a table of so many rows ends, without a gap."""
        added = sorted(token for token in self.config.tokens_of(name) if token >= count)
        return bool(added) and added == list(range(count, count + len(added)))


class _AddedRows(SourceView):
    """The rows of an adapted model's tables that its base lacks; zeros at a table that the adapter has not.

    Args:
        adapter: the opened folder of the adapter.
        base: the model, with the rows that it has.
        modules: the changed tables by key.
        shapes: of the base, with the output layer that it gets.
        count: of tokens.
    """

    def __init__(
        self, adapter: Source, base: Source, modules: Mapping[str, Module], shapes: Shapes, count: int
    ) -> None:
        super().__init__(adapter)
        self._base, self._modules, self._shapes, self._count = base, modules, shapes, count
        added = [(count - shapes[key][0]) * math.prod(shapes[key][1:]) for key in modules]
        self._cache = ByteCache(sum(_FLOAT32.itemsize * max(0, each) for each in added))

    def keys(self) -> Collection[str]:
        return self._modules.keys()

    def info(self, key: str) -> TensorInfo:
        return TensorInfo.made("F32", (self._count, *self._shapes[key][1:]))

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        if (module := self._modules.get(key)) is None:
            out.zero_()
            return
        start -= math.prod(self._shapes[key])
        out.copy_(self._cache.get(key, lambda: self._rows(module))[start : start + out.numel()])

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        read_values_as_bytes(self, key, start, view)

    def region(self, key: str) -> FileRegion | None:
        return None

    def _rows(self, module: Module) -> torch.Tensor:
        before = torch.empty(0)
        if not module.whole:
            rows = self._base.read(module.key).to(_FLOAT32)
            before = torch.cat([rows, rows.new_zeros(self._count - len(rows), *rows.shape[1:])])
        table = module.adapted(lambda key: self._original.read(key).to(_FLOAT32), before)
        return table[self._shapes[module.key][0] :].flatten().clone()
