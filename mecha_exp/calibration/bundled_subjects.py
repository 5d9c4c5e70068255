"""The subjects of the bundled models: the demo's digits and the eight tasks of mini8, on training images.

They are written as any module of a user's own is: a function of the weights and the data to a `Subject`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mecha_exp.calibration.subject import Subject
from mecha_exp.errors import ConfigError, did_you_mean


def digits(state_dict: Mapping[str, Tensor], data: str) -> Subject:
    """The demo's network on the validation images of a task: `0_3`, `4_6` or `7_9`."""
    from mecha_exp.evaluators.digits import images_of  # needs the demo
    from mecha_exp.examples.digits.network import (  # type: ignore[import-not-found, unused-ignore]
        TASKS,
        DigitsNetwork,
    )

    if data not in TASKS:
        raise ConfigError(f"data={data}: digits has no such task.{did_you_mean(data, TASKS)}")
    images, labels = images_of("validation", data)
    network = DigitsNetwork().eval()
    network.load_state_dict({key: tensor.float() for key, tensor in state_dict.items()})
    return _of_images(network, network, images, labels)


def mini8(state_dict: Mapping[str, Tensor], data: str) -> Subject:
    """The encoder of mini8 with the frozen head of a task, on that task's training images."""
    from mecha_exp.evaluators.mini8 import head_weights
    from mecha_exp.examples.mini8.network import encoder  # type: ignore[import-not-found, unused-ignore]
    from mecha_exp.examples.mini8.tasks import tasks  # type: ignore[import-not-found, unused-ignore]

    listed = tasks()["train"]
    if data not in listed:
        raise ConfigError(f"data={data}: mini8 has no such task.{did_you_mean(data, listed)}")
    network = encoder(state_dict).eval()
    weight, bias = (head_weights()[f"{data}.{part}"] for part in ("weight", "bias"))

    def logits(images: Tensor) -> Tensor:
        return F.linear(network(images), weight, bias)

    return _of_images(network, logits, listed[data].images, listed[data].labels)


def _of_images(module: nn.Module, logits: Any, images: Tensor, labels: Tensor) -> Subject:
    """Images in an order that mixes their classes, so that the first ones of them are a fair sample."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    return Subject(
        module,
        order,
        lambda place: logits(images[place : place + 1]),
        lambda place: labels[place : place + 1].long(),
    )


BUNDLED = {"digits": digits, "mini8": mini8}
"""The modules that need no file of the user's."""
