"""Merges of experts that hold a merged adapter: what rounding to their dtype does to each method.

python -m bench.low_rank

The cosine of what a method changes of the base with what it changes where models and arithmetic are float64.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import mecha_exp as m
from bench.report import make_parser, publish, table

SIZE, RANK, STD, CHANGE = 512, 16, 0.02, 1e-3
STORED = (("float32", "float32"), ("float32", "float64"), ("bfloat16", "float32"))
METHODS: dict[str, dict[str, object]] = {
    "task_arithmetic": {},
    "ties": {},
    "star": {},
    "knots": {},
    "tsv_m": {},
    "wudi": {"solver": "closed"},
    "iso_c": {},
    "iso_cts": {},
}


def experts() -> list[torch.Tensor]:
    """The base and two experts, in float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    base = normal(SIZE, SIZE) * STD
    return [base, *(base + normal(SIZE, RANK) @ normal(RANK, SIZE) * CHANGE / RANK**0.5 for _ in range(2))]


def change(name: str, models: list[torch.Tensor], dtype: str, arithmetic: str, folder: Path) -> torch.Tensor:
    """What a method changes of the base, all entries, where the models are stored in a dtype."""
    paths = [str(folder / f"{number}.safetensors") for number in range(len(models))]
    stored = [weights.to(getattr(torch, dtype)) for weights in models]
    for path, weights in zip(paths, stored, strict=True):
        save_file({"layer.weight": weights}, path)
    recipe = getattr(m, name)(*paths, **METHODS[name])
    output = folder / "merged.safetensors"
    m.merge(recipe, output, m.EngineOptions(compute_dtype=arithmetic), dtype=torch.float64)
    return (load_file(output)["layer.weight"] - stored[0].double()).flatten()


def main() -> None:
    """Print a row for each method."""
    options = make_parser(__doc__).parse_args()
    models = experts()
    rows = [["method", *(f"{dtype} files, {arithmetic} arithmetic" for dtype, arithmetic in STORED)]]
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            exact = change(method, models, "float64", "float64", Path(folder))
            changes = (change(method, models, *stored, Path(folder)) for stored in STORED)
            rows.append([method, *(f"{torch.cosine_similarity(exact, made, dim=0):.3f}" for made in changes)])
    said = f"Matrices of {SIZE} rows, weights of std {STD}, two experts with changes of rank {RANK}."
    publish("Merged adapters and the dtype of their files", f"{table(rows)}\n\n{said}", save=options.save)


if __name__ == "__main__":
    main()
