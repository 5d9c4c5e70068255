"""The logits of a network on a batch, and how far they are from those of another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mecha_exp.errors import ConfigError, EvaluationError, some
from mecha_exp.evaluators.common.batches import FIRST, Batch, described


def compare(theirs: Tensor, ours: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Compare two models' logits [rows, ..., classes] where `counts` [rows, ...] is true.

    Returns:
        float64 tensors [rows]: the share of positions with the same argmax, and the mean of
        KL(softmax(theirs) || softmax(ours)) in nats.

    >>> logits = torch.tensor([[[0.0, 1.0], [2.0, 0.0]]])
    >>> compare(logits, logits.flip(-1), torch.tensor([[True, True]]))[0].tolist()
    [0.0]
    """
    p, q = (logits[counts].double().log_softmax(dim=-1) for logits in (theirs, ours))
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
    divergence = terms.sum(dim=-1).clamp(min=0.0)  # rounding alone makes it negative
    equal = (theirs[counts].argmax(dim=-1) == ours[counts].argmax(dim=-1)).double()

    def mean(values: Tensor) -> Tensor:
        placed = values.new_zeros(counts.shape).masked_scatter_(counts, values)  # in one order, also on a GPU
        return placed.reshape(len(counts), -1).sum(dim=1) / counts.reshape(len(counts), -1).sum(dim=1)

    return mean(equal), mean(divergence)


def batch_logits(
    module: nn.Module, batch: Batch, size: int, output: str | int | None, data: Path
) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits of each part of a batch, and which of their positions count.

    Args:
        module: the network.
        batch: tensors by argument; floating ones are cast to the dtype of the network.
        size: rows at once.
        output: the name or the place of the logits in what the module returns; None is a tensor or `logits`.
        data: the file of the batch, for errors.

    Raises:
        ConfigError: the module cannot compute the batch, or gives no logits.
        EvaluationError: a logit is NaN or infinite.
    """
    weights: list[Tensor] = [*module.parameters(), torch.zeros(())]
    dtype = next((w.dtype for w in weights if w.is_floating_point()), torch.float32)
    for start in range(0, len(next(iter(batch.values()))), size):
        part = {name: tensor[start : start + size] for name, tensor in batch.items()}
        moved = {
            name: tensor.to(weights[0].device, dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in part.items()
        }
        try:
            given = module(moved[FIRST]) if FIRST in moved else module(**moved)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"{type(module).__name__} cannot compute {data} ({described(part)}): "
                f"{type(error).__name__}: {str(error).splitlines()[0]}. Mend the names, shapes and dtypes in "
                "evaluator.data, or lower evaluator.batch_size where memory is short."
            ) from error
        logits = _chosen(given, output, type(module).__name__)
        logits = logits.cpu() if logits.device.type == "mps" else logits  # which has no float64
        if logits.ndim < 2 or len(logits) != len(next(iter(part.values()))) or logits.shape[-1] < 2:
            raise ConfigError(
                f"{type(module).__name__} gives logits of shape {list(logits.shape)} for "
                f"{len(next(iter(part.values())))} rows: expected [rows, ..., classes] with at least 2 "
                "classes. Name another output with evaluator.output."
            )
        counts = _counts(part, logits, start)
        if bool(logits[counts].isnan().any()) or bool(logits[counts].isposinf().any()):
            raise EvaluationError(
                "the logits are NaN or infinite. Merge with a smaller strength or in float32 "
                "(engine.compute_dtype), or measure with evaluator.dtype=float32."
            )
        yield logits, counts


def _chosen(output: Any, name: str | int | None, module: str) -> Tensor:
    """The logits in what a module returns."""
    if hasattr(output, "_asdict"):
        parts: dict[str, Any] = output._asdict()
    elif isinstance(output, list | tuple):
        parts = {str(place): value for place, value in enumerate(output)}
    elif isinstance(output, Tensor):
        parts = {"logits": output}
    else:
        parts = dict(output.items() if isinstance(output, Mapping) else getattr(output, "__dict__", {}))
    wanted = "logits" if name is None else str(name)
    if not isinstance(parts.get(wanted), Tensor):
        tensors = [key for key, value in parts.items() if isinstance(value, Tensor)]
        raise ConfigError(
            f"{module} gives no tensor '{wanted}', only {some(tensors) or 'no tensor'}. Name the output "
            "whose last axis are the classes with evaluator.output, or another class with evaluator.kind."
        )
    return parts[wanted]  # type: ignore[no-any-return]


def _counts(part: Batch, logits: Tensor, start: int) -> Tensor:
    """Which positions of the logits count: those that the mask of attention shows."""
    decoder = "decoder_attention_mask"
    name = decoder if decoder in part or "decoder_input_ids" in part else "attention_mask"
    mask = part.get(name)
    if mask is None or mask.shape != logits.shape[:-1]:
        return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    counts = mask.to(logits.device) != 0
    empty = (~counts.flatten(start_dim=1).any(dim=1)).nonzero()
    if len(empty):
        raise ConfigError(f"evaluator.data: '{name}' hides all positions of row {start + int(empty[0])}.")
    return counts
