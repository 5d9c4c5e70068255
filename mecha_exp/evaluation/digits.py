"""The evaluator of the bundled demo: its accuracy on handwritten test digits."""

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources

import torch
from safetensors.torch import load
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.errors import ConfigError, some
from mecha_exp.evaluation.registry import evaluator

# mypy does not see the packages that live beside mecha_exp in the checkout.
from mecha_exp.examples.digits.network import (  # type: ignore[import-not-found, unused-ignore]
    TASKS,
    DigitsNetwork,
    network_shapes,
)

__all__ = ["digits", "fits"]


def fits(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the keys and shapes are those of the demo's network, which `digits` measures."""
    return not _misfits(shapes)


_FRACTION = "fraction of the images"
_UNITS = {"accuracy": _FRACTION, **{f"accuracy_{task}": _FRACTION for task in TASKS}, "loss": "nats"}


@evaluator("digits", metric="accuracy", fits=fits, units=_UNITS)
def digits(state_dict: Mapping[str, Tensor]) -> dict[str, float]:
    """Measure a state dict of the demo's network on the demo's test images.

    Computes in float64 on the CPU, so that the numbers do not depend on the machine or its thread count. An
    image with a logit that is not finite counts as classified wrongly; the loss is then NaN or infinite.

    Args:
        state_dict: the weights, of any floating dtype and device.

    Returns:
        `accuracy` over all digits and `accuracy_0_3`, `accuracy_4_6`, `accuracy_7_9` over the digits of one
        expert, as fractions from 0 to 1; `loss`, the mean cross entropy over all digits, in nats.

    Raises:
        ConfigError: the keys or shapes are not those of the demo's network.
    """
    misfits = _misfits({key: tuple(tensor.shape) for key, tensor in state_dict.items()})
    if misfits:
        raise ConfigError(
            "evaluator=digits measures the network of the bundled demo (examples/digits) only, and this "
            f"model differs: {some(misfits, limit=3)}. Use evaluator=none, or an evaluator of your own."
        )
    images, labels = _test_images()
    weights = {key: tensor.detach().to("cpu", torch.float64) for key, tensor in state_dict.items()}
    with torch.device("meta"):
        network = DigitsNetwork()
    network.load_state_dict(weights, assign=True)
    with torch.no_grad():
        logits: Tensor = network(images)
    right = (logits.argmax(dim=1) == labels) & logits.isfinite().all(dim=1)

    metrics = {"accuracy": _mean(right)}
    for task, classes in TASKS.items():
        metrics[f"accuracy_{task}"] = _mean(right[torch.isin(labels, torch.tensor(classes))])
    metrics["loss"] = F.cross_entropy(logits, labels).item()
    return metrics


def _misfits(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The differences between `shapes` and the demo's network, a phrase for each key."""
    expected = _shapes()
    missing = [f"{key} is missing" for key in expected if key not in shapes]
    unknown = [f"{key} is unknown" for key in shapes if key not in expected]
    other = [
        f"{key} has shape {tuple(shapes[key])} instead of {shape}"
        for key, shape in expected.items()
        if key in shapes and tuple(shapes[key]) != shape
    ]
    return other + missing + unknown


def _mean(values: Tensor) -> float:
    return values.double().mean().item()


@lru_cache(maxsize=1)
def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = network_shapes()
    return shapes


@lru_cache(maxsize=1)
def _test_images() -> tuple[Tensor, Tensor]:
    data = load(resources.files("mecha_exp.examples.digits").joinpath("data.safetensors").read_bytes())
    return data["images"], data["labels"].long()
