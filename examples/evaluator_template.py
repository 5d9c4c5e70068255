"""A template for an evaluator of your own: copy it, and score with any model code.

    python -m mecha_exp plugins=[examples/evaluator_template.py] evaluator.name=margin \
        evaluator.images=200 recipe=ties alpha=0.3,0.5,0.7 -m

The network here is the bundled demo's. Put yours in its place: a transformers or diffusers model, a module of
your own; what matters is that it takes a state dict and that the function returns numbers.
"""

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources

import torch
from safetensors.torch import load
from torch import Tensor

from mecha_exp import evaluator
from mecha_exp.examples.digits.network import DigitsNetwork


@evaluator(
    "margin",
    metric="margin",
    direction="maximize",
    version=1,
    units={"margin": "probability"},
    fidelities=("images",),
)
def margin(
    state_dict: Mapping[str, Tensor], *, images: int = 100, temperature: float = 1.0
) -> dict[str, float]:
    """Measure how surely the network decides: the probability of its first choice minus that of its second.

    Args:
        state_dict: the merged model, key to tensor, in the dtype in which it is (or would be) stored.
        images: how many test images it is asked about; `evaluator.images=200` sets it.
        temperature: the logits are divided by it, above 0.

    Returns:
        `margin`, the mean over the images, 0 to 1, which sorts the table; `worst`, the smallest.
    """
    pictures = _pictures()[:images]
    network = DigitsNetwork().eval()
    network.load_state_dict({key: tensor.float() for key, tensor in state_dict.items()})
    with torch.no_grad():
        chances = (network(pictures.float()) / temperature).softmax(dim=1)
    first, second = chances.topk(2, dim=1).values.T
    return {"margin": (first - second).mean().item(), "worst": (first - second).min().item()}


@lru_cache(maxsize=1)
def _pictures() -> Tensor:
    """The test images, read once."""
    data = resources.files("mecha_exp.examples.digits").joinpath("data.safetensors").read_bytes()
    return load(data)["images"]
