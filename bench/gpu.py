"""The engine on a GPU beside the link to it: seconds, how far from the link, and how much faster it is.

    python -m bench.gpu                            Stable Diffusion 1.5's size, on the memory disk
    python -m bench.gpu --size small --rows ties   a quick look
    python -m bench.gpu --size matrices            without keys that are so small that the CPU computes them

The inputs lie on the memory disk. The link is what moving the bytes alone takes: the inputs go to the device
while the output comes back, pinned, without files. The way is the same with files: as many threads as the
engine has read the inputs, copy them to the device, copy a tile back and write it, and nothing is computed. A
row is the median of its runs in one process, after one run on small models. The error is the largest
difference to the CPU's output over the largest entry of its tensor; equal bytes over runs are checked.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

from bench.cases import ours
from bench.models import SIZES, make_models, write_model
from bench.report import machine, make_parser, publish, say, table
from mecha_exp import MechaError, MergeError
from mecha_exp.engine import EngineOptions

ROWS = {
    "weighted_sum": 2,
    "add_difference": 3,
    "slerp": 2,
    "ties": 4,
    "trimming_global": 4,
    "dare_ties": 4,
    "subspaces": 4,
    "isotropic": 4,
    "by_rank": 2,
    "frequency": 2,
    "smoothed": 3,
}
"""The works of `bench.cases`, and how many models each reads."""

TILE = 1 << 23
"""Bytes that the way moves at a time."""

CHUNK = 1 << 26
"""Bytes that the link moves at a time."""


def main() -> None:
    """Measure, and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="sd15")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cpu", nargs="*", choices=ROWS, help="rows that the CPU runs too; all by default")
    parser.add_argument("--disk", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no GPU")
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        lines = measure(
            Path(folder), args.size, args.rows, args.repeat, args.rows if args.cpu is None else args.cpu
        )
    publish("A GPU", "\n\n".join(lines), save=args.save)


def measure(folder: Path, size: str, names: Sequence[str], repeat: int, on_cpu: Sequence[str]) -> list[str]:
    """The table of the rows, and where it was measured."""
    count = max(ROWS[name] for name in names)
    with ProcessPoolExecutor(count) as pool:
        inputs = [folder / f"{size}-{number}.safetensors" for number in range(count)]
        list(pool.map(write_model, inputs, itertools.repeat(SIZES[size]), range(count)))
    small = make_models(folder, count, "small")
    out, into = pinned_rates()
    say(f"link: {out / 1e9:.1f} GB/s to the device, {into / 1e9:.1f} GB/s back")
    rows = [["work", "link", "way", "GPU", "of the way", "memory", "CPU", "faster", "error"]]
    for name in names:
        models = [files[: ROWS[name]] for files in (inputs, small)]
        try:
            rows.append(measure_row(name, folder, *models, repeat, name in on_cpu))
        except MechaError as error:
            rows.append([name, f"failed: {error}"])
        say(" | ".join(rows[-1]))
    gpu = torch.cuda.get_device_properties(0)
    where = f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB; {machine()}; {repeat} runs a row."
    return [
        table(rows),
        f"Pinned copies: {out / 1e9:.1f} GB/s to the device, {into / 1e9:.1f} GB/s back. {where}",
    ]


def measure_row(
    name: str, folder: Path, inputs: list[Path], small: list[Path], repeat: int, on_cpu: bool
) -> list[str]:
    """One work on the device and, if asked, on the CPU."""
    first, output, expected = (folder / f"{role}.safetensors" for role in ("first", "again", "cpu"))
    run_on("cuda", name, output, small)
    buffers()
    link = timed(partial(move_bytes, sum(map(nbytes, inputs)), nbytes(inputs[0])))
    way = timed(partial(move_files, inputs, output))
    torch.cuda.reset_peak_memory_stats()
    runs = []
    for number in range(repeat):
        output.unlink(missing_ok=True)
        runs.append(timed(partial(run_on, "cuda", name, output if number else first, inputs)))
        if number and not torch.equal(content(first), content(output)):
            raise MergeError("two runs gave different bytes")
    seconds, memory = statistics.median(runs), torch.cuda.max_memory_allocated()
    row = [
        name,
        f"{link:.2f} s",
        f"{way:.2f} s",
        f"{seconds:.2f} s",
        f"{seconds / way:.2f}",
        f"{memory / 1e9:.1f} GB",
    ]
    if on_cpu:
        run_on("cpu", name, expected, small)
        expected.unlink()
        slow = timed(partial(run_on, "cpu", name, expected, inputs))
        row += [f"{slow:.2f} s", f"{slow / seconds:.1f} times", f"{largest_error(first, expected):.1e}"]
    for path in (first, output, expected):
        path.unlink(missing_ok=True)
    return row


def run_on(device: str, name: str, output: Path, inputs: Sequence[Path]) -> None:
    """Do a work on a device."""
    ours(name, output, [str(path) for path in inputs], device=device)()


def timed(work: Callable[[], object]) -> float:
    """The seconds of a work, the device's included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def nbytes(path: Path) -> int:
    return path.stat().st_size


def content(path: Path) -> torch.Tensor:
    """The bytes of a file."""
    return torch.from_file(str(path), size=nbytes(path), dtype=torch.uint8)


def pinned_rates() -> tuple[float, float]:
    """Bytes a second to the device and back, each alone."""
    size = 1 << 28
    here, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    rates = []
    for target, source in ((there, here), (here, there)):
        timed(partial(target.copy_, source))
        rates.append(
            8 * size / timed(lambda t=target, s=source: [t.copy_(s, non_blocking=True) for _ in range(8)])
        )
    return rates[0], rates[1]


def move_bytes(to_device: int, back: int) -> None:
    """Copy so many bytes to the device while others come back."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    here, there = buffers()
    for number in range(-(-max(to_device, back) // CHUNK)):
        with torch.cuda.stream(first):
            if number * CHUNK < to_device:
                there[0].copy_(here[0], non_blocking=True)
        with torch.cuda.stream(second):
            if number * CHUNK < back:
                here[1].copy_(there[1], non_blocking=True)


@functools.cache
def buffers() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two pinned buffers here, two on the device."""
    here = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    return here, [buffer.cuda() for buffer in here]


def move_files(inputs: Sequence[Path], output: Path) -> None:
    """Read files, copy them to the device and the first one back, and write that, tile by tile."""
    output.unlink(missing_ok=True)
    files = [os.open(path, os.O_RDONLY) for path in inputs]
    written = os.open(output, os.O_WRONLY | os.O_CREAT)
    starts = iter(range(0, nbytes(inputs[0]), TILE))

    def work() -> None:
        here = [torch.empty(TILE, dtype=torch.uint8, pin_memory=True) for _ in range(len(files) + 1)]
        there = [torch.empty(TILE, dtype=torch.uint8, device="cuda") for _ in files]
        with torch.cuda.stream(torch.cuda.Stream()):
            for start in starts:
                for file, buffer, copied in zip(files, here, there, strict=False):
                    count = os.preadv(file, [buffer.numpy().data], start)
                    copied.copy_(buffer, non_blocking=True)
                here[-1].copy_(there[0])
                os.pwrite(written, here[-1].numpy().data[:count], start)

    threads = [threading.Thread(target=work) for _ in range(EngineOptions(device="cuda").threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in (*files, written):
        os.close(file)


def largest_error(output: Path, expected: Path) -> float:
    """The largest difference over the largest entry of its tensor."""
    from safetensors import safe_open

    worst = 0.0
    with safe_open(output, "pt", device="cuda") as made, safe_open(expected, "pt", device="cuda") as wanted:
        for key in wanted.keys():
            a, b = made.get_tensor(key).float(), wanted.get_tensor(key).float()
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)))
    return worst


if __name__ == "__main__":
    main()
