"""Unifies vocabularies of different sizes, and output layers that are tied in some models only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from mecha_exp.engine.options import EngineOptions
from mecha_exp.errors import CheckpointError, Problems, counted, some
from mecha_exp.families import tied_to
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, models_of, walk
from mecha_exp.method_api.method import Arranges
from mecha_exp.method_api.paths import path_arguments
from mecha_exp.method_api.views import ViewMethod, hyperparameters, opened_views
from mecha_exp.sources.inputs import Sources
from mecha_exp.sources.source import Source, infos_of
from mecha_exp.sources.tokenizer import Tokenizer
from mecha_exp.sources.vocabulary import VocabularyView, token_axes, with_tokens

GGUF_EMBEDDING = "token_embd.weight"
"""The key of the embedding in GGUF files, which have their tokens in the file."""

SHOWN_TOKENS = 3
"""How many tokens a message names."""


def unify_vocabularies(
    recipes: Sequence[Node], sources: Sources, options: EngineOptions
) -> dict[ModelNode, Source]:
    """The inputs with one vocabulary, by the options `on_tied` and `resize_embeddings`.

    Models whose rows a recipe arranges, as `take_rows` does, may have tokens of their own, and those whose
    rows it does not read at all, such as experts of a mixture and donors of tokens, are left as they are.

    Raises:
        CheckpointError: the vocabularies differ, and the options make that an error.
    """
    problems = Problems()
    arranged = set(models_of(*rows_taken(recipes), children=_with_rows_below))
    direct = [frozenset(_read_by_row(recipe, sources)) for recipe in recipes]
    unread = set(models_of(*recipes)) - arranged - frozenset().union(*direct)
    read = {m: source for m, source in sources.items() if m not in unread and not source.is_adapter}
    if options.on_tokens == "error":
        tokenizers = [_tokenizers_taken(recipe) for recipe in recipes]
        for models, folders in dict.fromkeys(zip(direct, tokenizers, strict=True)):
            problems.add_all(different_tokens({m: s for m, s in sources.items() if m in models}, folders))
    untied = _unify_ties(read, options, problems)
    resized = _unify_sizes({m: s for m, s in untied.items() if m not in arranged}, options, problems)
    problems.raise_as(CheckpointError)
    return {**sources, **untied, **resized}


def models_merged(recipes: Sequence[Node]) -> list[ModelNode]:
    """The models of recipes, without those that only give rows of tokens."""
    return models_of(
        *recipes, children=lambda node: node.children[:1] if _arranges_rows(node) else node.children
    )


def _arranges_rows(node: Node) -> TypeGuard[MergeNode]:
    return isinstance(node, MergeNode) and node.method.arranges is Arranges.ROWS


def _with_rows_below(node: Node) -> Sequence[Node]:
    """The nodes below one whose rows it reads: of a call that arranges rows, those of its first argument."""
    if not _arranges_rows(node):
        return node.children
    _, first = node.arguments[0]
    return first if isinstance(first, tuple) else (first,)


def _read_by_row(recipe: Node, sources: Sources) -> list[ModelNode]:
    """The models whose rows of tokens a recipe reads where they lie."""
    return models_of(recipe, children=lambda node: node.children if _may_read_rows(node, sources) else ())


def _may_read_rows(node: Node, sources: Sources) -> bool:
    """Whether a node may read rows of tokens of what is below it, where these lie."""
    if _arranges_rows(node):
        return False
    if not isinstance(node, MergeNode) or not isinstance(node.method, ViewMethod):
        return True
    if node.method.reads_rows is not None:
        return node.method.reads_rows(**hyperparameters(node))
    view = opened_views([node], sources).get(node)
    return view is None or bool(_token_keys(view))


def _tokenizers_taken(recipe: Node) -> tuple[Path, ...]:
    """The tokenizers that a recipe takes rows for."""
    return tuple(dict.fromkeys(path for call in rows_taken([recipe]) for _, path in path_arguments(call)))


def rows_taken(recipes: Sequence[Node]) -> list[MergeNode]:
    """The calls of recipes that arrange rows of tokens: that take or make them."""
    return [node for node in walk(*recipes) if _arranges_rows(node)]


def different_tokens(sources: Sources, tokenizers: Sequence[Path] = ()) -> Iterator[str]:
    """A message about each input whose tokens differ from those of the first input with a tokenizer.

    Args:
        sources: the inputs.
        tokenizers: those that rows of other inputs are taken for.
    """
    components = {source: {_component_of(key) for key in _token_keys(source)} for source in sources.values()}
    parts = dict.fromkeys(part for source in sources.values() for part in sorted(components[source]))
    taken = [(str(path.parent), path) for path in tokenizers]
    for part in {**parts, **({"": None} if taken else {})}:
        holders = [(s.name, s.path) for s in sources.values() if part in components[s]]
        places = holders if part else [*holders, *taken]
        known = [(name, tokenizer) for name, path in places if (tokenizer := Tokenizer.beside(path, part))]
        for name, tokenizer in known[1:]:
            first, original = known[0]
            different = list(itertools.islice(original.differences(tokenizer), SHOWN_TOKENS + 1))
            if different:
                more = ", and so on" if len(different) > SHOWN_TOKENS else ""
                yield (
                    f"the tokenizers beside {first} and {name} differ, so that rows of different "
                    f"tokens would be merged: {'; '.join(different[:SHOWN_TOKENS])}{more}. Merge models with "
                    "one vocabulary (recipe=align_tokens gives a model the tokens of another one), or merge "
                    "the rows all the same with on_tokens=merge."
                )


def _keys_of(sources: Sources) -> dict[str, None]:
    """The keys of some models, each once."""
    return dict.fromkeys(itertools.chain.from_iterable(source.keys() for source in sources.values()))


def _component_of(key: str) -> str:
    """The part of a pipeline that a key belongs to, such as `text_encoder_2`; empty for a lone model."""
    part = key.partition(".")[0]
    return part if part.startswith("text_encoder") else ""


def _token_keys(source: Source) -> list[str]:
    """The keys whose rows are those of tokens; the rows of GGUF files are neither moved nor resized."""
    return [*token_axes(source), *([GGUF_EMBEDDING] if GGUF_EMBEDDING in source else [])]


def _unify_ties(sources: Sources, options: EngineOptions, problems: Problems) -> dict[ModelNode, Source]:
    """Apply `on_tied` to models that lack an output layer others have."""
    views = dict(sources)
    axes = {model: token_axes(source) for model, source in sources.items()}
    if len({frozenset(own) for own in axes.values()}) < 2:
        return views
    shapes = {m: {key: info.shape for key, info in infos_of(source).items()} for m, source in sources.items()}
    for head in dict.fromkeys(key for own in axes.values() for key in own):
        having = [source for source in sources.values() if head in source]
        shape = having[0].info(head).shape
        lacking = {m: tied_to(head, own, shape) for m, own in shapes.items() if head not in own}
        tied = {model: key for model, key in lacking.items() if key is not None}
        if not tied:
            continue
        if options.on_tied == "tie":
            views = {model: VocabularyView(source, dropped=[head]) for model, source in views.items()}
        elif options.on_tied == "untie":
            views |= {model: VocabularyView(views[model], {head: key}) for model, key in tied.items()}
        elif options.on_missing == "error":
            names = ", ".join(sources[model].name for model in tied)
            problems.add(
                f"{names}: there is no '{head}', because the model is tied: it uses '{min(tied.values())}' "
                f"instead, while {having[0].name} has both. on_tied=untie reads the one for the other, and "
                f"the result has both; on_tied=tie leaves '{head}' out of all, and the result is tied."
            )
    return views


def _unify_sizes(sources: Sources, options: EngineOptions, problems: Problems) -> dict[ModelNode, Source]:
    """Apply `resize_embeddings` to tensors that differ only in the number of tokens."""
    rows: dict[ModelNode, dict[str, tuple[tuple[int, ...], Source]]] = {}
    sizes_by_key: dict[str, list[int]] = {}
    axes = {key: axis for source in sources.values() for key, axis in token_axes(source).items()}
    for key, axis in axes.items():
        having = {model: source for model, source in sources.items() if key in source}
        shapes = {model: source.info(key).shape for model, source in having.items()}
        if len({with_tokens(shape, axis, 0) for shape in shapes.values()}) > 1:
            continue
        counts = {model: shape[axis] for model, shape in shapes.items()}
        if len({*counts.values()}) == 1:
            continue
        sizes = sizes_by_key[key] = list(counts.values())
        size = min(sizes) if options.resize_embeddings == "truncate" else max(sizes)
        donor = next(source for model, source in having.items() if counts[model] == size)
        for model, shape in shapes.items():
            if counts[model] != size:
                rows.setdefault(model, {})[key] = (with_tokens(shape, axis, size), donor)
    if sizes_by_key and options.resize_embeddings == "error":
        problems.add(_different_sizes(sizes_by_key, sources))
        return dict(sources)
    return {
        model: VocabularyView(source, rows=rows[model]) if model in rows else source
        for model, source in sources.items()
    }


def _different_sizes(sizes_by_key: Mapping[str, Sequence[int]], sources: Sources) -> str:
    key, sizes = next(iter(sizes_by_key.items()))
    holders = [source.name for source in sources.values() if key in source]
    listed = ", ".join(f"{size:,} in {name}" for size, name in zip(sizes, holders, strict=True))
    known = _tokens_apart(key, [source for source in sources.values() if key in source])
    same = known or f"If the first {min(sizes):,} tokens are the same,"
    return (
        f"the vocabularies have different sizes: '{key}' has {listed}. {same} resize_embeddings=truncate "
        f"keeps the first {min(sizes):,} rows, and resize_embeddings=pad keeps {max(sizes):,}: the rows that "
        "a model lacks are taken from the first one that has them."
    )


def _tokens_apart(key: str, holders: Sequence[Source]) -> str:
    """What tokenizers beside all models say of the tokens that some lack; empty where one has none."""
    found = [(source.name, Tokenizer.beside(source.path, _component_of(key))) for source in holders]
    known = [(name, tokenizer) for name, tokenizer in found if tokenizer and tokenizer.tokens]
    if len(known) < len(holders) or any(any(known[0][1].differences(other)) for _, other in known[1:]):
        return ""
    fewest = min((tokenizer.tokens for _, tokenizer in known), key=len)
    name, largest = max(known, key=lambda pair: len(pair[1].tokens))
    added = [repr(largest.tokens[number]) for number in sorted(largest.tokens.keys() - fewest.keys())]
    if not added:
        return "The tokenizers beside them have the same tokens, so the further rows stand for none:"
    return (
        f"{name} has {counted(len(added), 'token')} that others lack: {some(added, SHOWN_TOKENS)}. "
        "The other tokens are the same:"
    )
