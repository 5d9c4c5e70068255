"""The toy model config and its LoRA formats are known in each test."""

import pytest
from toy_lora import BASE, LORA, LYCORIS

from mecha_exp.architectures import from_yaml, register


@pytest.fixture(autouse=True)
def toy(registries: None) -> None:
    for text in (BASE, LORA, LYCORIS):
        register(from_yaml(text))
