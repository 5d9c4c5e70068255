"""Notices about a merge that is odd and not wrong, and the report of a merge."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from mecha_exp.engine.scaled_fp8 import QuantisationError
from mecha_exp.graph.nodes import ModelNode


class About(enum.Enum):
    """The subject of a notice."""

    MERGE = "merge"
    """Anything else that concerns the merge as a whole."""
    EXTRA_KEYS = "extra keys"
    """Keys of an input that its model config does not know."""
    NONFINITE_OUTPUT = "non-finite output"
    """Values of one output that are NaN or infinite."""


class Notice(str):
    """A warning in words; its subject, `about`, lets a caller leave some kinds out."""

    __slots__ = ("about",)
    about: About

    def __new__(cls, text: str, about: About = About.MERGE) -> Notice:
        notice = super().__new__(cls, text)
        notice.about = about
        return notice


@dataclass(frozen=True)
class MergeReport:
    """The report of one merge.

    Attributes:
        bytes_read, bytes_written: of all inputs and outputs of each pass, without the resumed keys.
        seconds: wall time from the plan to the last rename.
        warnings: what was odd and not wrong.
        nonfinite_values: of each job how many values of its output are NaN or infinite, or too large for a
            dtype without infinity.
        moments: of each job and input the sums behind its statistics, by key (see `statistics.summarise`).
        quantisation: of each job how far the stored numbers are from the merged ones; None where it does not
            quantise.
        keys: how many the passes are about.
        resumed_keys: how many of them an interrupted run had finished, so that they were not made again.
        choices: of each job how many keys each recipe of a choice by key has; see `recipe.keys`.
    """

    bytes_read: int
    bytes_written: int
    seconds: float
    warnings: tuple[Notice, ...]
    nonfinite_values: tuple[int, ...]
    moments: tuple[dict[ModelNode, dict[str, torch.Tensor]], ...]
    keys: int = 0
    resumed_keys: int = 0
    quantisation: tuple[QuantisationError | None, ...] = ()
    choices: tuple[dict[str, int], ...] = ()

    @property
    def bytes_per_second(self) -> float:
        """Bytes read and written per second of wall time."""
        return (self.bytes_read + self.bytes_written) / max(self.seconds, 1e-9)
