"""The work that is measured, in the words of each tool. Runs as a script in the tool's own environment.

    python cases.py TOOL CASE OUTPUT INPUT...

prints as the last line the seconds of the merge, imports left out, those of having memory ready before it,
and the peak memory of the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from bench.peer_cases import BY_METHOD, MERGEKIT, SD_MECHA

MEMORY_VARIABLE = "MECHA_EXP_BENCH_MEMORY"
"""Says how many bytes of memory are made ready before a merge."""

TOUCH = Path(__file__).with_name("touch.py")
WORKERS_VARIABLE = "MECHA_EXP_BENCH_WORKERS"
"""Says how many threads mecha_exp uses; nothing is one for each core."""

Work: TypeAlias = Callable[[], object]
"""What is measured."""

POINTS = [0.3 + 0.1 * i for i in range(8)]


def touch_memory(size: int) -> None:
    """Have so many bytes of free memory ready.

    A virtual machine gives memory that was free for two seconds back to its host, from where the next touch
    fetches it at a tenth of the speed (0.4 GB/s instead of 3, seen here): what is measured then is how long
    ago a program ended. So every tool finds as much as it will take.
    """
    # in a process of its own, whose memory does not count as that of the tool
    subprocess.run([sys.executable, "-S", str(TOUCH), str(size)], check=True)


def peak_memory() -> int:
    """Bytes that this process had resident at most, mapped pages included."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) * 1024


def measured_methods() -> dict[str, int]:
    """The methods that make a model of models alone, of any network, and how many models each is given."""
    from torch import Tensor

    from mecha_exp.extensions.merge_methods import get_all

    counts = {}
    for method in get_all():
        signature, kind = method.signature, method.kind.value
        given = [spec for spec in signature.parameters if spec.required]
        takes_models = all(spec.is_tensor and spec.is_model and not spec.is_state_dict for spec in given)
        returned = signature.returned
        makes_model = returned.interface is Tensor and "param" not in (returned.spaces or ())
        if takes_models and makes_model and kind not in ("choice", "factor", "interface", "reduction"):
            counts[method.identifier] = 4 if given[-1].variadic else len(given) + takes_differences(method)
    return counts


def takes_differences(method: Any) -> bool:
    """Whether a method takes differences of models, and no models."""
    given = [spec for spec in method.signature.parameters if spec.required]
    return all(spec.spaces and "weight" not in spec.spaces for spec in given)


def by_name(identifier: str, inputs: list[str]) -> Any:
    """A call of a method with the inputs in order, or with their differences to the first one."""
    import mecha_exp as me
    from mecha_exp.extensions.merge_methods import resolve

    method, (base, *experts) = resolve(identifier), inputs
    if takes_differences(method):
        return method(*(me.subtract(expert, base) for expert in experts))
    return method(*inputs)


OF_STATISTICS = {"fisher": "fisher", "regmean": "gram", "stitch": "mask"}
"""Methods that read files of statistics behind the models, and of which kind."""


def with_data(method: str, inputs: list[str]) -> Any:
    """A call of a method with models and as many files of statistics as it has experts."""
    import mecha_exp as me

    experts = len(inputs) // 2
    files = me.statistics(*inputs[-experts:], kind=OF_STATISTICS[method])
    return getattr(me, method)(*inputs[:-experts], statistics=files)


def ours(case: str, output: Path, inputs: list[str], device: str = "cpu") -> Work:
    """A case by mecha_exp."""
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
        "deep": lambda: doubled(me.model(base), experts[0]),
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
        "trimming_global": lambda: me.ties(base, *experts, density=0.2, trim="global"),
        "norms": lambda: me.metagpt(base, *experts),
        "nine_tenths": lambda: me.add_ties_with_dare(base, *experts, probability=0.9, k=0.2),
        "importance": lambda: me.arcee_fusion(base, experts[0]),
        "by_rank": lambda: me.top_k_tensor_sum(base, experts[0], width=0.4),
        "smoothed": lambda: me.smooth_add(base, *experts[:2]),
        "isotropic": lambda: me.iso_c(base, *experts),
        "isotropic_common": lambda: me.iso_cts(base, *experts),
        "cosine": lambda: me.add_cosine_b(base, experts[0]),
        "by_depth": lambda: me.lines(base, *experts, depth=0.5),
        "minimiser": lambda: me.wudi(base, *experts, solver="closed"),
        "stepped": lambda: me.doge(base, *experts, steps=100),
        "decayed": lambda: me.wsm(*inputs, decay=[0.75, 0.5, 0.25]),
        "masked": lambda: me.apply_mask(
            base, me.task_arithmetic(base, *experts, weights=0.3), me.tall_mask_of(base, *experts)
        ),
        "keys": lambda: me.weighted_sum(base, experts[0], alpha=0.3),
        **{name: partial(with_data, name, inputs) for name in OF_STATISTICS},
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
        name = case.removeprefix(BY_METHOD)
        recipe = recipes[case]() if name == case else by_name(name, inputs)
        jobs = [Job(recipe, output, durable=False, statistics=case == "statistics")]
    workers = os.environ.get(WORKERS_VARIABLE)
    options = EngineOptions(workers=int(workers) if workers else None, device=device)
    return lambda: merge_many(jobs, options)


def doubled(node: Any, expert: Any) -> Any:
    """A graph forty nodes deep, in which every node is used twice."""
    import mecha_exp as me

    for _ in range(20):
        node = me.weighted_sum(node, me.n_average(node, expert), alpha=0.3)
    return node


def sd_mecha(case: str, output: Path, inputs: list[str]) -> Work:
    """A case by sd-mecha 1.1.8."""
    import sd_mecha
    import torch

    recipe = SD_MECHA[case](sd_mecha, *map(sd_mecha.model, inputs))
    dtypes = {"merge_dtype": torch.float32, "output_dtype": torch.float16}
    return lambda: sd_mecha.merge(recipe, **dtypes, output=output, threads=2, merge_device="cpu")


def mergekit(case: str, output: Path, inputs: list[str]) -> Work:
    """A case by mergekit-pytorch 0.1.5."""
    import yaml
    from mergekit.scripts.merge_raw_pytorch import main

    base, *experts = inputs
    config = {**MERGEKIT[case](base, experts), "dtype": "float16"}
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "config.yml"
    path.write_text(yaml.safe_dump(config))
    command = [str(path), str(output.with_suffix("")), "--quiet"]

    def work() -> None:
        with folder:
            main(command, standalone_mode=False)

    return work


if __name__ == "__main__":
    tool, case, target, *paths = sys.argv[1:]
    prepare = {"mecha_exp": ours, "sd-mecha": sd_mecha, "mergekit": mergekit}[tool]
    work = prepare(case, Path(target), paths)
    begun = time.perf_counter()
    touch_memory(int(os.environ.get(MEMORY_VARIABLE, 0)))
    started, before = time.perf_counter(), time.process_time()
    work()
    ended, after = time.perf_counter(), time.process_time()
    result = {
        "seconds": ended - started,
        "processor": after - before,
        "touching": started - begun,
        "peak": peak_memory(),
    }
    sys.stdout.write("\n" + json.dumps(result) + "\n")
