"""Write how near each method comes to its oracle: `python -m parity.results`, a step of `make parity`."""

import json
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

import mecha_exp as m
from parity.inputs import inputs
from parity.recipes import GOLDEN, ORACLES, RECIPES, WRONG, compared, tolerance

RESULTS = Path(__file__).with_name("RESULTS.md")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def merged(recipe: m.Node) -> torch.Tensor:
    """The only tensor of a recipe, in float64."""
    return m.merge(recipe, options=m.EngineOptions(compute_dtype=torch.float64), dtype=torch.float64)["w"]


def of(*values: float, space: str = "weight") -> m.Node:
    """A model of one tensor."""
    return m.model({"w": torch.tensor(values, dtype=torch.float64)}, space)


def wide(number: int) -> m.Node:
    """An input of the oracles."""
    return m.model({"w": inputs(torch.float32)[number]["wide"]})


def deltas() -> list[m.Node]:
    return [m.subtract(wide(number), wide(0)) for number in (1, 2)]


def stock() -> str:
    mean = merged(m.ties_sum(*deltas()))
    plain, applied = (
        merged(m.ties_sum_extended(*deltas(), k=1.0, apply_stock=apply)) for apply in (False, True)
    )
    return f"true gives the plain mean: {torch.equal(applied, mean)}, false too: {torch.equal(plain, mean)}"


def finite(recipe: m.Node) -> str:
    return f"a finite model: {bool(merged(recipe).isfinite().all())}"


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except m.RecipeError as error:
        return str(error)
    return "no error"


ZEROS = of(0, 0, 0, 0, 0)
EQUAL = (1.0, -1.0, 1.0, 1.0, 2.0)
X = (3.0, -4.0, 0.0)
MISTAKES: dict[str, dict[str, tuple[Callable[[], object], str]]] = {
    "sd-mecha": {
        "slerp of 2 and -3, alpha 0.3": (
            lambda: round(merged(m.slerp(of(2), of(-3), alpha=0.3)).item(), 12),
            "opposite numbers have no arc between them: the weighted sum",
        ),
        "ties_sum_extended, apply_stock": (stock, "the switch is the wrong way round"),
        "model_stock of one delta": (
            lambda: finite(m.model_stock(deltas()[0])),
            "one delta is its own stock",
        ),
        "add_difference_ties": (
            lambda: finite(m.add_difference_ties(*map(wide, range(3)))),
            "its composite cannot tell the merge space of a delta",
        ),
        "add_difference of a delta": (
            lambda: finite(m.add_difference(wide(0), deltas()[1])),
            "the same",
        ),
        "rotate of differences": (
            lambda: finite(m.rotate(*map(wide, range(3)))),
            "it calls a method that its nodes do not have",
        ),
        "dropout, overlap 0.5": (
            lambda: finite(m.dropout(wide(0), wide(1), wide(2), overlap=0.5)),
            "it mixes numpy and torch; ours does what its formula says",
        ),
    },
    "mergekit": {
        "ties of equal magnitudes": (
            lambda: merged(m.ties(ZEROS, of(*EQUAL), density=0.6)).tolist(),
            "which of equal magnitudes are kept depends on their order; ours keeps what ties with the last",
        ),
        "ties of the same, turned round": (
            lambda: merged(m.ties(ZEROS, of(*EQUAL[::-1]), density=0.6)).flip(0).tolist(),
            "the same",
        ),
        "multislerp of x, -x and 0": (
            lambda: finite(m.multislerp(of(*X), of(*(-x for x in X)), of(0, 0, 0))),
            "without a mean direction ours is the weighted sum",
        ),
        "linear, weights 1 and -1": (
            lambda: refusal(lambda: merged(m.linear(of(*X), of(*X), weights=[1.0, -1.0]))),
            "weights that sum to zero cannot be normalised: an error before any work",
        ),
        "model_stock of one model": (
            lambda: finite(m.model_stock_pairwise(ZEROS, of(*EQUAL))),
            "one delta is its own stock",
        ),
    },
}
"""By oracle and case: what we give, and why."""


def about(oracle: str) -> dict[str, str]:
    """What its golden file says of its version and its mistakes."""
    with safe_open(GOLDEN / f"{oracle}.safetensors", "pt") as file:
        said: dict[str, str] = file.metadata()
    return said


def said_by(oracle: str) -> dict[str, str]:
    """What the oracle gave where it is wrong, by case."""
    said: dict[str, str] = json.loads(about(oracle)["mistakes"])
    return said


def row(name: str) -> str:
    """How far we are from the oracle in each dtype, relative to the largest entry of a tensor."""
    oracle = next(o for o, golden in ORACLES.items() if any(key.split("|")[0] == name for key in golden))
    cells, shapes, near = [], set(), True
    for dtype in DTYPES:
        largest = 0.0
        for key, made, wanted in compared(name, dtype):
            shapes.add(key)
            largest = max(largest, ((made - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item())
            near = near and torch.allclose(made, wanted, **tolerance(name, dtype, wanted))
        cells.append(f"{largest:.0e}")
    return f"| {name} | {oracle} | {len(shapes)} | {' | '.join(cells)} | {'yes' if near else 'no'} |"


HEAD = """\
# How near the methods come to their oracles

Made by `make parity`: {versions}, torch {torch}, Python {python}.
Each row merges tensors of several shapes (numbers, vectors, columns, rows, matrices, kernels) through the
engine, in tiles of 16 elements with three workers. The figures are the largest differences, relative to the
largest entry of a tensor. Models are rounded to the dtype and merged in float32, for the first column in
float64; the oracle's arithmetic is float64. What sd-mecha composes of other methods it merges itself.

| method | oracle | shapes | float64 | float32 | float16 | bfloat16 | met |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
MIDDLE = """
Met means: within 1e-9 in float64 (1e-7 where a rotation is partial, for sd-mecha stops its iteration there),
within 1e-5 in float32, within the rounding of the output in half precision. Random masks are compared here
where they drop nothing, and otherwise by their statistics (`tests/test_methods.py`,
`tests/test_method_edge_cases.py`).

## Where the oracle is wrong

| case | oracle | it gives | we give | because |
| --- | --- | --- | --- | --- |
"""


def main() -> None:
    """Compare everything, and write the table."""
    versions = " and ".join(about(oracle)["oracle"] for oracle in ORACLES)
    text = HEAD.format(versions=versions, torch=torch.__version__, python=platform.python_version())
    text += "".join(f"{row(name)}\n" for name in RECIPES) + MIDDLE
    for oracle, known in MISTAKES.items():
        said = said_by(oracle)
        for name, (ours, reason) in known.items():
            cells = (name, oracle, re.split(r"\. | - ", said[name])[0], str(ours()), reason)
            text += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    text += "".join(
        f"\nLeft out above: {name} of the key `{key}`: {why}.\n" for (name, key), why in WRONG.items()
    )
    RESULTS.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(RECIPES)} comparisons in {RESULTS}\n")


if __name__ == "__main__":
    main()
