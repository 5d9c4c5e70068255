"""The evaluator of the bundled demo: its accuracy on handwritten digits."""

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.errors import ConfigError, some
from mecha_exp.evaluation.learning.registry import logits_of
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import evaluator

# mypy does not see the packages that live beside mecha_exp in the checkout.
from mecha_exp.examples.digits.network import (  # type: ignore[import-not-found, unused-ignore]
    TASKS,
    DigitsNetwork,
    network_shapes,
)
from mecha_exp.system.cores import one_thread

__all__ = ["digits", "digits_logits", "fits"]


def fits(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the keys and shapes are those of the demo's network, which `digits` measures."""
    return not _misfits(shapes)


_FRACTION = "fraction of the images"
_UNITS = {"accuracy": _FRACTION, **{f"accuracy/{task}": _FRACTION for task in TASKS}, "loss": "nats"}
_DEMO = resources.files("mecha_exp.examples.digits")
_DATA, _NETWORK = (Path(str(_DEMO.joinpath(name))) for name in ("data.safetensors", "network.py"))


@evaluator(
    "digits",
    metric="accuracy",
    fits=fits,
    units=_UNITS,
    splits=("validation", "test"),
    data=(_DATA, _NETWORK),
    takes_examples=True,
)
def digits(
    state_dict: Mapping[str, Tensor],
    *,
    split: str = "validation",
    examples: Mapping[str, list[int]] | None = None,
) -> Outcomes:
    """Measure a state dict of the demo's network on images that no network of the demo was trained on.

    The images of each digit belong to `validation` (362 in all) and `test` (357) in turns, in the order of
    scikit-learn's data. Computes in float32 on one thread of the CPU, so that the numbers do not depend on
    the thread count. An image with a logit that is not finite counts as classified wrongly; the loss is then
    NaN or infinite.

    Args:
        state_dict: the weights, of any floating dtype and device.
        split: `validation` or `test`.
        examples: the positions of the images to measure, by task; None is all.

    Returns:
        whether each image was read rightly, by the tasks of the experts (`0_3`, `4_6`, `7_9`); an image is
        named after its row in `sklearn.datasets.load_digits`. `loss` is the mean cross entropy over all
        images, in nats.

    Raises:
        ConfigError: the keys or shapes are not those of the demo's network.
    """
    misfits = _misfits({key: tuple(tensor.shape) for key, tensor in state_dict.items()})
    if misfits:
        raise ConfigError(
            "evaluator=digits measures the network of the bundled demo (examples/digits) only, and this "
            f"model differs: {some(misfits, limit=3)}. Use evaluator=none, or an evaluator of your own."
        )
    images, labels, rows = _images(split)
    if examples is not None:
        chosen = torch.cat([_of_task(labels, task)[positions] for task, positions in examples.items()])
        images, labels, rows = images[chosen], labels[chosen], rows[chosen]
    weights = {key: tensor.detach().to("cpu", torch.float32) for key, tensor in state_dict.items()}
    with torch.device("meta"):
        network = DigitsNetwork()
    network.load_state_dict(weights, assign=True)
    with torch.no_grad(), one_thread():
        logits: Tensor = network(images).double()
    right = (logits.argmax(dim=1) == labels) & logits.isfinite().all(dim=1)
    of_task = {task: _of_task(labels, task) for task in TASKS if examples is None or task in examples}
    return Outcomes(
        {task: right[chosen].numpy() for task, chosen in of_task.items()},
        examples={task: rows[chosen].numpy() for task, chosen in of_task.items()},
        metrics={"loss": F.cross_entropy(logits, labels).item()},
    )


@logits_of("digits")
def digits_logits(
    state_dict: Mapping[str, Tensor],
    *,
    split: str = "validation",
    examples: Mapping[str, list[int]] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Compute logits of the demo's images with gradients, by the tasks of the experts.

    Args:
        state_dict: the weights, float32 on the CPU.
        split: `validation` or `test`.
        examples: the positions of the images to use, by task; None is all.

    Returns:
        Logits, float32 [images, 10], and labels, int64 [images], by task.
    """
    images, labels, _ = _images(split)
    chosen = {task: _of_task(labels, task) for task in TASKS if examples is None or task in examples}
    if examples is not None:
        chosen = {task: rows[examples[task]] for task, rows in chosen.items()}
    with torch.device("meta"):
        network = DigitsNetwork()
    with one_thread():
        everything = torch.func.functional_call(
            network, dict(state_dict), (images[torch.cat(list(chosen.values()))],)
        )
    parts = everything.split([len(rows) for rows in chosen.values()])
    return {task: (part, labels[rows]) for part, (task, rows) in zip(parts, chosen.items(), strict=True)}


def _of_task(labels: Tensor, task: str) -> Tensor:
    """The places of the images of a task."""
    return torch.isin(labels, torch.tensor(TASKS[task])).nonzero().flatten()


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


@lru_cache(maxsize=1)
def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = network_shapes()
    return shapes


def images_of(split: str, task: str) -> tuple[Tensor, Tensor]:
    """The images of a split and a task, and their labels."""
    images, labels, _ = _images(split)
    places = _of_task(labels, task)
    return images[places], labels[places]


@lru_cache(maxsize=2)
def _images(split: str) -> tuple[Tensor, Tensor, Tensor]:
    """The images of a split, their labels, and their rows in the source's data."""
    data = load(_DATA.read_bytes())
    labels = data["labels"].long()
    places = torch.empty_like(labels)
    for digit in range(10):
        places[labels == digit] = torch.arange(int((labels == digit).sum()))
    chosen = places % 2 == (split == "test")
    return data["images"][chosen], labels[chosen], data["rows"][chosen]
