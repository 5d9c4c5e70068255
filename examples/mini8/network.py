"""The networks of mini8: a small vision transformer that is merged, and linear heads that are not."""

from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PORTION = 128
"""Images that go through the network at once where nothing is trained."""
SIDE, PATCH, WIDTH, HEADS, LAYERS, HIDDEN = 8, 2, 64, 4, 4, 128


class Layer(nn.Module):
    """A transformer layer: attention, then an MLP, each behind a layer norm and beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `(n, tokens, WIDTH)` to tokens of the same shape."""
        n, count, _ = tokens.shape
        qkv = self.qkv(self.norm1(tokens)).view(n, count, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(n, count, WIDTH)
        tokens = tokens + self.out(mixed)
        updated: Tensor = tokens + self.down(F.gelu(self.up(self.norm2(tokens))))
        return updated


class Encoder(nn.Module):
    """A vision transformer of 8x8 grey images: patches of 2x2, 4 layers of width 64, the mean token.

    Its state dict has 4-D, 3-D, 2-D and 1-D tensors, so methods of matrices differ from elementwise ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `(n, 8, 8)` with values from 0 to 1 to features `(n, WIDTH)`."""
        tokens = self.patches(images.unsqueeze(1) * 2 - 1).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        features: Tensor = self.norm(tokens.mean(1))
        return features


def encoder(state_dict: Mapping[str, Tensor]) -> Encoder:
    """An encoder with these weights, as float32, without initialising others first."""
    network = deepcopy(_skeleton())
    weights = {key: tensor.detach().to("cpu", torch.float32) for key, tensor in state_dict.items()}
    network.load_state_dict(weights, assign=True)
    return network


def features(state_dict: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Compute features `(n, WIDTH)` of images `(n, 8, 8)` with these weights, as float32 without gradients.

    Images go through the network in portions whose activations fit a processor's cache.
    """
    network = encoder(state_dict)
    with torch.inference_mode():
        return torch.cat([network(portion) for portion in images.split(PORTION)])


def differentiable_features(state_dict: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Compute features `(n, WIDTH)` of images `(n, 8, 8)`, with gradients with respect to the weights."""
    computed: Tensor = torch.func.functional_call(_skeleton(), dict(state_dict), (images,))
    return computed


@lru_cache(maxsize=1)
def encoder_shapes() -> dict[str, tuple[int, ...]]:
    """The shape of every entry of the encoder's state dict."""
    return {key: tuple(tensor.shape) for key, tensor in _skeleton().state_dict().items()}


@lru_cache(maxsize=1)
def _skeleton() -> Encoder:
    """An encoder without weights."""
    with torch.device("meta"):
        return Encoder()
