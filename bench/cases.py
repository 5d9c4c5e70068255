"""The work that is measured, in the words of each tool. Runs as a script in the tool's own environment.

    python cases.py TOOL CASE OUTPUT INPUT...

prints the seconds of the merge, imports left out, as the last line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORKERS_VARIABLE = "MECHA_EXP_BENCH_WORKERS"
"""Says how many threads mecha_exp uses; nothing is one for each core."""

POINTS = [0.3 + 0.1 * i for i in range(8)]


def ours(case: str, output: Path, inputs: list[str]) -> float:
    """Run a case with mecha_exp."""
    import mecha_exp as me
    from mecha_exp.engine import EngineOptions, Job, merge_many

    base, *experts = inputs
    recipes: dict[str, Any] = {
        "weighted_sum": lambda: me.weighted_sum(base, experts[0], alpha=0.3),
        "add_difference": lambda: me.add_difference(base, experts[0], experts[1], alpha=0.7),
        "slerp": lambda: me.slerp(base, experts[0], alpha=0.3),
        "perpendicular": lambda: me.perpendicular_component(base, experts[0]),
        "ties": lambda: me.add_difference_ties(base, *experts, alpha=0.7, k=0.2),
        "dare_ties": lambda: me.dare_ties(base, *experts, density=0.5),
        "n_average": lambda: me.n_average(*inputs),
        "statistics": lambda: me.weighted_sum(base, experts[0], alpha=0.3),
        "deep": lambda: doubled(me.model(base), me.n_average, me.weighted_sum, experts[0]),
        "centres": lambda: me.n_model_stock(base, *experts),
        "difference": lambda: me.train_difference(base, *experts[:2]),
        "dropout": lambda: me.della(base, *experts, density=0.5),
        "frequency": lambda: me.crossover(base, experts[0], alpha=0.3),
        "limiting": lambda: me.clamp(*inputs, stiffness=0.3),
        "linear": lambda: me.task_arithmetic(base, *experts, weights=0.3),
        "outliers": lambda: me.breadcrumbs(base, *experts, density=0.9),
        "slicing": lambda: me.tensor_sum(base, experts[0], width=0.4),
        "spectral": lambda: me.rotate(base, experts[0]),
        "spherical": lambda: me.karcher(*inputs),
        "subspaces": lambda: me.tsv_m(base, *experts),
        "tasks": lambda: me.consensus(base, *experts),
        "trimming": lambda: me.ties(base, *experts, density=0.2),
    }
    points = POINTS if case == "ties_sweep" else [None]
    if case == "ties_sweep":
        jobs = [
            Job(
                me.add_difference_ties(base, *experts, alpha=alpha, k=0.2),
                output.with_name(f"{output.stem}-{n}.safetensors"),
                durable=False,
            )
            for n, alpha in enumerate(points)
        ]
    else:
        jobs = [Job(recipes[case](), output, durable=False, statistics=case == "statistics")]
    workers = os.environ.get(WORKERS_VARIABLE)
    options = EngineOptions(workers=int(workers) if workers else None)
    started = time.perf_counter()
    merge_many(jobs, options)
    return time.perf_counter() - started


def doubled(node: Any, average: Any, weighted_sum: Any, expert: Any) -> Any:
    """A graph forty nodes deep, in which every node is used twice."""
    for _ in range(20):
        node = weighted_sum(node, average(node, expert), alpha=0.3)
    return node


def sd_mecha(case: str, output: Path, inputs: list[str]) -> float:
    """Run a case with sd-mecha 1.1.8."""
    import sd_mecha
    import torch
    from sd_mecha.extensions import merge_methods

    add_delta = merge_methods.resolve("add_difference")  # its wrapper of that name fails on deltas
    models = [sd_mecha.model(path) for path in inputs]
    base, *experts = models
    deltas = [sd_mecha.subtract(expert, base) for expert in experts]
    recipes = {
        "weighted_sum": lambda: sd_mecha.weighted_sum(base, experts[0], alpha=0.3),
        "add_difference": lambda: sd_mecha.add_difference(base, experts[0], experts[1], alpha=0.7),
        "slerp": lambda: sd_mecha.slerp(base, experts[0], alpha=0.3),
        "perpendicular": lambda: sd_mecha.perpendicular_component(base, experts[0]),
        "ties": lambda: add_delta(base, sd_mecha.ties_sum(*deltas, k=0.2), alpha=0.7),
        "dare_ties": lambda: add_delta(
            base, sd_mecha.ties_sum_with_dropout(*deltas, probability=0.5, k=1.0, seed=0), alpha=1.0
        ),
        "n_average": lambda: sd_mecha.n_average(*models),
        "deep": lambda: doubled(base, sd_mecha.n_average, sd_mecha.weighted_sum, experts[0]),
    }
    recipe = recipes[case]()
    started = time.perf_counter()
    dtypes = {"merge_dtype": torch.float32, "output_dtype": torch.float16}
    sd_mecha.merge(recipe, **dtypes, output=output, threads=2, merge_device="cpu")
    return time.perf_counter() - started


def mergekit(case: str, output: Path, inputs: list[str]) -> float:
    """Run a case with mergekit-pytorch 0.1.5."""
    import yaml
    from mergekit.scripts.merge_raw_pytorch import main

    base, *experts = inputs
    half = {"weight": 0.5, "density": 0.5}
    configs = {
        "weighted_sum": ("linear", [(base, {"weight": 0.7}), (experts[0], {"weight": 0.3})], None, {}),
        "add_difference": ("task_arithmetic", [(experts[0], {"weight": 0.7})], base, {}),
        "ties": ("ties", [(e, {"weight": 0.7, "density": 0.2}) for e in experts], base, {}),
        "dare_ties": ("dare_ties", [(e, half) for e in experts], base, {}),
        "n_average": ("linear", [(model, {"weight": 1.0}) for model in inputs], None, {}),
    }
    method, models, base_model, parameters = configs[case]
    config: dict[str, Any] = {
        "merge_method": method,
        "models": [{"model": path, "parameters": given} for path, given in models],
        "parameters": parameters,
        "dtype": "float16",
    }
    if base_model:
        config["base_model"] = base_model
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yml"
        path.write_text(yaml.safe_dump(config))
        started = time.perf_counter()
        main([str(path), str(output.with_suffix("")), "--quiet"], standalone_mode=False)
        return time.perf_counter() - started


if __name__ == "__main__":
    tool, case, target, *paths = sys.argv[1:]
    run = {"mecha_exp": ours, "sd-mecha": sd_mecha, "mergekit": mergekit}[tool]
    taken = run(case, Path(target), paths)
    sys.stdout.write("\n" + json.dumps({"seconds": taken}) + "\n")
