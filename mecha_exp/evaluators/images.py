"""The evaluator of diffusion models: pictures of each point for fixed prompts and seeds, and their scores."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import ConfigError, EvaluationError, brief
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.measurement import Measurement
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import Options, Shapes, evaluator
from mecha_exp.evaluators.common import ModelFolder, calm, chosen_device, model_folder, one_line
from mecha_exp.evaluators.common.devices import check_room
from mecha_exp.evaluators.common.functions import function_file, user_function
from mecha_exp.evaluators.vision.heads import listed
from mecha_exp.evaluators.vision.pipelines import (
    check_components,
    networks_of,
    pipeline,
    scheduler_class,
    weight_files,
)

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["images"]

Scorer = Callable[[Sequence["Image"], Sequence[str]], Sequence[float]]
_DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Shot:
    """One picture to make.

    Attributes:
        name: of its file, without suffix.
        prompt: the words.
        seed: of its noise.
        scheduler: the name of a class of diffusers; None is the pipeline's own.
    """

    name: str
    prompt: str
    seed: int
    scheduler: str | None


def shots_of(options: Options) -> list[Shot]:
    """The pictures to make: each prompt with each seed and each scheduler.

    Raises:
        ConfigError: there is no prompt, or a seed is not a whole number.
    """
    prompts = listed(options["prompts"], "", "prompts")
    seeds, schedulers = options["seeds"], options["schedulers"] or [None]
    if not prompts or isinstance(prompts, dict):
        raise ConfigError(
            "evaluator.prompts: name a file with a prompt on each line, as in evaluator.prompts=prompts.txt, "
            "or list them."
        )
    if not isinstance(seeds, list | tuple) or not seeds or not all(type(seed) is int for seed in seeds):
        raise ConfigError(f"evaluator.seeds={brief(seeds)}: expected a list of whole numbers, as in [0,1].")
    return [
        Shot(_name(place, prompt, seed, scheduler), prompt, seed, scheduler)
        for place, prompt in enumerate(prompts)
        for seed in seeds
        for scheduler in schedulers
    ]


def _name(place: int, prompt: str, seed: int, scheduler: str | None) -> str:
    words = re.sub(r"[^\w ,-]", "", prompt)[:48].strip()
    ending = f" {scheduler.removesuffix('Scheduler')}" if scheduler else ""
    return f"{place + 1:02} {words} seed {seed}{ending}"


def _check(shapes: Shapes, context: Context, options: Options) -> None:
    """Check prompts, pipeline, device and scorers before anything is merged."""
    shots = shots_of(options)
    check_components(model_folder(context, options["model"]), shapes, options["component"])
    if options["dtype"] not in _DTYPES:
        raise ConfigError(f"evaluator.dtype={options['dtype']}: expected one of {', '.join(_DTYPES)}.")
    check_room(options["device"], shapes, options["dtype"], context)
    if not options["distances"] and options["clip"] is None and options["scorer"] is None:
        raise ConfigError(
            "evaluator.distances=false leaves no score: give evaluator.clip or evaluator.scorer."
        )
    if options["steps"] < 1:
        raise ConfigError(f"evaluator.steps={options['steps']}: expected at least 1.")
    for name in dict.fromkeys(shot.scheduler for shot in shots if shot.scheduler):
        scheduler_class(name)
    if options["clip"] is not None and not (Path(options["clip"]).expanduser() / "config.json").is_file():
        raise ConfigError(
            f"evaluator.clip={options['clip']}: there is no config.json of a CLIP in this folder."
        )
    if options["scorer"] is not None:
        user_function(options["scorer"], "scorer")


def _depends(context: Context, options: Options) -> dict[str, Any]:
    folder = model_folder(context, options["model"])
    rest = [n for n in networks_of(folder) if n != options["component"]] if options["component"] else []
    files = [file for name in rest for file in weight_files(folder, name)]
    if options["clip"] is not None:
        files += sorted(f for f in Path(options["clip"]).expanduser().iterdir() if f.is_file())
    if options["scorer"] is not None:
        files.append(function_file(options["scorer"], "scorer")[0])
    inputs = list(context.inputs.values()) if options["distances"] else []
    return {
        "prompts": [shot.prompt for shot in shots_of(options)],
        "pipeline": folder.contents,
        "files": files,
        "inputs": inputs,
    }


@evaluator(
    "images",
    metric="score",
    units={"clip_score": "100 times the cosine"},
    libraries=("diffusers", "transformers", "PIL"),
    extra="images",
    check=_check,
    depends=_depends,
)
def images(
    state_dict: Mapping[str, Tensor],
    *,
    prompts: Any = None,
    seeds: Any = (0,),
    schedulers: Any = None,
    steps: int = 20,
    guidance: float = 7.5,
    negative: str | None = None,
    width: int | None = None,
    height: int | None = None,
    clip: str | None = None,
    scorer: str | None = None,
    distances: bool = True,
    component: str | None = None,
    model: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    context: Context | None = None,
) -> Measurement:
    """Make pictures of prompts with a pipeline of diffusers, one for each seed and scheduler, and score them.

    Args:
        state_dict: the weights, under the names of a pipeline's folder (`unet.conv_in.weight`).
        prompts: a file with one on each line, or a list.
        seeds: of the noise, which is drawn on the CPU.
        schedulers: names of classes of diffusers; None is the pipeline's own.
        steps: of each scheduler.
        guidance: the scale of classifier-free guidance.
        negative: a negative prompt.
        width, height: in pixels; None is the pipeline's own.
        clip: the folder of a CLIP, which gives `clip_score`.
        scorer: `FILE.py:function`, a function of pictures (Pillow) and prompts to a number each.
        distances: whether the inputs' pictures are made, too, and `distance/INPUT` is measured: the root mean
            square of the differences of pixels, 0 to 255.
        component: the component whose weights the state dict holds, such as `unet`; None is all.
        model: the folder of another pipeline than the first input's.
        device, dtype: of the networks; `auto` is the dtype of the weights.
        context: the inputs.

    Returns:
        the pictures as files, and a score for each: by the scorer, else CLIP's, else minus the mean
        distance from the inputs' pictures. Pictures of one prompt are a cluster.

    Raises:
        ConfigError: pipeline, weights, prompts and scorers do not fit together.
        EvaluationError: a picture has pixels that are not numbers.
    """
    context = context or Context()
    options = {**locals()}
    shots, folder = shots_of(options), model_folder(context, options["model"])
    arrays = _drawn(state_dict, shots, folder, options, context)
    metrics: dict[str, float] = {}
    scores: list[NDArray[np.float64]] = []
    pictures, words = [_picture(array) for array in arrays], [shot.prompt for shot in shots]
    if scorer is not None:
        scores.append(_scored(user_function(scorer, "scorer"), pictures, words))
    if clip is not None:
        scores.append(clip_scores(Path(clip).expanduser(), pictures, words, device))
        metrics["clip_score"] = float(scores[-1].mean())
    if distances:
        rows = []
        for name, path in context.inputs.items():
            theirs = _of_input(path, path.stat().st_mtime_ns, _Frozen(options, shots, folder))
            apart = np.array([_distance(a, b) for a, b in zip(arrays, theirs, strict=True)])
            rows.append(apart)
            metrics[f"distance/{name}"] = float(apart.mean())
        scores.append(-np.mean(rows, axis=0))
    names = [shot.name for shot in shots]
    outcomes = Outcomes({"pictures": scores[0]}, examples={"pictures": names}, clusters={"pictures": words})
    files = {f"{name}.png": _png(picture) for name, picture in zip(names, pictures, strict=True)}
    return Measurement(metrics, outcomes, files)


def _drawn(
    state_dict: Mapping[str, Tensor],
    shots: Sequence[Shot],
    folder: ModelFolder,
    options: Options,
    context: Context,
) -> list[NDArray[np.uint8]]:
    """The pictures [height, width, 3] of a model."""
    sizes = {"width": options["width"], "height": options["height"], "negative_prompt": options["negative"]}
    given = {name: value for name, value in sizes.items() if value is not None}
    arrays = []
    with pipeline(folder, state_dict, options["component"], options["device"], options["dtype"]) as made:
        own = made.scheduler
        try:
            for shot in shots:
                made.scheduler = scheduler_class(shot.scheduler or type(own).__name__).from_config(own.config)
                noise = torch.Generator().manual_seed(shot.seed)
                numbers = {"num_inference_steps": options["steps"], "guidance_scale": options["guidance"]}
                picture = made(
                    prompt=shot.prompt, generator=noise, output_type="np", **numbers, **given
                ).images[0]
                if not np.isfinite(picture).all():
                    raise EvaluationError(
                        f"the picture '{shot.name}' has pixels that are not numbers. Merge with smaller "
                        "strengths, or, where the weights are float16, measure with evaluator.dtype=float32."
                    )
                arrays.append((picture * 255).round().astype(np.uint8))
                context.show("pictures", len(arrays), len(shots))
        finally:
            made.scheduler = own
    return arrays


class _Frozen:
    """Settings as a key of a cache: equal where they draw equal pictures."""

    def __init__(self, options: Options, shots: Sequence[Shot], folder: ModelFolder) -> None:
        self.options, self.shots, self.folder = options, shots, folder
        names = ("steps", "guidance", "negative", "width", "height", "component", "device", "dtype")
        self._key = (tuple(options[name] for name in names), tuple(shots), folder.path)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and other._key == self._key


@lru_cache(maxsize=16)
def _of_input(path: Path, changed: int, frozen: _Frozen) -> list[NDArray[np.uint8]]:
    """The pictures of an input, made once."""
    with open_stored(path) as model:
        weights = {key: model.read(key) for key in model.keys()}
    return _drawn(weights, frozen.shots, frozen.folder, frozen.options, Context())


def _distance(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    return float(np.sqrt(np.square(a.astype(np.float64) - b.astype(np.float64)).mean()))


def clip_scores(
    folder: Path, pictures: Sequence[Image], prompts: Sequence[str], device: str
) -> NDArray[np.float64]:
    """100 times the cosine between each picture and its prompt by a CLIP, at least 0.

    Source: Hessel et al. 2021, arXiv:2104.08718.

    Raises:
        ConfigError: transformers cannot load the CLIP.
    """
    network, processor, tokenizer = _clip(folder, (folder / "config.json").stat().st_mtime_ns)
    network = network.to(chosen_device(device))
    with torch.inference_mode():
        pixels = processor(images=list(pictures), return_tensors="pt").to(network.device)
        tokens = tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt").to(
            network.device
        )
        given = network(**tokens, **pixels)
        cosines = F.cosine_similarity(given.image_embeds.double(), given.text_embeds.double(), dim=-1)
    return (100 * cosines).clamp(min=0).cpu().numpy()


@lru_cache(maxsize=1)
def _clip(folder: Path, changed: int) -> tuple[Any, Any, Any]:
    with calm(offline=True):
        import transformers

        made: Any = transformers
        with one_line(f"evaluator.clip={folder}: transformers cannot load it"):
            network = made.CLIPModel.from_pretrained(folder, local_files_only=True).eval()
            processor = made.AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
            return network, processor, made.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _scored(scorer: Scorer, pictures: Sequence[Image], prompts: Sequence[str]) -> NDArray[np.float64]:
    scores = np.asarray(scorer(pictures, prompts), dtype=np.float64)
    if scores.shape != (len(pictures),):
        raise EvaluationError(
            f"the scorer gave {scores.size} numbers for {len(pictures)} pictures: expected one for each."
        )
    return scores


def _picture(array: NDArray[np.uint8]) -> Image:
    from PIL import Image

    return Image.fromarray(array)


def _png(picture: Image) -> bytes:
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()
