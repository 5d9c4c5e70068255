"""The evaluator `perplexity`: bits per byte and perplexity of a language model on documents."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Options, Shapes
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import evaluator
from mecha_exp.evaluators.common import ModelFolder, calm, check_network, folder_of, network
from mecha_exp.evaluators.common.networks import refuse_nan
from mecha_exp.evaluators.common.tables import read_texts, require_other_examples

__all__ = ["perplexity", "windows"]

KIND = "AutoModelForCausalLM"
TASK = "text"
"""The name of the one task, whose examples are the documents."""
_MAX_LENGTH = 2048
_SPACE = re.compile(r"\s+")
"""What parts words, as lm-evaluation-harness counts them."""
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")


def _check(shapes: Shapes, context: Context, parameters: Options) -> None:
    """Check the numbers, the documents, the tokenizer and the network, before anything is merged."""
    for name in ("limit", "length", "stride", "batch_size"):
        if parameters[name] is not None and parameters[name] < 1:
            raise ConfigError(f"evaluator.{name}: expected a number above 0, got {parameters[name]}.")
    folder = folder_of(context, parameters)
    _lengths(folder, parameters["length"], parameters["stride"])
    texts = [
        _documents(path, parameters["column"], parameters["cluster"], parameters["limit"])[0]
        for path in (parameters["data"], parameters["test"])
        if path is not None
    ]
    if len(texts) > 1:
        require_other_examples(texts[0], texts[1], f"evaluator.test={parameters['test']}")
    folder.check_vocabulary(shapes)
    device, dtype = parameters["device"], parameters["dtype"]
    check_network(folder, shapes, KIND, device=device, dtype=dtype, context=context)
    _tokenizer(folder, context.offline)


def _depends(context: Context, parameters: Options) -> Any:
    return folder_of(context, parameters).contents


@evaluator(
    "perplexity",
    metric="bits_per_byte",
    direction="minimize",
    units={"bits_per_byte": "bits", "perplexity": "of a token", "word_perplexity": "of a word"},
    splits=("validation", "test"),
    libraries=("transformers",),
    extra="text",
    check=_check,
    depends=_depends,
    fidelities=("limit",),
    takes_examples=True,
)
def perplexity(
    state_dict: Mapping[str, Tensor],
    *,
    context: Context,
    data: Path,
    test: Path | None = None,
    split: str = "validation",
    column: str = "text",
    cluster: str | None = None,
    limit: int | None = None,
    length: int | None = None,
    stride: int | None = None,
    batch_size: int = 1,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    examples: Mapping[str, list[int]] | None = None,
) -> Outcomes:
    """Measure how well a causal language model predicts documents.

    A document is tokenised by itself, without special tokens, after the first token of the tokenizer (`bos`,
    or else `eos`). Each token is predicted once: those of the first window from all before them, later ones
    in steps of `stride`, from the `length` tokens before the last of them. With `stride` equal to `length`
    these are the disjoint windows of lm-evaluation-harness. Probabilities are float32, their sum is float64.

    Args:
        state_dict: the weights under the names of the saved model.
        context: its inputs have the configuration and the tokenizer.
        data: the documents of `validation`: a `.txt` file or a folder of them (a document each), or a
            `.jsonl`, `.csv` or `.parquet` file or saved `datasets` (a document a row).
        test: those of `test`; without it there are no splits.
        split: `validation` or `test`.
        column: of the text in a row.
        cluster: a column of what documents have in common, such as their source.
        limit: documents at most, the first ones.
        length: tokens in a window; None is as many as the model takes, 2,048 at most.
        stride: tokens between windows; None is half of `length`.
        batch_size: windows at once.
        model: a folder or a hub's name whose configuration and tokenizer are used in place of the inputs'.
        device: `auto`, `cpu`, `cuda:1`.
        dtype: `auto` is that of the weights.
        trust_remote_code: whether code in the model's folder may be run.
        examples: the positions of the documents to measure, as those of the task `text`; None is all.

    Returns:
        For each document its bits, divided by the mean bytes (UTF-8) of all documents: their mean is the bits
        per byte of all documents. Beside them, of all documents, `perplexity` is exp(nats / tokens) and
        `word_perplexity` exp(nats / words).

    Raises:
        ConfigError: data, tokenizer or network are not what they must be.
        EvaluationError: a logit is NaN.
    """
    folder = folder_of(context, locals())
    length, stride = _lengths(folder, length, stride)
    path = data if split == "validation" or test is None else test
    documents = _documents(path, column, cluster, limit)
    mean_bytes = sum(len(text.encode()) for text in documents[0]) / len(documents[0])
    places = range(len(documents[0])) if examples is None else examples[TASK]
    texts, names, clusters = ([listed[place] for place in places] for listed in documents)
    tokenizer = _tokenizer(folder, context.offline)
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    pieces = [
        (number, *piece) for number, ids in enumerate(tokens) for piece in windows(ids, first, length, stride)
    ]
    nats = [0.0] * len(texts)
    built = network(folder, state_dict, KIND, device=device, dtype=dtype)
    with built as module, refuse_nan(module):
        batches = [pieces[start : start + batch_size] for start in range(0, len(pieces), batch_size)]
        alone = _names(pieces, places) if batch_size == 1 else None  # padding may change the last bit
        measured = context.in_parts("windows", batches, lambda batch: _nats(module, batch), names=alone)
    for (number, *_), value in zip(pieces, itertools.chain(*measured), strict=True):
        nats[number] += value
    total, words = sum(nats), sum(len(_SPACE.split(text)) for text in texts)
    return Outcomes(
        {TASK: [value / math.log(2) / mean_bytes for value in nats]},
        examples={TASK: names},
        clusters={TASK: clusters} if cluster else None,
        metrics={
            "perplexity": _exp(total / sum(map(len, tokens))),
            "word_perplexity": _exp(total / words),
        }
        if examples is None
        else None,
    )


def windows(
    ids: Sequence[int], first: int, length: int, stride: int
) -> Iterator[tuple[list[int], list[int]]]:
    """The inputs of a document's windows, and the tokens that are predicted at the end of each.

    >>> list(windows([5, 6, 7, 8], first=0, length=3, stride=1))
    [([0, 5, 6], [5, 6, 7]), ([5, 6, 7], [8])]
    """
    whole = [first, *ids]
    done = 0
    while done < len(ids):
        end = min(length if done == 0 else done + stride, len(ids))
        yield whole[max(0, end - length) : end], list(ids[done:end])
        done = end


def _names(pieces: Sequence[tuple[int, list[int], list[int]]], places: Sequence[int]) -> list[str]:
    """The names of windows: the place of the document among all, and that of the window in it."""
    counts = [0] * len(places)
    names = []
    for number, *_ in pieces:
        names.append(f"{places[number]}/{counts[number]}")
        counts[number] += 1
    return names


def _nats(module: Any, batch: Sequence[tuple[int, list[int], list[int]]]) -> list[float]:
    """The negative log-likelihood of the predicted tokens of each window."""
    longest = max(len(inputs) for _, inputs, _ in batch)
    ids = torch.tensor([inputs + [inputs[-1]] * (longest - len(inputs)) for _, inputs, _ in batch])
    mask = torch.tensor([[1] * len(inputs) + [0] * (longest - len(inputs)) for _, inputs, _ in batch])
    logits = module(ids.to(module.device), attention_mask=mask.to(module.device), use_cache=False).logits
    nats = []
    for row, (_, inputs, targets) in enumerate(batch):
        chosen = logits[row, len(inputs) - len(targets) : len(inputs)].float().log_softmax(dim=-1)
        wanted = torch.tensor(targets, device=chosen.device)
        nats.append(-float(chosen.gather(1, wanted[:, None]).double().sum()))
    return nats


def _lengths(folder: ModelFolder, length: int | None, stride: int | None) -> tuple[int, int]:
    """The tokens of a window and of a step, checked against the positions of the model."""
    text = folder.config.get("text_config") or folder.config
    positions = next((text[name] for name in _POSITIONS if isinstance(text.get(name), int)), None)
    if length is not None and positions is not None and length > positions:
        raise ConfigError(f"evaluator.length={length}: the model takes {positions} tokens at most.")
    length = length or min(positions or _MAX_LENGTH, _MAX_LENGTH)
    stride = stride or max(1, length // 2)
    if stride > length:
        raise ConfigError(f"evaluator.stride={stride}: expected at most the length of a window, {length}.")
    return length, stride


def _documents(
    path: Path, column: str, cluster: str | None, limit: int | None
) -> tuple[list[str], list[str], list[str]]:
    """The texts that are measured, with their names and clusters."""
    status = path.stat()
    texts, names, clusters = _read(path, column, cluster, (status.st_mtime_ns, status.st_size))
    return texts[:limit], names[:limit], clusters[:limit]


@lru_cache(maxsize=4)
def _read(
    path: Path, column: str, cluster: str | None, version: tuple[int, ...]
) -> tuple[list[str], list[str], list[str]]:
    texts, names, clusters = read_texts(path, column, cluster)
    chosen = [number for number, text in enumerate(texts) if text.strip()]
    if not chosen:
        raise ConfigError(f"{path} has no document with a word in it.")
    return [texts[n] for n in chosen], [names[n] for n in chosen], [clusters[n] for n in chosen]


def _tokenizer(folder: ModelFolder, offline: bool) -> Any:
    """The tokenizer in a folder, which must have a token before the first one of a text."""
    with calm(offline=offline):
        tokenizer = folder.tokenizer()
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer in {folder.path} has neither a bos nor an eos token, after which a document "
            "could start. Set one in tokenizer_config.json, or name another folder with evaluator.model=PATH."
        )
    return tokenizer


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
