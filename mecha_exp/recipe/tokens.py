"""Brings the rows of a model's tokens into the order of another model's tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mecha_exp.checkpoint import TensorInfo, open_stored
from mecha_exp.checkpoint.sidecars import folder_of
from mecha_exp.errors import CheckpointError, ConfigError, counted, some
from mecha_exp.families import TOKENIZER, token_tables
from mecha_exp.graph.nodes import ModelNode, Node, call
from mecha_exp.numbers import is_whole
from mecha_exp.recipe.token_names import TokenNames
from mecha_exp.sources.search import find_model
from mecha_exp.sources.source import infos_of
from mecha_exp.sources.tokenizer import Tokenizer
from mecha_exp.sources.views.row_table import Origins, RowTable

ERROR, ZERO, MEAN, PIECES, OMP = MISSING = ("error", "zero", "mean", "pieces", "omp")
"""The ways to make rows for tokens that no model has; the first makes none."""


def align_tokens(
    model: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    *others: str | os.PathLike[str],
    missing: str = ERROR,
    k: int = 64,
    model_dirs: Sequence[str | os.PathLike[str]] = (),
) -> Node:
    """A model whose embedding and output layer have a row for each token of another tokenizer, in its order.

    A token that the model does not have gets its row from the first of the others that has it. The rows are
    read in place, so that memory stays flat; a folder that is written gets the tokenizer, and in its
    `config.json` the numbers of special tokens.

    Where `missing` says what becomes of tokens that none of them has, tokens of different families of
    tokenizers are one by their text, and special ones by their kind: `Ġthe` is `▁the`, `</s>` is `<|end|>`.

    Args:
        model: a model, with the `tokenizer.json` of its tokens beside it.
        tokenizer: a model with the tokenizer that is wanted, or the folder of that.
        others: models that give the rows of tokens which the first one lacks.
        missing: `error`; `zero`; `mean`, of the rows of all the model's tokens; `pieces`, the mean of those
            that the model's tokenizer splits the token into; or `omp`, by orthogonal matching pursuit a sum
            of rows of tokens that both models have. `omp` alone needs the rows of the other model.
        k: how many rows a sum of `omp` has at most, 1 or more. It is not used otherwise.
        model_dirs: where models are looked for, after the current folder.

    Raises:
        CheckpointError: a model or a tokenizer cannot be read, no model has one of the tokens, a token has no
            pieces, or there are fewer than k tokens that both models have.
        ConfigError: there is no such way for tokens that are missing.

    >>> merge(slerp("base", align_tokens("expert", "base"), alpha=0.3), "merged")
    >>> merge(align_tokens("llama", "qwen", missing="omp"), "llama-with-tokens-of-qwen")

    Source: Goddard and Fernandes Neto, arXiv:2506.06607, for `omp`; mergekit, tokensurgeon.
    """
    _check_way(missing, k)
    folders = [Path(folder) for folder in model_dirs]
    models = [os.fspath(each) for each in (model, *others)]
    target = Path(tokenizer) if Path(tokenizer).is_dir() else find_model(os.fspath(tokenizer), folders)
    target_names = TokenNames(require_tokenizer(target))
    model_names = [_names_of(find_model(each, folders)) for each in models]
    tokens = target_names.tokenizer.in_order()
    rows = [_first_row(token, target_names, model_names, exact=missing == ERROR) for token in tokens]
    nodes: list[Node] = [ModelNode(each) for each in models]
    lacking = [number for number, row in enumerate(rows) if not row]
    if lacking and missing == ERROR:
        raise CheckpointError(
            f"align_tokens: {' and '.join(models)} have no row for {counted(len(lacking), 'token')} of "
            f"{target}: "
            f"{some([repr(tokens[number]) for number in lacking], 3)}. Name a model that has them after "
            f"these, or say how their rows are made: missing={', '.join(MISSING[1:])}"
        )
    if lacking and missing == PIECES:
        for number in lacking:
            rows[number] = tuple(
                (0, piece) for piece in model_names[0].pieces_of(tokens[number], target_names)
            )
    elif lacking and missing != ZERO:
        extended, new_rows = _model_of(
            missing, models[0], os.fspath(tokenizer), model_names[0], lacking, k, folders
        )
        for number, new_row in zip(lacking, new_rows, strict=True):
            rows[number] = ((len(nodes), new_row),)
        nodes.append(extended)
    text = str(RowTable.of(rows))
    return call("take_rows", *nodes, rows=text, tokenizer=str(target_names.tokenizer.folder / TOKENIZER))


def require_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer beside a model, whose numbers are known for sure.

    Raises:
        CheckpointError: there is no `tokenizer.json`, or tokens of it have no number there.
    """
    folder = folder_of(path)
    tokenizer = Tokenizer.beside(path)
    if tokenizer is None or not (folder / TOKENIZER).is_file():
        raise CheckpointError(
            f"there is no {TOKENIZER} beside {path}, by which rows are moved. Write it with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    unnumbered = sorted(set(tokenizer.special) - set(tokenizer.tokens.values()))
    if unnumbered:
        raise CheckpointError(
            f"{folder}: tokenizer_config.json names {some(list(map(repr, unnumbered)), 3)}, which "
            f"{TOKENIZER} does not have, so that their numbers are not known. Write both with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    return tokenizer


def token_rows(infos: Mapping[str, TensorInfo], name: str) -> int:
    """How many tokens a model has rows for.

    Args:
        infos: the dtype and the shape of every key.
        name: of the model, for messages.

    Raises:
        CheckpointError: it has no embedding.
    """
    rows = [
        infos[key].shape[axis] for key, axis in token_tables({k: i.shape for k, i in infos.items()}).items()
    ]
    if not rows:
        raise CheckpointError(f"{name}: none of its keys is known for a row for each token.")
    return min(rows)


def _check_way(missing: str, k: int) -> None:
    if missing not in MISSING:
        raise ConfigError(f"missing: expected one of {', '.join(MISSING)}, got {missing!r}.")
    if not is_whole(k, least=1):
        raise ConfigError(f"k: expected a whole number above 0, got {k!r}.")


def _model_of(
    missing: str,
    model: str,
    donor: str,
    own: TokenNames,
    lacking: Sequence[int],
    k: int,
    folders: Sequence[Path],
) -> tuple[Node, Sequence[int]]:
    """A model that has rows for the tokens that are lacking, and the row of each: their mean, or sums."""
    if missing == MEAN:
        count = max(own.numbers) + 1
        return call("take_rows", ModelNode(model), rows=f"0:{count} mean"), [count] * len(lacking)
    donor_names = _names_of(find_model(donor, folders))
    return _approximated(model, donor, own, donor_names, lacking, k), range(len(lacking))


def _names_of(path: Path) -> TokenNames:
    """The tokens of a model that have a row."""
    tokenizer = require_tokenizer(path)
    with open_stored(path) as opened:
        count = token_rows(infos_of(opened), opened.name)
    return TokenNames(tokenizer, count)


def _first_row(
    token: str, target_names: TokenNames, model_names: Sequence[TokenNames], exact: bool
) -> Origins:
    """The origin of a token's row in the first model that has the token; empty if none has it."""
    rows_of_models = (
        names.rows.get(token) if exact else names.row_of(token, target_names) for names in model_names
    )
    rows: Iterator[Origins] = (
        ((number, row),) for number, row in enumerate(rows_of_models) if row is not None
    )
    return next(rows, ())


def _approximated(
    model: str, donor: str, own: TokenNames, donor_names: TokenNames, lacking: Sequence[int], k: int
) -> Node:
    """A model with rows for the tokens that it lacks, as sums of rows of tokens that a donor shares with it.

    Raises:
        CheckpointError: there are fewer than k such tokens, or the donor has no row for one that is lacking.
    """
    pairs = ((own.row_of(token, donor_names), row) for token, row in donor_names.rows.items())
    shared = sorted((row, same) for same, row in pairs if same is not None)
    if len(shared) < k:
        raise CheckpointError(
            f"align_tokens: {model} and {donor} share {counted(len(shared), 'token')}, and missing=omp "
            f"adds the rows of k={k} of them. "
            + (f"Set k={len(shared)} or less." if shared else "Set missing=pieces, mean or zero.")
        )
    if unknown := [number for number in lacking if number not in donor_names.numbers]:
        raise CheckpointError(
            f"align_tokens: {donor} has {counted(len(unknown), 'token')} without a row, as "
            f"{donor_names.tokenizer.tokens[unknown[0]]!r}, so that missing=omp has nothing to go by. Set "
            "missing=pieces, mean or zero."
        )
    text = str(RowTable.of(((0, same), (1, row)) for row, same in shared))
    rows = str(RowTable.of(((0, number),) for number in lacking))
    return call("approximate_rows", ModelNode(model), ModelNode(donor), shared=text, rows=rows, k=k)
