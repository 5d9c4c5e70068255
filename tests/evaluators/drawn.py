"""Measures tiny pipelines of diffusers by `evaluator=images`."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from state_dicts import numbers_of

from mecha_exp import Context
from mecha_exp.evaluation import Measurement, read_scoring

PROMPTS = ["a photo of a cat", "a drawing of the dog."]
FEW = {"prompts": PROMPTS, "seeds": [0, 3], "steps": 2, "guidance": 3.0}


def context_of(folder: Path) -> Context:
    return Context("point", inputs={name: folder / name for name in "ab"})


def measured(
    folder: Path,
    state_dict: dict[str, torch.Tensor] | None = None,
    context: Context | None = None,
    **settings: object,
) -> Measurement:
    """What is measured of the merge of two pipelines, or of other weights, after all checks."""
    state_dict = numbers_of(folder / "merged") if state_dict is None else state_dict
    shapes = {key: tuple(tensor.shape) for key, tensor in state_dict.items()}
    context = context or context_of(folder)
    scoring = read_scoring({"name": "images", **FEW, **settings}, shapes, context=context)
    return scoring.measure_one(scoring.evaluations[0], state_dict, context)


def key_of(folder: Path, **settings: object) -> str:
    """The key under which what is measured of the merge is stored."""
    shapes = {key: tuple(tensor.shape) for key, tensor in numbers_of(folder / "merged").items()}
    scoring = read_scoring({"name": "images", **FEW, **settings}, shapes, context=context_of(folder))
    return scoring.evaluations[0].key


def pixels(content: bytes | Path) -> np.ndarray:
    """A picture as an array."""
    assert isinstance(content, bytes)
    return np.asarray(Image.open(io.BytesIO(content)))


def by_the_library(path: Path, scheduler: str | None = None) -> dict[tuple[str, int], np.ndarray]:
    """The pictures that diffusers itself draws by a saved pipeline, by prompt and seed."""
    import diffusers

    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(path, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    if scheduler:
        pipeline.scheduler = getattr(diffusers, scheduler).from_config(pipeline.scheduler.config)
    return {
        (prompt, seed): np.asarray(
            pipeline(
                prompt,
                num_inference_steps=2,
                guidance_scale=3.0,
                generator=torch.Generator().manual_seed(seed),
            ).images[0]
        )
        for prompt in PROMPTS
        for seed in (0, 3)
    }
