"""Statistics of a model on data, as `calibrate` writes them: a file that merges read beside the model.

The keys are `KIND/KEY`, KEY being the key of the model: `fisher/layer.weight` has the shape of the weight,
`gram/layer.weight` is a matrix of its inputs, `activations/layer.weight` has rows of them. The header says
which model and which data they are of.
"""

from mecha_exp.sources.statistics.header import (
    ACTIVATIONS,
    ALPHA,
    BASE_FINGERPRINT,
    EXPERT_FINGERPRINT,
    FEW_EXAMPLES,
    FISHER,
    GRADIENT,
    GRAM,
    INPUTS_FIRST,
    MASK,
    MEAN,
    MERGED_FINGERPRINTS,
    METADATA,
    NORM,
    OF_ENTRIES,
    SCALE,
    StatisticsHeader,
    fingerprint,
)
from mecha_exp.sources.statistics.view import StatisticsSource

__all__ = [
    "ACTIVATIONS",
    "ALPHA",
    "BASE_FINGERPRINT",
    "EXPERT_FINGERPRINT",
    "FEW_EXAMPLES",
    "FISHER",
    "GRADIENT",
    "GRAM",
    "INPUTS_FIRST",
    "MASK",
    "MEAN",
    "MERGED_FINGERPRINTS",
    "METADATA",
    "NORM",
    "OF_ENTRIES",
    "SCALE",
    "StatisticsHeader",
    "StatisticsSource",
    "fingerprint",
]
