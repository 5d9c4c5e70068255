"""What model configs cost: expansion, detection, tables of views; and converting a model of full size.

python -m bench.architectures                    print the table
python -m bench.architectures --save             and put it into bench/RESULTS.md
python -m bench.architectures --convert /dev/shm also convert a full-size random model of each pair there and
                                                 back, and compare every byte: two models lie there at once
"""

from __future__ import annotations

import hashlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.report import machine, make_parser, publish, table
from mecha_exp.architectures import ModelConfig, candidates, detect, get_all, resolve, views
from mecha_exp.checkpoint import CheckpointWriter, open_stored
from mecha_exp.checkpoint.positional import byte_view
from mecha_exp.sources.copier import COPY_BYTES

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
    parser = make_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=9, help="runs of each (default: %(default)s)")
    parser.add_argument("--convert", type=Path, metavar="FOLDER", help="convert models of full size in it")
    options = parser.parse_args()
    text = measured(options.repeat)
    if options.convert:
        text += "\n\n" + converted(options.convert)
    publish("Model configs", text, save=options.save)


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
    """Each pair there and back at full size: seconds, those of `cp`, and whether all bytes are the same."""
    rows = [["from and to", "size", "cp", "there", "of cp", "back", "same bytes"]]
    for source, target in PAIRS:
        paths = [folder / f"convert-{name}.safetensors" for name in ("original", "there", "back")]
        original, there, back = paths
        try:
            size = _random_model(source, original)
            before = _digests(original)
            copy = _timed(["cp", "--sparse=never", str(original), str(there)])
            there.unlink()
            forth = _convert(original, there, target)
            original.unlink()
            again = _convert(there, back, source)
            same = "yes" if _digests(back) == before else "NO"
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        times = [f"{copy:.2f} s", f"{forth:.2f} s", f"{forth / copy:.1f}", f"{again:.2f} s"]
        rows.append([f"`{source}`, `{target}`", f"{size / 1e9:.2f} GB", *times, same])
    return f"{table(rows)}\n\nEach conversion is a process of its own, imports included."


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


def _convert(source: Path, target: Path, config: str) -> float:
    command = [sys.executable, "-m", "mecha_exp", "convert", str(source), "--to", config, "-o", str(target)]
    return _timed(command)


def _timed(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _digests(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape and a hash of each tensor."""
    found = {}
    with open_stored(path) as model:
        for key in model.keys():
            info, sha = model.info(key), hashlib.sha256()
            room = torch.empty(min(COPY_BYTES, info.nbytes), dtype=torch.uint8)
            for start in range(0, info.nbytes, COPY_BYTES):
                view = byte_view(room)[: min(COPY_BYTES, info.nbytes - start)]
                model.read_bytes_into(key, start, view)
                sha.update(view)
            found[key] = (info.shape, sha.hexdigest())
    return found


if __name__ == "__main__":
    main()
