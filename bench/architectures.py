"""What model configs cost: expansion, detection, tables of views; and converting a model of full size.

python -m bench.architectures                    print the table
python -m bench.architectures --save             and put it into bench/RESULTS.md
python -m bench.architectures --convert /dev/shm also convert a full-size random model of each pair there and
                                                 back, and compare every byte: three models lie there at once
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.report import machine, save_section, table
from mecha_exp.architectures import ModelConfig, candidates, detect, get_all, resolve, views
from mecha_exp.checkpoint import CheckpointWriter, Destination, open_stored
from mecha_exp.checkpoint.files import byte_view
from mecha_exp.engine.copying import COPY_BYTES, write_source

PAIRS = [
    ("clip_g-openclip", "clip_g-hf"),
    ("vae-ldm", "vae-diffusers"),
    ("sd1-ldm", "sd1-kohya"),
    ("sd1-ldm", "sd1-diffusers"),
    ("sdxl-sgm", "sdxl-kohya"),
    ("sdxl-sgm", "sdxl-diffusers"),
]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=9, help="runs of each (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write the tables into bench/RESULTS.md")
    parser.add_argument("--convert", type=Path, metavar="FOLDER", help="convert models of full size in it")
    options = parser.parse_args()
    text = measured(options.repeat)
    if options.convert:
        text += "\n\n" + converted(options.convert)
    print(text)  # noqa: T201
    if options.save:
        save_section("Model configs", text)


def measured(repeat: int) -> str:
    """The table, with the machine below it."""
    largest = max(get_all(), key=lambda config: len(config.keys()))
    sdxl = dict(resolve("sdxl-sgm").keys())
    unknown = {f"net.{key}": info for key, info in sdxl.items()}
    rows = [["what", "median (range)", "bar"]]

    def add(what: str, work: Callable[[], object], bar: str = "") -> None:
        times = [1000 * each for each in _times(work, repeat)]
        rows.append([what, f"{statistics.median(times):.0f} ms ({min(times):.0f} to {max(times):.0f})", bar])

    add(f"expanding the largest config ({len(largest.keys())} keys)", lambda: _fresh(largest).keys(), "50 ms")
    add("its blocks", lambda: _fresh(largest).blocks())
    add(f"detecting a file of {len(sdxl)} keys", lambda: detect(sdxl), "50 ms")
    add("the same, nothing expanded yet", lambda: candidates(sdxl, map(_fresh, get_all())), "")
    add("finding that a file is of no known config", lambda: detect(unknown))
    add("the table of views from sdxl-sgm to sdxl-diffusers", lambda: views("sdxl-sgm", "sdxl-diffusers"))
    return f"{table(rows)}\n\n{machine()}; {repeat} runs of each."


def _fresh(config: ModelConfig) -> ModelConfig:
    """The same config, with nothing expanded."""
    return ModelConfig(config.identifier, config.parts, config.sizes)


def _times(work: Callable[[], object], repeat: int) -> list[float]:
    work()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times


def converted(folder: Path) -> str:
    """Each pair there and back at full size: seconds, and whether every byte is the same."""
    rows = [["from and to", "size", "copy", "there", "back", "same bytes"]]
    for source, target in PAIRS:
        paths = [folder / f"convert-{name}.safetensors" for name in ("original", "there", "back")]
        try:
            size = _random_model(source, paths[0])
            copy = _copy(paths[0], paths[1])
            there = _convert(paths[0], paths[1], target)
            back = _convert(paths[1], paths[2], source)
            same = "yes" if _same(paths[0], paths[2]) else "NO"
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        rows.append(
            [
                f"`{source}`, `{target}`",
                f"{size / 1e9:.2f} GB",
                *(f"{t:.2f} s" for t in (copy, there, back)),
                same,
            ]
        )
    return f"{table(rows)}\n\nEach conversion is a process of its own, imports included; copying is without."


def _random_model(identifier: str, path: Path) -> int:
    """A fp16 model of random bits with every key that the config requires; returns its bytes."""
    required = {key: info for key, info in resolve(identifier).keys().items() if not info.optional}
    layout = {key: ("F16", info.shape) for key, info in required.items()}
    generator = torch.Generator().manual_seed(0)
    with CheckpointWriter(path, layout, {}, durable=False) as writer:
        for key, info in required.items():
            bits = torch.randint(-(2**15), 2**15, info.shape, dtype=torch.int16, generator=generator)
            writer.write_bytes(key, 0, byte_view(bits.view(-1)))
        writer.commit()
    return path.stat().st_size


def _copy(source: Path, target: Path) -> float:
    began = time.perf_counter()
    with open_stored(source) as model:
        layout = {key: (model.info(key).dtype, model.info(key).shape) for key in model.keys()}
        write_source(model, Destination(target, layout), {})
    return time.perf_counter() - began


def _convert(source: Path, target: Path, config: str) -> float:
    command = [sys.executable, "-m", "mecha_exp", "convert", str(source), "--to", config, "-o", str(target)]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _same(one: Path, other: Path) -> bool:
    with open_stored(one) as a, open_stored(other) as b:
        if set(a.keys()) != set(b.keys()):
            return False
        for key in a.keys():
            if a.info(key).shape != b.info(key).shape:
                return False
            for start in range(0, a.info(key).nbytes, COPY_BYTES):
                rest = min(COPY_BYTES, a.info(key).nbytes - start)
                x, y = (torch.empty(rest, dtype=torch.uint8) for _ in range(2))
                a.read_bytes_into(key, start, byte_view(x))
                b.read_bytes_into(key, start, byte_view(y))
                if not torch.equal(x, y):
                    return False
    return True


if __name__ == "__main__":
    main()
