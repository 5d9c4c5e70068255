"""`python -m mecha_exp convert`: write a model in another format, such as a diffusers folder."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.cli.arguments import add_models_dir, make_parser
from mecha_exp.errors import CheckpointError, counted, some
from mecha_exp.system.progress import human_bytes
from mecha_exp.terminal.console import print_line, stdout

if TYPE_CHECKING:
    from mecha_exp.architectures import Component as Part
    from mecha_exp.architectures import ModelConfig
    from mecha_exp.checkpoint import Component, Destination, StateDictSource
    from mecha_exp.sources.format_view import ConvertedSource

EXAMPLE = """\
examples:
    python -m mecha_exp convert model.safetensors --to sdxl-diffusers -o model/
    python -m mecha_exp convert model/ --to sdxl-sgm -o model.safetensors
    python -m mecha_exp convert model.safetensors --to vae-ldm -o vae.safetensors        a part alone
    python -m mecha_exp convert model.safetensors --to sdxl-diffusers -o model/ --like other-sdxl/

`python -m mecha_exp info` lists the formats, `info model.safetensors` says which one a model has.
"""

NO_TOKENIZER = (
    "The folder has no tokenizer, which a single file does not hold: convert with --like FOLDER of such a "
    "model, or give it to from_pretrained:"
)
_CLIP_L = "CLIPTokenizer.from_pretrained('openai/clip-vit-large-patch14')"
_CLIP_G = "CLIPTokenizer.from_pretrained('laion/CLIP-ViT-bigG-14-laion2B-39B-b160k', pad_token='!')"
TOKENIZERS = {
    "sd1": f"tokenizer={_CLIP_L}",
    "sdxl": f"tokenizer={_CLIP_L}, tokenizer_2={_CLIP_G}",
}
"""Arguments of diffusers' `from_pretrained` that add a tokenizer, by architecture."""


def main(arguments: list[str]) -> int:
    """Convert a model."""
    options = _parser().parse_args(arguments)
    from mecha_exp.architectures import resolve
    from mecha_exp.checkpoint import open_stored
    from mecha_exp.checkpoint.folder import PIPELINE
    from mecha_exp.engine.provenance import PROVENANCE_KEYS
    from mecha_exp.plugins import load_model_configs
    from mecha_exp.sources.copier import write_source
    from mecha_exp.sources.format_view import convert_source
    from mecha_exp.sources.quantised.view import notes_on, require_plain
    from mecha_exp.sources.search import find_model
    from mecha_exp.terminal.bars import byte_bar

    load_model_configs()
    target = resolve(options.to)
    config = resolve(options.config) if options.config else None
    with open_stored(find_model(str(options.model), options.models_dir)) as stored:
        model = require_plain({"model": stored}, "dequantise" if options.dequantise else "error")["model"]
        for note in notes_on([model]):
            print_line(note)
        source = convert_source(model, target, config)
        destination = _destination(options, target, source)
        metadata = {"format": "pt"} | {k: v for k, v in model.metadata.items() if k not in PROVENANCE_KEYS}
        size = sum(source.info(key).nbytes for key in source.keys())
        began = time.monotonic()
        with byte_bar("converting", size) as advance:
            copied = write_source(source, destination, metadata, advance, signature=source.resume_token)
        _report(model, source, target)
        seconds = time.monotonic() - began
        print_line(str(copied.path))
        keys, there = (
            counted(len(source.keys()), "key"),
            counted(copied.resumed, "of them was", "of them were"),
        )
        resumed = f"; {there} there already" if copied.resumed else ""
        stdout.print(f"converted {keys} in {seconds:.2f} s: {human_bytes(size)}{resumed}")
        if PIPELINE in destination.small_files and destination.is_folder:
            print_line(f"{NO_TOKENIZER} {TOKENIZERS[target.architecture]}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "convert",
        "Write a model in another format. The numbers are copied as they are: converting back "
        "gives the same bytes.",
        EXAMPLE,
    )
    parser.add_argument("model", type=Path, help="a file or a folder")
    parser.add_argument(
        "--to", required=True, metavar="FORMAT", help="a model config, such as sdxl-diffusers"
    )
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="PATH", help="a .safetensors file, or a folder"
    )
    parser.add_argument("--config", metavar="FORMAT", help="what the model is (default: found by its keys)")
    parser.add_argument(
        "--dequantise",
        action="store_true",
        help="read a quantised model as the numbers that its codes stand for, in float32 (default: an error)",
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="FOLDER",
        help="a model of the same format, whose small files (config.json, tokenizer, ...) are copied along; "
        "without it the configurations of the built-in formats are written",
    )
    add_models_dir(parser, "where the model is looked for, after the current folder; may be repeated")
    return parser


def _destination(options: argparse.Namespace, target: ModelConfig, source: ConvertedSource) -> Destination:
    from mecha_exp.checkpoint import Destination, Template, open_stored
    from mecha_exp.sources.search import find_model

    infos = {key: source.info(key) for key in source.keys()}
    tensors = {key: (info.dtype, info.shape) for key, info in infos.items()}
    present = {target.component_of(key) for key in tensors}
    folders = _folders([part for part in target.parts if part.name in present])
    if options.like is None:
        beside = _small_files(target, present)
        return Destination(options.output, tensors, components=folders, small_files=beside)
    like = find_model(str(options.like), options.models_dir)
    with open_stored(like) as other:
        theirs = {key: other.info(key) for key in other.keys()}
        template = Template(like, {key: (info.dtype, info.shape) for key, info in theirs.items()})
    if not template.fits(tensors):
        raise CheckpointError(
            f"--like {options.like} is not in the format {target.identifier}: most of its keys do not match."
        )
    return Destination(options.output, tensors, template=template, components=folders)


def _small_files(target: ModelConfig, present: Collection[str]) -> dict[str, Path]:
    """The configuration files of the present parts; that of the pipeline only if all parts are present."""
    from mecha_exp.architectures import small_files
    from mecha_exp.checkpoint.folder import PIPELINE

    absent = {part.prefix.removesuffix(".") for part in target.parts if part.name not in present}
    return {
        name: path
        for name, path in small_files(target.identifier).items()
        if name.partition("/")[0] not in (absent | {PIPELINE} if absent else absent)
    }


def _folders(parts: Sequence[Part]) -> list[Component]:
    """A sub-folder for each part of a pipeline, with the file names that diffusers expects."""
    from mecha_exp.checkpoint import Component
    from mecha_exp.checkpoint.folder import STEMS
    from mecha_exp.checkpoint.safetensors.header import SUFFIX

    components = []
    for part in parts:
        name = part.prefix.removesuffix(".")
        if "." in name or part.layout is None:
            return []
        is_text_model = part.layout.name == "clip_hf"
        components.append(Component(name, Path(name) / (STEMS[0 if is_text_model else 1] + SUFFIX)))
    return components


def _report(model: StateDictSource, source: ConvertedSource, target: ModelConfig) -> None:
    """Print the keys that the other format cannot hold, and its components that the model lacks."""
    if source.unused:
        stdout.print(f"left out: {some(source.unused, 4)}, for which {target.identifier} has no place")
    absent = [name for name, keys in target.components().items() if keys.keys().isdisjoint(source.keys())]
    absent = [
        name for name in absent if any(not info.optional for info in target.components()[name].values())
    ]
    if absent:
        stdout.print(f"without: {', '.join(absent)}, which {model.name} does not have")
