"""Small networks whose units may change places, three of them trained on digits, and activations of each."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import mecha_exp as m
from mecha_exp.calibration import Request, Subject, calibrate
from mecha_exp.checkpoint import open_stored
from mecha_exp.system.cores import one_thread

SOURCES = Path(__file__).parents[2] / "examples" / "mini8" / "sources.safetensors"
CONFIGS = """
identifier: perceptron-test
components:
  net:
    keys: {"{0,2}.bias": [32], 0.weight: [32, 64], 2.weight: [32, 32], 4.weight: [10, 32], 4.bias: [10]}
    symmetries:
      "":
        - {rows: "0.{weight,bias}", columns: 2.weight}
        - {rows: "2.{weight,bias}", columns: 4.weight}
---
identifier: attention-test
components:
  layer:
    keys: {qkv.weight: [24, 8], qkv.bias: [24], out.weight: [8, 8], out.bias: [8]}
    symmetries:
      "":
        - {head: 4, rows: ["qkv.{weight,bias} 1/3", "qkv.{weight,bias} 2/3"]}
        - {head: 4, rows: "qkv.{weight,bias} 3/3", columns: out.weight}
---
identifier: convolutions-test
components:
  net:
    keys: {first.weight: [6, 1, 3, 3], second.weight: [5, 6, 3, 3], last.weight: [2, 5], scale.weight: [5]}
    symmetries:
      "":
        - {rows: first.weight, columns: second.weight}
        - {rows: [second.weight, scale.weight], columns: last.weight}
"""

StateDict = dict[str, Tensor]


class Perceptron(nn.Sequential):
    """A network of two hidden layers for images of digits."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


class Attention(nn.Module):
    """One layer of attention whose queries, keys and values are made by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class Scale(nn.Module):
    """A factor for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5) + 0.5)


class Convolutions(nn.Module):
    """Two convolutions, and the mean of what they find."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, bias=False), nn.Conv2d(6, 5, 3, bias=False)
        self.scale, self.last = Scale(), nn.Linear(5, 2, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        made = F.relu(self.second(F.relu(self.first(images)))).mean((2, 3))
        logits: Tensor = self.last(made * self.scale.weight)
        return logits


def network(kind: type[nn.Module], weights: StateDict) -> nn.Module:
    made = kind().eval()
    made.load_state_dict({key: value.float() for key, value in weights.items()})
    return made


def saved(kind: type[nn.Module], name: str, seed: int) -> StateDict:
    """The weights of a network by chance, which are written to `NAME.safetensors`."""
    torch.manual_seed(seed)
    weights = {key: value.detach().clone() for key, value in kind().state_dict().items()}
    save_file(weights, f"{name}.safetensors")
    return weights


def measured(kind: type[nn.Module], name: str, examples: Tensor, **given: Any) -> StateDict:
    """The activations of `NAME.safetensors`, which are written to `NAME.stats.safetensors`."""
    output = Path(f"{name}.stats.safetensors")
    with open_stored(Path(f"{name}.safetensors")) as stored:
        net = network(kind, {key: stored.read(key) for key in stored.keys()})
        subject = Subject(net, examples, logits=lambda example: net(example[None]))
        calibrate(subject, stored, Request(("activations",), **{"data": "examples", **given}), output)
    return load_file(output)


def statistics(*names: str) -> m.Node:
    return m.statistics(*(f"{name}.stats.safetensors" for name in names), kind="activations")


def images_of_digits() -> tuple[Tensor, Tensor]:
    content = load_file(SOURCES)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    return content["digits"][order].flatten(1).float() / 16, content["labels"][order].long()


def loss(weights: StateDict) -> float:
    images, labels = images_of_digits()
    with torch.no_grad():
        return float(F.cross_entropy(network(Perceptron, weights)(images[1000:]), labels[1000:]))


def barrier(weights: StateDict, networks: list[StateDict]) -> float:
    """How much more a merge loses than the networks do on average."""
    return loss(weights) - sum(map(loss, networks)) / len(networks)


KINDS = {
    "perceptron": (Perceptron, (64,)),
    "attention": (Attention, (6, 8)),
    "convolutions": (Convolutions, (1, 6, 6)),
}
"""The networks, and the shape of one example of each."""


def save_trained() -> None:
    """Train three networks of digits, each from its own start, and measure activations of each."""
    images, labels = images_of_digits()
    for seed, name in enumerate("abc"):
        torch.manual_seed(seed)
        net = Perceptron()
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        with one_thread():
            for _ in range(100):
                chosen = torch.randint(1000, (100,))
                optimizer.zero_grad()
                F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
                optimizer.step()
        save_file(net.state_dict(), f"{name}.safetensors")
        measured(Perceptron, name, images[:300])
