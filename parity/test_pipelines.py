"""Single files become the parts of a pipeline that diffusers itself makes of them, number by number.

`make parity` writes tests/golden/pipelines.json anew with diffusers.
"""

import json
from pathlib import Path

import pytest
import torch

from mecha_exp.architectures import views
from mecha_exp.graph.nodes import InMemory
from mecha_exp.sources.format_view import ConvertedSource
from mecha_exp.sources.memory import MemorySource
from parity.pipelines import FORMATS, digest, small_model

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "tests" / "golden" / "pipelines.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("single", FORMATS)
def test_a_single_file_becomes_the_parts_that_diffusers_makes_of_it(single):
    source = ConvertedSource(MemorySource(InMemory(small_model(single))), views(single, FORMATS[single][0]))

    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key in source.keys():
        part, _, name = key.partition(".")
        tensor = parts.setdefault(part, {})[name] = torch.empty(source.info(key).shape)
        source.read_into(key, 0, tensor.view(-1))

    assert {name: digest(part) for name, part in parts.items()} == GOLDEN[single]
