"""The demo's network: a small convolutional classifier of 8x8 handwritten digits."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TASKS: dict[str, tuple[int, ...]] = {"0_3": (0, 1, 2, 3), "4_6": (4, 5, 6), "7_9": (7, 8, 9)}
"""The classes that each expert was fine-tuned on, by the name in its file: `expert_0_3.safetensors`."""


class DigitsNetwork(nn.Module):
    """Logits of the ten digits, from grey images.

    No batch norm: every entry of the state dict is a trained weight, so all of it can be merged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(64 * 2 * 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `(n, 8, 8)` of any dtype, values 0 (paper) to 16 (ink), to logits `(n, 10)`."""
        x = images.to(self.conv1.weight.dtype).unsqueeze(1) / 16
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits


def network_shapes() -> dict[str, tuple[int, ...]]:
    """The shape of every entry of the network's state dict."""
    with torch.device("meta"):
        return {key: tuple(tensor.shape) for key, tensor in DigitsNetwork().state_dict().items()}
