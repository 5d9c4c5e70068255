"""The difference between two models, block by block, as data, as a table and as a figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.checkpoint import is_arithmetic, torch_dtype
from mecha_exp.engine.planner.inputs import in_one_format
from mecha_exp.engine.statistics import Statistics, summarise
from mecha_exp.errors import CheckpointError, counted, some
from mecha_exp.graph.literals import model
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.quantised.view import notes_on, require_plain
from mecha_exp.sources.source import Source, infos_of, same_bytes
from mecha_exp.system.atomic_write import atomic_write
from mecha_exp.terminal.console import make_table, print_line, stdout

TILE = 1 << 20
"""The number of elements that are compared at once, so that memory does not grow with the models."""
WORKERS = 2


def compare_by_block(a: str, b: str) -> dict[str, Any]:
    """Compare two models: distances by block and as a whole, and the keys that cannot be compared.

    Quantised models are compared by the numbers that their codes stand for. Models in two formats of one
    architecture are compared in one of the two formats.

    Returns:
        `blocks` and `all` with keys, changed keys, distance, relative change and cosine; `only_a`, `only_b`
        and `other_shape` with the keys that cannot be compared; `notes`.

    Raises:
        CheckpointError: a model cannot be read, or the models have no key of the same shape in common.
    """
    nodes = [model(a), model(b)]
    with open_sources(nodes, ()) as opened:
        plain = require_plain(opened, on_quantised="dequantise")
        sources, notes = in_one_format(nodes, plain)
        first, second = (sources[node] for node in nodes)
        shared = [key for key in first.keys() if key in second]
        alike = [key for key in shared if first.info(key).shape == second.info(key).shape]
        if not alike:
            raise CheckpointError(
                f"{a} and {b} have no key of the same shape in common: {some(first.keys(), 3)} in the one, "
                f"{some(second.keys(), 3)} in the other."
            )
        anatomy = Anatomy.of(infos_of(first))
        with ThreadPoolExecutor(WORKERS) as pool:
            compared = dict(
                zip(alike, pool.map(lambda key: _compare(first, second, key), alike), strict=True)
            )
    block = anatomy.blocks
    changed = [key for key, (same, _) in compared.items() if not same]
    sums = {key: moments for key, (_, moments) in compared.items() if moments is not None}
    per_block = summarise(sums, block.__getitem__)
    counts, changes = (Counter(block[key] for key in keys) for keys in (alike, changed))
    whole = summarise(sums).get("")
    return {
        "a": a,
        "b": b,
        "config": anatomy.config.identifier,
        "all": _row(len(alike), len(changed), whole),
        "blocks": {
            name: _row(counts[name], changes[name], per_block.get(name))
            for name in anatomy.order
            if name in counts
        },
        "changed": changed,
        "only_a": [key for key in first.keys() if key not in second],
        "only_b": [key for key in second.keys() if key not in first],
        "other_shape": [key for key in shared if first.info(key).shape != second.info(key).shape],
        "notes": [*notes_on(plain.values()), *notes],
    }


def _compare(a: Source, b: Source, key: str) -> tuple[bool, torch.Tensor | None]:
    """Whether a tensor is equal in both models; and for floats the sums of b², a² and (b - a)²."""
    types = a.info(key).dtype, b.info(key).dtype
    if not all(map(is_arithmetic, types)):
        return types[0] == types[1] and same_bytes(key, [a, b]), None
    sums = torch.zeros(3, dtype=torch.float64)
    same = True
    total = a.info(key).numel
    for start in range(0, total, TILE):
        size = min(TILE, total - start)
        x, y = (_read(source, key, start, size) for source in (b, a))
        difference = x - y
        same = same and bool((difference == 0).all())
        sums += torch.stack([x @ x, y @ y, difference @ difference])
    return same, sums


def _read(source: Source, key: str, start: int, size: int) -> torch.Tensor:
    tile = torch.empty(size, dtype=torch_dtype(source.info(key).dtype))
    source.read_into(key, start, tile)
    return tile.double()


def _row(keys: int, changed: int, statistics: Statistics | None) -> dict[str, float | int | None]:
    row: dict[str, float | int | None] = {"keys": keys, "changed": changed}
    for name in ("distance", "relative_change", "cosine"):
        row[name] = getattr(statistics, name) if statistics else None
    return row


def show_models(comparison: Mapping[str, Any]) -> None:
    """Print the comparison as a table."""
    for note in comparison["notes"]:
        print_line(note)
    table = make_table("block", "keys", "changed", "distance", "relative change", "cosine")
    for name, row in {**comparison["blocks"], "(all)": comparison["all"]}.items():
        numbers = (row["distance"], row["relative_change"], row["cosine"])
        cells = ["" if number is None else f"{number:.6g}" for number in numbers]
        table.add_row(*map(Text, [name, str(row["keys"]), str(row["changed"]), *cells]))
    stdout.print(table)
    for part, what in (("only_a", "only in a"), ("only_b", "only in b"), ("other_shape", "of another shape")):
        if comparison[part]:
            print_line(f"{counted(len(comparison[part]), 'key')} {what}: {some(comparison[part], 4)}")
    if not any(comparison[part] for part in ("changed", "only_a", "only_b", "other_shape")):
        stdout.print("They do not differ.")


def draw_models(comparison: Mapping[str, Any], path: Path) -> None:
    """Draw the relative change and the angle of each block."""
    import math

    from matplotlib.figure import Figure

    blocks = comparison["blocks"]
    positions = range(len(blocks))
    changes = [row["relative_change"] or 0.0 for row in blocks.values()]
    angles = [
        math.degrees(math.acos(1.0 if row["cosine"] is None else row["cosine"])) for row in blocks.values()
    ]
    figure = Figure(figsize=(max(6.0, 0.32 * len(blocks)), 4.5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    upper.bar(positions, changes, color="tab:blue")
    upper.set_ylabel("relative change")
    lower.bar(positions, angles, color="tab:orange")
    lower.set_ylabel("angle (degrees)")
    lower.set_xticks(list(positions), list(blocks), rotation=90, fontsize="small")
    figure.suptitle(f"{Path(comparison['b']).name} from {Path(comparison['a']).name}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix(".") or "png", dpi=120)
