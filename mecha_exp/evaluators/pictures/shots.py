"""The pictures that are to be made: prompts, seeds and schedulers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.declaration import Options
from mecha_exp.evaluators.vision.heads import listed


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


def shots_of(options: Options) -> tuple[Shot, ...]:
    """The pictures to make: each prompt with each seed and each scheduler.

    Raises:
        ConfigError: there is no prompt, or no seed.
    """
    prompts = listed(options["prompts"], "", "prompts")
    seeds, schedulers = options["seeds"], options["schedulers"] or [None]
    if not prompts or isinstance(prompts, dict):
        raise ConfigError(
            "evaluator.prompts: name a file with a prompt on each line, as in evaluator.prompts=prompts.txt, "
            "or list them."
        )
    if not seeds:
        raise ConfigError("evaluator.seeds: give a whole number at least, as in [0].")
    return tuple(
        Shot(_name(place, prompt, seed, scheduler), prompt, seed, scheduler)
        for place, prompt in enumerate(prompts)
        for seed in seeds
        for scheduler in schedulers
    )


def _name(place: int, prompt: str, seed: int, scheduler: str | None) -> str:
    words = re.sub(r"[^\w ,-]", "", prompt)[:48].strip()
    ending = f" {scheduler.removesuffix('Scheduler')}" if scheduler else ""
    return f"{place + 1:02} {words} seed {seed}{ending}"
