"""Image models whose first layer takes other numbers of channels: inpainting, pix2pix, fill.

Their network sees the noisy latents and, in further channels after those, a mask or another picture (nine
channels for inpainting by Stable Diffusion, eight for InstructPix2Pix, four for all others). On the channels
that two such models share they are merged like any others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from mecha_exp.errors import counted
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.sources.memory import PartlyInMemory
from mecha_exp.sources.source import Source, values_of

_FIRST_LAYER = re.compile(
    r"(?!.*(encoder|decoder)\.)(.+\.)?((input_blocks\.0\.0|conv_in|img_in|x_embedder)\.weight|"
    r"diffusion_modelinput_blocks00weight)"
)
"""The first layer of UNets, also of their means over training, and of Flux.

That of a VAE takes pictures, or latents of another kind.
"""


def is_of_channels(key: str, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a key is the first layer of image models that differ in their input channels alone."""
    others = {(len(shape), *shape[:1], *shape[2:]) for shape in shapes}
    return bool(_FIRST_LAYER.fullmatch(key)) and len(others) == 1 and len(shapes[0]) > 1


def with_first_channels(
    models: Sequence[ModelNode], sources: Mapping[ModelNode, Source]
) -> tuple[dict[ModelNode, Source], list[str]]:
    """The inputs with the input channels of the first one.

    Channels that an input lacks are those of the first input, so that it has no difference to that there, and
    those that it has more are left out.

    Returns:
        the inputs, and a line about each that is read so.
    """
    tensors: dict[ModelNode, dict[str, torch.Tensor]] = {}
    lines: list[str] = []
    weights = [model for model in models if model.merge_space == "weight"]
    for key in dict.fromkeys(key for model in weights for key in sources[model].keys()):
        first, *others = [model for model in weights if key in sources[model]]
        channels = sources[first].info(key).shape[1:2]
        for model in others:
            source = sources[model]
            if source.info(key).shape[1:2] == channels or not _are_alike(key, source, sources[first]):
                continue
            tensors.setdefault(model, {})[key] = _with_channels(key, source, sources[first])
            own = source.info(key).shape[1]
            what = "the others are taken from there" if own < channels[0] else "the others are left out"
            lines.append(
                f"{source.name}: {key} has {counted(own, 'input channel')}, and {channels[0]} in "
                f"{sources[first].name}: {what}"
            )
    views = {model: PartlyInMemory(sources[model], own) for model, own in tensors.items()}
    return {**sources, **views}, lines


def _are_alike(key: str, *sources: Source) -> bool:
    return is_of_channels(key, [source.info(key).shape for source in sources])


def _with_channels(key: str, source: Source, first: Source) -> torch.Tensor:
    """The tensor of a key with the channels of another model, in a dtype that holds both exactly."""
    own, whole = values_of(source, key), values_of(first, key)
    if own.dtype != whole.dtype:
        wide = torch.float64 if torch.float64 in (own.dtype, whole.dtype) else torch.float32
        own, whole = own.to(wide), whole.to(wide)
    return torch.cat([own[:, : whole.shape[1]], whole[:, own.shape[1] :]], dim=1)
