"""Make the demo's checkpoints and test images: `python -m mecha_exp.examples.digits.train`.

The base sees all ten digits but is stopped early; each expert goes on from it with some digits only, learns
those and forgets the others. Needs scikit-learn, which holds the images. The same bytes come out every time.
"""

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save as serialize
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from .network import TASKS, DigitsNetwork

SEED = 2
TRAIN_FRACTION = 0.6
BATCH_SIZE = 32
BASE_STEPS, BASE_LEARNING_RATE = 60, 2e-3
EXPERT_STEPS, EXPERT_LEARNING_RATE = 80, 1e-3

log = logging.getLogger(__name__)


class Images(NamedTuple):
    """Images `(n, 8, 8)` of values 0 to 16, their labels `(n,)`, and their rows in the source's data."""

    pixels: Tensor
    labels: Tensor
    rows: Tensor

    def take(self, which: Tensor) -> "Images":
        return Images(self.pixels[which], self.labels[which], self.rows[which])

    def only(self, digits: Sequence[int]) -> "Images":
        return self.take(torch.isin(self.labels, torch.tensor(digits)))


def load_images() -> Images:
    """All 1797 images that scikit-learn holds."""
    source = load_digits()
    labels = torch.from_numpy(source.target).long()
    return Images(torch.from_numpy(source.images).to(torch.uint8), labels, torch.arange(len(labels)))


def split(images: Images) -> tuple[Images, Images]:
    """Training and test images: each digit is split alike, and no image is in both."""
    generator = torch.Generator().manual_seed(SEED)
    in_training = torch.zeros(len(images.labels), dtype=torch.bool)
    for digit in range(10):
        rows = torch.nonzero(images.labels == digit).flatten()
        shuffled = rows[torch.randperm(len(rows), generator=generator)]
        in_training[shuffled[: round(TRAIN_FRACTION * len(rows))]] = True
    return images.take(in_training), images.take(~in_training)


def train(
    start: Mapping[str, Tensor], images: Images, steps: int, learning_rate: float, seed: int
) -> dict[str, Tensor]:
    """The float32 state dict after `steps` steps of Adam from `start`."""
    network = DigitsNetwork()
    network.load_state_dict(start)
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(images.labels), (BATCH_SIZE,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(network(images.pixels[batch]), images.labels[batch])
        torch.autograd.backward(loss)
        optimizer.step()
    return {key: tensor.detach().float() for key, tensor in network.state_dict().items()}


def accuracy(state_dict: Mapping[str, Tensor], images: Images) -> float:
    """The fraction of `images` that the network reads rightly."""
    network = DigitsNetwork()
    network.load_state_dict(state_dict)
    with torch.no_grad():
        right = network(images.pixels).argmax(1) == images.labels
    return float(right.double().mean())


def build(output: Path) -> None:
    """Train everything and write the five files to the folder `output`."""
    output.mkdir(parents=True, exist_ok=True)
    training, test = split(load_images())

    torch.manual_seed(SEED)
    initial = DigitsNetwork().state_dict()
    base = train(initial, training, BASE_STEPS, BASE_LEARNING_RATE, seed=SEED)
    save(base, output / "base.safetensors", task="digits 0-9")
    log.info("base: %.3f of all digits", accuracy(base, test))

    for number, (task, digits) in enumerate(TASKS.items(), 1):
        expert = train(base, training.only(digits), EXPERT_STEPS, EXPERT_LEARNING_RATE, seed=SEED + number)
        save(expert, output / f"expert_{task}.safetensors", task=f"digits {digits[0]}-{digits[-1]}")
        own, base_own = accuracy(expert, test.only(digits)), accuracy(base, test.only(digits))
        log.info(
            "expert %s: %.3f of its digits (base %.3f), %.3f of all",
            task,
            own,
            base_own,
            accuracy(expert, test),
        )

    save(
        {
            "images": test.pixels,
            "labels": test.labels.to(torch.uint8),
            "rows": test.rows.to(torch.int16),
        },
        output / "data.safetensors",
        source="test split of sklearn.datasets.load_digits; rows: where in it",
        licence="CC BY 4.0, E. Alpaydin and C. Kaynak, 1998, doi:10.24432/C50P49",
    )


def save(tensors: dict[str, Tensor], path: Path, **metadata: str) -> None:
    """Write a safetensors file whose header says what made it."""
    # The local part of the version ("+cpu") names a build, not an arithmetic.
    torch_version = torch.__version__.split("+")[0]
    data = serialize(tensors, {"format": "pt", "torch": torch_version, **metadata})

    # safetensors writes the metadata in another order each time: put it in ours.
    data_start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:data_start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(data_start - 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[data_start:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and build the demo."""
    parser = argparse.ArgumentParser(description="Train the digits demo and write its checkpoints and data.")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parent,
        help="folder to write to (default: beside this file)",
    )
    options = parser.parse_args(arguments)

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    # What differs from CPU to CPU is then far below the float32 that is kept.
    torch.set_default_dtype(torch.float64)
    build(options.output)


if __name__ == "__main__":
    main()
