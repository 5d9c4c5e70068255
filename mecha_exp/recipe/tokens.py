"""Brings the rows of a model's tokens into the order of another model's tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mecha_exp.checkpoint import TensorInfo, open_stored
from mecha_exp.errors import CheckpointError, some
from mecha_exp.graph.nodes import ModelNode, Node, call
from mecha_exp.sources.search import find_model
from mecha_exp.sources.source import infos_of
from mecha_exp.sources.tokenizer import TOKENIZER, Tokenizer
from mecha_exp.sources.views.row_table import Origins, RowTable
from mecha_exp.sources.vocabulary import has_token_rows


def align_tokens(
    model: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    *others: str | os.PathLike[str],
    model_dirs: Sequence[str | os.PathLike[str]] = (),
) -> Node:
    """A model whose embedding and output layer have a row for each token of another tokenizer, in its order.

    A token that the model does not have gets its row from the first of the others that has it. The rows are
    read in place, so that memory stays flat; a folder that is written gets the tokenizer.

    Args:
        model: a model, with the `tokenizer.json` of its tokens beside it.
        tokenizer: a model with the tokenizer that is wanted, or the folder of that.
        others: models that give the rows of tokens which the first one lacks.
        model_dirs: where models are looked for, after the current folder.

    Raises:
        CheckpointError: a model or a tokenizer cannot be read, or no model has one of the tokens.

    >>> merge(slerp("base", align_tokens("expert", "base"), alpha=0.3), "merged")
    """
    folders = [Path(folder) for folder in model_dirs]
    models = [os.fspath(each) for each in (model, *others)]
    target = Path(tokenizer) if Path(tokenizer).is_dir() else find_model(os.fspath(tokenizer), folders)
    tokens = require_tokenizer(target)
    numbers = [_rows_of(find_model(each, folders)) for each in models]
    rows = [_first_row(token, numbers) for token in tokens.in_order()]
    lacking = [token for token, row in zip(tokens.in_order(), rows, strict=True) if not row]
    if lacking:
        raise CheckpointError(
            f"align_tokens: {' and '.join(models)} have no row for {len(lacking)} tokens of {target}: "
            f"{some(list(map(repr, lacking)), 3)}. Name a model that has them after these."
        )
    text = str(RowTable.of(rows))
    nodes = [ModelNode(each) for each in models]
    return call("take_rows", *nodes, rows=text, tokenizer=str(tokens.folder / TOKENIZER))


def require_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer beside a model, whose numbers are known for sure.

    Raises:
        CheckpointError: there is no `tokenizer.json`, or tokens of it have no number there.
    """
    folder = path if path.is_dir() else path.parent
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
    rows = [info.shape[0] for key, info in infos.items() if has_token_rows(key)]
    if not rows:
        raise CheckpointError(f"{name}: none of its keys is known for a row for each token.")
    return min(rows)


def _rows_of(path: Path) -> dict[str, int]:
    """The row of each token of a model."""
    tokenizer = require_tokenizer(path)
    with open_stored(path) as opened:
        count = token_rows(infos_of(opened), opened.name)
    return {token: row for row, token in tokenizer.tokens.items() if row < count}


def _first_row(token: str, numbers: Sequence[dict[str, int]]) -> Origins:
    """Where the row of a token is, in the first model that has it; nowhere in none of them."""
    found: Iterator[Origins] = (
        ((number, rows[token]),) for number, rows in enumerate(numbers) if token in rows
    )
    return next(found, ())
