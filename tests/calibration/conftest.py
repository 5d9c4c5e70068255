"""A small network of a user's own, a file that makes a subject of it, and two models with examples for it."""

from pathlib import Path

import pytest
import torch
from matched_networks import CONFIGS, save_trained
from safetensors.torch import load_file, save_file
from torch import Tensor

from mecha_exp.architectures import from_yaml, register
from mecha_exp.architectures.library import registry

MODULE = '''
import torch
from torch import nn
from mecha_exp.calibration import Subject


class Net(nn.Module):
    """A convolution, a linear layer and a bias that nothing uses."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, stride=2)
        self.head = nn.Linear(16, 3)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, images):
        return self.head(torch.tanh(self.conv(images)).flatten(1))


def subject(state_dict, data):
    net = Net().eval()
    net.load_state_dict({key: state_dict[key] for key in net.state_dict()})
    content = torch.load(data, weights_only=True)
    images, labels = content["images"], content["labels"]
    return Subject(net, range(len(images)), lambda i: net(images[i:i + 1]), lambda i: labels[i:i + 1])


def without_labels(state_dict, data):
    from dataclasses import replace
    return replace(subject(state_dict, data), labels=None)


def in_training(state_dict, data):
    made = subject(state_dict, data)
    made.module.train()
    return made


def of_another_model(state_dict, data):
    made = subject(state_dict, data)
    torch.nn.init.ones_(made.module.head.weight)
    return made


def under_the_wrong_key(state_dict, data):
    from dataclasses import replace
    return replace(subject(state_dict, data), keys={"unused": "head.bias"})


def with_wrong_labels(state_dict, data):
    from dataclasses import replace
    return replace(subject(state_dict, data), labels=lambda i: torch.tensor([7]))


def whatever_the_data(state_dict, data):
    return subject(state_dict, "a.pt")


def something(state_dict, data):
    return 3
'''

SHAPES = {
    "conv.weight": (4, 2, 3, 3),
    "conv.bias": (4,),
    "head.weight": (3, 16),
    "head.bias": (3,),
    "unused": (2,),
}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `net.py`, the models `a` and `b`, and their data; it is the current folder."""
    (tmp_path / "net.py").write_text(MODULE)
    for seed, name in enumerate("ab"):
        generator = torch.Generator().manual_seed(seed)
        weights: dict[str, Tensor] = {
            key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()
        }
        weights["steps"] = torch.tensor(5)
        save_file(weights, tmp_path / f"{name}.safetensors")
        images = torch.randn(30, 2, 4, 4, generator=generator)
        labels = torch.randint(3, (30,), generator=generator)
        torch.save({"images": images, "labels": labels}, tmp_path / f"{name}.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def units_known(registries: None) -> None:
    """The configs of the networks whose units may change places, for one test each."""
    for text in CONFIGS.split("---"):
        register(from_yaml(text))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three trained networks of digits, and activations of each."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch, registry.isolated():
        patch.chdir(folder)
        register(from_yaml(CONFIGS.split("---")[0]))
        save_trained()
    return folder


@pytest.fixture
def networks(trained: Path, units_known: None, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The weights of the trained networks, whose folder is the current one."""
    monkeypatch.chdir(trained)
    return [load_file(f"{name}.safetensors") for name in "abc"]
