"""What a view of `architectures.conversions` makes of tensors."""

from collections.abc import Sequence
from typing import Any

import torch

from mecha_exp.architectures import View


def viewed(view: View, values: Sequence[Any]) -> Any:
    """What a view makes of the values of its sources; a number stays what it is."""
    if not isinstance(values[0], torch.Tensor):
        return values[0]
    joined = values[0] if len(values) == 1 else torch.cat(list(values))
    if view.of > 1:
        joined = joined.chunk(view.of)[view.index]
    if view.transposed:
        joined = joined.T
    shapes = {key: tuple(value.shape) for key, value in zip(view.sources, values, strict=True)}
    return joined.reshape(view.shape(shapes))
