"""The built-in merge methods, one file a family; importing this package registers them all.

They use the public API only, so each file is also an example of how to write a method of your own.
"""

from mecha_exp.methods import (
    adapters,
    centres,
    difference,
    dropout,
    frequency,
    limiting,
    linear,
    outliers,
    plumbing,
    reductions,
    slicing,
    spectral,
    spherical,
    subspaces,
    symmetries,
    tasks,
    ties,
)

__all__ = [
    "adapters",
    "centres",
    "difference",
    "dropout",
    "frequency",
    "limiting",
    "linear",
    "outliers",
    "plumbing",
    "reductions",
    "slicing",
    "spectral",
    "spherical",
    "subspaces",
    "symmetries",
    "tasks",
    "ties",
]
