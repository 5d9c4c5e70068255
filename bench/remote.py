"""A weighted sum of two models behind a slow link, beside the time that the link needs for their bytes.

    python -m bench.remote                      two files of 0.5 GB, 100 MB/s, 50 ms
    python -m bench.remote --size 0.1e9 --rate 50e6 --latency 0.1

The server is another process on the same machine. What the link needs is its bytes by its rate, and nothing
for the latency. A run begins with an empty cache folder, so that it looks the models up, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

LIMIT = 1.15
"""How much longer than the link a merge may take."""


def write_model(path: Path, nbytes: int, seed: int) -> None:
    """Write a model of blocks of a transformer in bfloat16: matrices, with small norms between them."""
    torch.manual_seed(seed)
    width, tensors, size = 1024, {}, 0
    while size < nbytes:
        block = f"model.layers.{len(tensors) // 5}"
        square, wide = (width, width), (4 * width, width)
        shapes = {"q": square, "k": square, "up": wide, "down": wide[::-1]}
        for name, shape in {**shapes, "norm": (width,)}.items():
            tensor = torch.randn(shape, dtype=torch.bfloat16)
            tensors[f"{block}.{name}.weight"] = tensor
            size += tensor.nbytes
    save_file(tensors, path)


@contextmanager
def slow_server(folder: Path, rate: float, latency: float) -> Iterator[str]:
    """Serve a folder from another process; yields the address."""
    command = [sys.executable, "-m", "tests.support.range_server", str(folder), "--rate", str(rate)]
    process = subprocess.Popen([*command, "--latency", str(latency)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=0.5e9, help="bytes of each model")
    parser.add_argument("--rate", type=float, default=100e6, help="bytes a second")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for seed, name in enumerate("ab"):
            write_model(folder / f"{name}.safetensors", int(options.size), seed)
        nbytes = sum(file.stat().st_size for file in folder.iterdir())
        sys.stdout.write("| work | link | mecha_exp | of the link | bar |\n| --- | --- | --- | --- | --- |\n")
        with slow_server(folder, options.rate, options.latency) as url:
            seconds = sorted(_merge(url, folder / f"run{n}") for n in range(options.runs))[options.runs // 2]
        link = nbytes / options.rate
        row = (f"weighted sum of 2, {nbytes / 2e9:.2f} GB each", f"{link:.2f} s", f"{seconds:.2f} s")
        bar = "met" if seconds <= LIMIT * link else "missed"
        sys.stdout.write(f"| {' | '.join(row)} | {seconds / link:.3f} | {bar} |\n")


def _merge(url: str, folder: Path) -> float:
    """The seconds of a merge, from the addresses to the file."""
    os.environ["MECHA_EXP_CACHE"] = str(folder / "cache")
    from mecha_exp import merge, weighted_sum
    from mecha_exp.checkpoint.remote.lookup import forget_lookups

    forget_lookups()  # each run looks the models up
    merge(weighted_sum({"w": torch.ones(3)}, {"w": torch.ones(3)}, alpha=0.5))  # imports, and the compiler
    began = time.perf_counter()
    merge(
        weighted_sum(f"{url}/a.safetensors", f"{url}/b.safetensors", alpha=0.3), folder / "merged.safetensors"
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
