"""`python -m mecha_exp calibrate`: measure the statistics of a model on data, for merging with data."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.cli.arguments import add_models_dir, make_parser, read_words
from mecha_exp.errors import ConfigError, counted, did_you_mean
from mecha_exp.sources.statistics.header import (
    ACTIVATIONS,
    FEW_EXAMPLES,
    FISHER,
    GRADIENT,
    GRAM,
    MASK,
    MEAN,
    NORM,
    StatisticsHeader,
)
from mecha_exp.system.progress import human_bytes
from mecha_exp.terminal.console import print_line, stdout

if TYPE_CHECKING:
    from mecha_exp.calibration import Request

EXAMPLE = """\
settings, as name=value:
    data      texts: a .jsonl, .csv, .parquet or .txt file, or a folder; for a module what that takes
    kind      fisher, gram, mean, norm, gradient, activations, several with commas between them
              (default: fisher,gram); or mask, which is trained on labelled examples of an expert's task
    output    a .safetensors file
    labels    sampled (from the model, the default), true (of the data) or exact (every class of one label)
    count     examples at most (default: all)
    seed      of sampled labels and positions (default: 0)
    positions   of activations: tokens or pixels of each example at most, drawn by the seed (default: 16)
    memory    bytes of sums at once; what does not fit is found in another trip over the data (default: 2 GiB)
    chunk     examples after which the sums are written, to go on there (default: 256)
    module    digits, mini8, or FILE.py:function, a function of (state_dict, data) to a Subject
    base      of kind=mask: the model that the expert was fine-tuned from
    density, bias, steps, rate, l1, variant   of kind=mask: how it is trained (1e-5, 5, 10, 1e7, 1, paper)
    length, column, label, device, dtype   of texts: tokens at most, the columns, where it computes and how

examples:
    python -m mecha_exp calibrate models/math data=math.jsonl kind=fisher,gram output=math.stats.safetensors
    python -m mecha_exp calibrate a.safetensors module=net.py:subject data=x.npz output=a.stats.safetensors
    python -m mecha_exp calibrate models/math kind=mask base=models/base data=m.jsonl output=mask.safetensors
"""

KINDS = (FISHER, GRAM, MEAN, NORM, GRADIENT, ACTIVATIONS, MASK)
_OF_TEXTS: dict[str, Callable[[str], Any]] = {
    "length": int, "column": str, "label": str, "device": str, "dtype": str,
}  # fmt: skip
_OF_MASKS: dict[str, Callable[[str], Any]] = {
    "density": float, "bias": float, "steps": int, "rate": float, "l1": float, "variant": str,
}  # fmt: skip
_SETTINGS: dict[str, Callable[[str], Any]] = {
    "data": str, "kind": str, "output": Path, "labels": str, "count": int, "seed": int, "positions": int,
    "memory": int, "chunk": int, "module": str, "base": str, **_OF_TEXTS, **_OF_MASKS,
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Measure, and write the file of statistics."""
    options = _parser().parse_args(arguments)
    from mecha_exp.checkpoint import open_stored
    from mecha_exp.lab.content_hash import content_of
    from mecha_exp.plugins import load_model_configs
    from mecha_exp.sources.search import find_model
    from mecha_exp.terminal.bars import examples_bar

    values = read_words(options.setting, _SETTINGS, "calibrate", _wrong_values)
    load_model_configs()
    from mecha_exp.calibration import Training, calibrate, load_subject, train_mask

    path = find_model(options.model, options.models_dir)
    kinds = _kinds(values.get("kind", f"{FISHER},{GRAM}"))
    texts = {name: values[name] for name in _OF_TEXTS if name in values}
    started = time.perf_counter()
    with open_stored(path) as stored:
        subject = load_subject(stored, values["data"], values.get("module"), values.get("count"), **texts)
        request = _request(options.model, content_of(path), kinds, values)
        with examples_bar("calibrating", len(subject.examples)) as advance:
            if kinds != (MASK,):
                header, kept = calibrate(subject, stored, request, values["output"], advance), None
            else:
                training = Training(**{name: values[name] for name in _OF_MASKS if name in values})
                with open_stored(find_model(values["base"], options.models_dir)) as base:
                    header, kept = train_mask(
                        subject, stored, base, training, request, values["output"], advance
                    )
    _report(header, kept, values["output"], time.perf_counter() - started)
    return 0


def _request(model: str, sha256: str, kinds: tuple[str, ...], values: Mapping[str, Any]) -> Request:
    from mecha_exp.calibration import Request
    from mecha_exp.calibration.loader import hash_of_code, hash_of_data

    names = ("labels", "seed", "positions", "memory", "chunk")
    return Request(
        kinds,
        model=model,
        model_sha256=sha256,
        data=values["data"],
        data_sha256=hash_of_data(values["data"]),
        settings={"module": values["module"]} if "module" in values else {},
        code=hash_of_code(values.get("module")),
        **{name: values[name] for name in names if name in values},
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "calibrate",
        "Run a model on data, and write statistics of it that merges read beside the model: its diagonal "
        "Fisher information (for recipe=fisher), the Gram matrices of the inputs of its layers (for "
        "recipe=regmean), the activations of its units (for recipe=zipit). An interrupted "
        "calibration goes on where it was.",
        EXAMPLE,
    )
    parser.add_argument("model", help="a file or a folder")
    parser.add_argument("setting", nargs="*", default=[], metavar="NAME=VALUE", help="see below")
    add_models_dir(parser, "where the model is looked for, after the current folder; may be repeated")
    return parser


def _wrong_values(values: Mapping[str, Any]) -> Iterator[str]:
    labels = ("sampled", "true", "exact")
    if values.get("labels", "sampled") not in labels:
        yield f"labels: expected {' or '.join(labels)}, got {values['labels']}"
    is_mask = MASK in values.get("kind", "")
    others = ("labels", "seed", "positions", "memory", "chunk") if is_mask else ("base", *_OF_MASKS)
    for name in others:
        if name in values:
            yield (
                f"{name}: is not a setting of kind=mask" if is_mask else f"{name}: is a setting of kind=mask"
            )
    if "positions" in values and not is_mask and ACTIVATIONS not in values.get("kind", ""):
        yield f"positions: is a setting of kind={ACTIVATIONS}"
    if is_mask and "base" not in values:
        yield "base=... is missing: a mask is of the task vector from a base"
    if any(name in values for name in _OF_MASKS):
        from mecha_exp.calibration.masks import wrong_settings

        yield from wrong_settings(values)


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(word.strip() for word in text.strip("[]").split(",") if word.strip()))
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"kind={kind}: expected {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    if MASK in kinds and len(kinds) > 1:
        raise ConfigError("kind=mask: a mask is trained by itself. Calibrate once more for the other kinds.")
    if not kinds:
        raise ConfigError(f"kind: expected {', '.join(KINDS)}, or several of them.")
    return kinds


def _report(header: StatisticsHeader, kept: float | None, output: Path, seconds: float) -> None:
    what = " and ".join(header.kinds)
    size = human_bytes(output.stat().st_size)
    print_line(f"{output}: {what} of {counted(header.count, 'example')}, {size}, in {seconds:.1f} s")
    if kept is not None:
        stdout.print(f"the mask has {100 * kept:.3g} % of the entries", markup=False)
        if not kept:
            stdout.print("warning: the mask is empty; raise rate or density, or lower l1", markup=False)
    elif header.labels:
        measured = "Fisher information" if FISHER in header.kinds else "gradients"
        stdout.print(f"{measured} of {header.labels} labels", markup=False)
    if header.count < FEW_EXAMPLES:
        stdout.print(
            f"warning: only {counted(header.count, 'example')}; a few hundred tell more", markup=False
        )
