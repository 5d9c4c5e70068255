"""The rows of the engine's table: which work, on how many models, and what must be reached."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.bars import Bar
from bench.cases import measured_methods
from bench.peer_cases import BY_METHOD, MERGEKIT, SD_MECHA

NO_BAR = Bar()


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: how `--cases` calls it.
        title: of the row.
        inputs: how many models it has.
        work: what is done, a name of `cases.py`; the row's own by default.
        size: of the models; None is the size that is asked for, a number so many keys of ten elements each.
        outputs: how many models it writes.
        alone: whether peers that have the work are left out.
        workers: threads of mecha_exp; None is one for each core.
        on_disk: whether the files lie on the disk rather than in memory.
        bar: what mecha_exp must reach.
        point: the work of one point, where `work` is a sweep.
    """

    name: str
    title: str
    inputs: int
    work: str = ""
    size: str | int | None = None
    outputs: int = 1
    alone: bool = False
    workers: int | None = None
    on_disk: bool = False
    bar: Bar = NO_BAR
    point: str | None = None

    @property
    def tools(self) -> tuple[str, ...]:
        """Who does the work."""
        work = self.work or self.name
        peers = () if self.alone else (name for name, works in PEER_WORKS.items() if work in works)
        return ("mecha_exp", *peers)


PEER_WORKS: dict[str, Mapping[str, object]] = {"sd-mecha": SD_MECHA, "mergekit": MERGEKIT}
FAMILIES = {
    "centres": Case("centres", "model stock by row, 3 experts", 4, bar=Bar(of_floor=4)),
    "difference": Case("difference", "train difference of 3", 3),
    "dropout": Case("dropout", "DELLA, 3 experts", 4, bar=Bar(of_floor=8)),
    "frequency": Case("frequency", "crossover of 2", 2, bar=Bar(seconds=20)),
    "limiting": Case("limiting", "clamp by 3", 4),
    "linear": Case("linear", "task arithmetic, 3 experts", 4),
    "outliers": Case("outliers", "breadcrumbs, 3 experts", 4, bar=Bar(of_floor=4)),
    "slicing": Case("slicing", "tensor_sum of 2", 2),
    "spectral": Case("spectral", "rotate of 2", 2),
    "spherical": Case("spherical", "Karcher mean of 4", 4),
    "subspaces": Case("subspaces", "TSV-Merge, 3 experts", 4, bar=Bar(seconds=90)),
    "tasks": Case("tasks", "consensus, 3 experts", 4, bar=Bar(of_floor=4)),
    "trimming": Case("trimming", "weighted TIES, 3 experts", 4, bar=Bar(of_floor=2)),
}
"""One method of each family, by a name of `cases.py`."""
SLOW = {
    "nine_tenths": Case(
        "nine_tenths", "TIES after DARE, nine tenths dropped, 3 experts", 4, bar=Bar(of_floor=4)
    ),
    "importance": Case("importance", "Arcee fusion of 2", 2, bar=Bar(of_floor=8)),
    "by_rank": Case("by_rank", "top_k_tensor_sum of 2", 2, bar=Bar(megabytes=1200, seconds=25)),
    "smoothed": Case("smoothed", "smooth_add of 3", 3, bar=Bar(seconds=40)),
    "isotropic": Case("isotropic", "Iso-C, 3 experts", 4, bar=Bar(seconds=40)),
    "isotropic_common": Case("isotropic_common", "Iso-CTS, 3 experts", 4),
    "cosine": Case("cosine", "add_cosine_b of 2", 2, bar=Bar(of_floor=4)),
}
"""Methods that sort, filter, decompose, or go by rows."""
WHOLE_MODEL = {
    "trimming_global": Case("trimming_global", "TIES over the whole model, 3 experts", 4),
    "norms": Case("norms", "MetaGPT, 3 experts", 4),
}
"""Methods with numbers of the whole model."""
WITH_DATA = {
    "fisher": Case("fisher", "Fisher merging of 2", 2),
    "regmean": Case("regmean", "RegMean of 2, Gram matrices of linear layers", 2),
    "stitch": Case("stitch", "masks of 2 experts stitched", 3),
}
"""Methods that read statistics of the models on data."""
OF_ARGUMENTS = {
    "by_depth": Case("by_depth", "LiNeS, 3 experts", 4),
    "decayed": Case("decayed", "WSM of 4", 4),
    "masked": Case("masked", "a task of TALL masks by its mask, 3 experts", 4),
    "minimiser": Case("minimiser", "WUDI in closed form, 3 experts", 4),
    "stepped": Case("stepped", "DOGE, 100 of its 400 steps, 3 experts", 4),
}
"""Methods of the same years without data, whose arguments have no defaults or others than are measured."""
RECENT = (
    *("wise_ft", "lawa", "magmax", "emr_unified", "emr", "tall_mask", "pcb", "localize_and_stitch"),
    *("fr_merging", "twin", "star", "knots"),
)
"""More of them, with their defaults."""
SIMPLE = Bar(faster=12, of_floor=1.7, megabytes=600)
GEOMETRIC = Bar(faster=15, of_floor=3, megabytes=600)
BOUNDED = Bar(megabytes=600)
CASES = [
    Case("weighted_sum", "weighted sum of 2", 2, bar=SIMPLE),
    Case("add_difference", "add difference of 3", 3, bar=SIMPLE),
    Case("slerp", "SLERP of 2", 2, bar=GEOMETRIC),
    Case("perpendicular", "perpendicular of 2", 2, bar=GEOMETRIC),
    Case("ties", "TIES, 3 experts, k=0.2", 4, bar=Bar(faster=20, of_floor=3, megabytes=600)),
    Case("dare_ties", "DARE-TIES, 3 experts", 4, bar=Bar(faster=20, of_floor=6, megabytes=600)),
    Case("statistics", "weighted sum of 2, with statistics", 2, bar=BOUNDED),
    *(
        Case(
            f"workers_{n}",
            f"TIES, 3 experts, {n} worker{'s' * (n > 1)}",
            4,
            "ties",
            alone=True,
            workers=n,
            bar=BOUNDED,
        )
        for n in (1, 2, 4, 8)
        if n <= (os.cpu_count() or 1)
    ),
    Case(
        "n_average",
        "n_average of 10 (0.5 GB each)",
        10,
        size="half",
        bar=Bar(faster=10, of_floor=1.7, megabytes=600),
    ),
    Case("n_average_2", "n_average of 2 (0.5 GB each)", 2, "n_average", "half", alone=True, bar=BOUNDED),
    Case("n_average_4", "n_average of 4 (0.5 GB each)", 4, "n_average", "half", alone=True, bar=BOUNDED),
    Case(
        "ties_sweep",
        "TIES, 8 alphas, 0.5 GB models",
        4,
        size="half",
        outputs=8,
        bar=Bar(megabytes=800, copies=1.5),
        point="ties",
    ),
    Case("deep", "40 nodes deep, each used twice, 0.1 GB models", 2, size="small"),
    Case(
        "keys",
        "weighted sum of 2, 100,000 keys of 10 elements",
        2,
        size=100_000,
        bar=Bar(milliseconds=0.03),
    ),
    *(
        Case(
            f"keys_{work}",
            f"{title}, 20,000 keys of 10 elements",
            inputs,
            work,
            size=20_000,
            alone=True,
            bar=Bar(milliseconds=0.2),
        )
        for work, title, inputs in (
            ("slerp", "SLERP of 2", 2),
            ("ties", "TIES, 3 experts", 4),
            ("dare_ties", "DARE-TIES, 3 experts", 4),
        )
    ),
    Case(
        "sdxl",
        "weighted sum of 2, 6.9 GB each, on disk",
        2,
        "weighted_sum",
        "sdxl",
        alone=True,
        on_disk=True,
        bar=BOUNDED,
    ),
    *FAMILIES.values(),
    *WHOLE_MODEL.values(),
    *SLOW.values(),
    *WITH_DATA.values(),
    *OF_ARGUMENTS.values(),
]
EVERY_FAMILY, EVERYTHING, DATA, SHARED = "families", "all", "data", "peers"
OF_DATA = (*WITH_DATA, *OF_ARGUMENTS, "norms", "outliers", "tasks", "isotropic_common")
"""The rows of `--cases data`, beside `RECENT`."""
BY_NAME_ONLY = ("sdxl", *FAMILIES, *WHOLE_MODEL, *SLOW, *WITH_DATA, *OF_ARGUMENTS)
"""Rows that are measured only if they are named: they need 21 GB of disk, or make the table long."""


def chosen_cases(named: Sequence[str] | None) -> list[Case]:
    """The rows that are named, or all but the long ones.

    `families` has one for each family of methods, `data` those that merge with data and the methods of the
    same years, `peers` one for each method that a peer has too, and `all` every row but that of SDXL and one
    for each method.
    """
    if not named:
        return [case for case in CASES if case.name not in BY_NAME_ONLY]
    if EVERYTHING in named:
        return [*(case for case in CASES if case.name != "sdxl"), *by_method(measured_methods())]
    names = {*named, *(FAMILIES if EVERY_FAMILY in named else ()), *(OF_DATA if DATA in named else ())}
    return [
        *(case for case in CASES if case.name in names),
        *by_method(RECENT if DATA in named else ()),
        *(case for case in by_method(measured_methods() if SHARED in named else ()) if len(case.tools) > 1),
    ]


def by_method(names: Iterable[str]) -> list[Case]:
    """A row for each method, with its defaults."""
    counts = measured_methods()
    return [Case(BY_METHOD + name, name, counts[name]) for name in names]
