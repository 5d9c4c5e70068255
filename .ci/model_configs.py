"""Remakes the keys of the built-in layouts from the architectures themselves, or checks that they are right.

    python .ci/model_configs.py           # rewrite what follows `keys:` in model_configs/layouts/*.yaml
    python .ci/model_configs.py --check   # only say what differs

Needs diffusers and transformers, which mecha_exp does not: the models are instantiated on torch's meta device
(library_models.py) and say themselves what their keys and shapes are. The names of the original
implementations follow from those by rules. Families (any depth and width) and small layouts are written by
hand and only checked. Whole configs are then compared with the libraries too (model_configs_check.py): single
files by what diffusers itself makes of their keys.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import library_models as models
import torch
from library_models import Shapes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import model_configs_check as check

from mecha_exp.architectures import Component, ModelConfig
from mecha_exp.architectures.library.registry import conversions, find_layout
from mecha_exp.architectures.rules import Conversion

LAYOUTS = Path(__file__).resolve().parent.parent / "model_configs" / "layouts"
PROJECTION = "text_projection.weight"

SD3 = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj.*": "x_embedder.proj.*",
    "time_text_embed.{timestep,text}_embedder.linear_{1,2}.*": "{t,y}_embedder.mlp.{0,2}.*",
    "context_embedder.*": "context_embedder.*",
    "transformer_blocks.{0..23}.norm1{,_context}.linear.*": (
        "joint_blocks.{0..23}.{x,context}_block.adaLN_modulation.1.*"
    ),
    "transformer_blocks.{0..23}.attn.to_{q+k+v}.{weight,bias}": (
        "joint_blocks.{0..23}.x_block.attn.qkv.{weight,bias}"
    ),
    "transformer_blocks.{0..23}.attn.add_{q+k+v}_proj.{weight,bias}": (
        "joint_blocks.{0..23}.context_block.attn.qkv.{weight,bias}"
    ),
    "transformer_blocks.{0..23}.attn.{to_out.0,to_add_out}.*": (
        "joint_blocks.{0..23}.{x,context}_block.attn.proj.*"
    ),
    "transformer_blocks.{0..23}.ff{,_context}.net.{0.proj,2}.*": (
        "joint_blocks.{0..23}.{x,context}_block.mlp.fc{1,2}.*"
    ),
    "norm_out.linear.*": "final_layer.adaLN_modulation.1.*",
    "proj_out.*": "final_layer.linear.*",
}


def main() -> int:
    """Write or check every layout; 1 where something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    options = parser.parse_args()
    with torch.device("meta"):
        generated = {name: make() for name, make in GENERATED.items()}
        checked = {name: make() for name, make in CHECKED.items()}
    if not options.check:
        for name, shapes in generated.items():
            write(LAYOUTS / f"{name}.yaml", shapes)
    differences = [
        line for name, shapes in {**generated, **checked}.items() for line in compare(name, shapes)
    ]
    with torch.device("meta"):
        differences += check.configs()
    sys.stdout.writelines(f"{line}\n" for line in differences)
    sys.stdout.write(
        f"{len(generated) + len(checked)} layouts and {len(check.CONFIGS)} configs: "
        f"{len(differences) or 'no'} differences\n"
    )
    return bool(differences)


def compare(name: str, shapes: Shapes) -> Iterable[str]:
    """What a layout says otherwise than the architecture."""
    layout = ModelConfig(f"{name}-x", [Component("x", layout=find_layout(name))])
    ours = {key: info.shape for key, info in layout.keys().items() if not info.optional or key in shapes}
    for key in sorted(ours.keys() | shapes.keys()):
        if ours.get(key) != shapes.get(key):
            yield f"{name}: {key}: {ours.get(key)} in the layout, {shapes.get(key)} in the architecture"


def write(path: Path, shapes: Shapes) -> None:
    """Put the keys into a layout's file, after what is written there by hand."""
    before, _, _ = path.read_text(encoding="utf-8").partition("\nkeys:\n")
    lines = [f'  "{names}": {list(shape)}\n' for names, shape in compress(shapes)]
    path.write_text(before.rstrip("\n") + "\n\nkeys:\n" + "".join(lines), encoding="utf-8")


def compress(shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    """Brace patterns that stand for exactly these keys, in the order of the model.

    Names are products of alternatives, one for each dotted part. Two that differ in one part are joined to
    one that has the alternatives of both there, until no two can be.
    """
    patterns = [(shape, tuple((part,) for part in key.split("."))) for key, shape in shapes.items()]
    size = 0
    while size != len(patterns):
        size = len(patterns)
        for place in reversed(range(max(len(parts) for _, parts in patterns))):
            patterns = _join(patterns, place)
    return [(".".join(_braces(part) for part in parts), shape) for shape, parts in patterns]


def _join(
    patterns: list[tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]], place: int
) -> list[tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]]:
    joined: dict[object, list[tuple[str, ...]]] = {}
    for shape, parts in patterns:
        rest = (shape, parts[:place], parts[place + 1 :]) if place < len(parts) else (shape, parts)
        known = joined.get(rest)
        if known is None or place >= len(parts):
            joined[rest] = list(parts)
        else:
            known[place] = tuple(dict.fromkeys((*known[place], *parts[place])))
    return [(rest[0], tuple(parts)) for rest, parts in joined.items()]  # type: ignore[index]


def _braces(options: tuple[str, ...]) -> str:
    """`{q,k,v}`, `{0..11}` or `norm{1,2}`."""
    if len(options) == 1:
        return options[0]
    if all(option.isdecimal() for option in options):
        numbers = sorted(map(int, options))
        if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
            return f"{{{numbers[0]}..{numbers[-1]}}}"
        return f"{{{','.join(map(str, numbers))}}}"
    words = {re.sub(r"\d+$", "", option) for option in options}
    if len(words) == 1 and options[0] not in words:
        [word] = words
        return word + "{" + ",".join(option[len(word) :] for option in options) + "}"
    return "{" + ",".join(options) + "}"


def renamed(
    shapes: Shapes, rules: Mapping[str, str] | Conversion, sizes: Mapping[str, int] | None = None
) -> Shapes:
    """The same tensors by the names of another implementation; stacked ones are added up."""
    conversion = rules if isinstance(rules, Conversion) else Conversion.parse(rules)
    made: Shapes = {}
    links = conversion.links(shapes, sizes or {})
    for link in links:
        rows, *columns = shapes[link.here][::-1] if link.way.transposed else shapes[link.here]
        made[link.there] = (made[link.there][0] + rows if link.there in made else rows, *columns)
    if {link.here for link in links} != shapes.keys():
        raise ValueError(f"no rule for {sorted(shapes.keys() - {link.here for link in links})[:5]}")
    return made


def vae_ldm(channels: int = 4, quantised: bool = True) -> Shapes:
    """The autoencoder by its original names; its attention is made of 1x1 convolutions."""
    shapes = renamed(models.vae(channels, quantised), conversions()["vae_diffusers"]["vae_ldm"])
    return {
        key: (*shape, 1, 1) if ".attn_1." in key and len(shape) == 2 else shape
        for key, shape in shapes.items()
    }


def clip_hf() -> Shapes:
    """CLIP's text model; the configs that have a projection name it themselves."""
    return {key: shape for key, shape in models.clip().items() if key != PROJECTION}


def clip_openclip() -> Shapes:
    """The text model of OpenCLIP's ViT-bigG, without its projection."""
    shapes = {key: shape for key, shape in models.clip(**models.CLIP_G).items() if key != PROJECTION}
    return renamed(shapes, conversions()["clip_hf"]["clip_openclip"], {"layers": 32})


def single_file(name: str) -> Shapes:
    """A transformer by the names of its authors, which follow from those of diffusers by rules."""
    sizes = find_layout(f"{name}_diffusers").sizes
    shapes = renamed(models.transformer(name), conversions()[f"{name}_diffusers"][name], sizes)
    return {
        key: shape for key, shape in shapes.items() if name != "flux" or not key.startswith("guidance_in.")
    }


def by_rules(make: Callable[[], Shapes], here: str, there: str) -> Callable[[], Shapes]:
    """A layout that follows from another by the conversion's rules."""
    return lambda: renamed(make(), conversions()[here][there])


GENERATED: dict[str, Callable[[], Shapes]] = {
    "unet_sd1_diffusers": models.unet_sd1,
    "unet_sd1_ldm": by_rules(models.unet_sd1, "unet_sd1_diffusers", "unet_sd1_ldm"),
    "unet_sdxl_diffusers": models.unet_sdxl,
    "unet_sdxl_ldm": by_rules(models.unet_sdxl, "unet_sdxl_diffusers", "unet_sdxl_ldm"),
    "vae_diffusers": models.vae,
    "vae_ldm": vae_ldm,
    "vae16_ldm": lambda: vae_ldm(16, quantised=False),
    "mmdit_sd3": lambda: renamed(models.sd3(), SD3),
}
CHECKED: dict[str, Callable[[], Shapes]] = {
    "clip_hf": clip_hf,
    "clip_openclip": clip_openclip,
    "t5": models.t5,
    **{f"{name}_diffusers": partial(models.transformer, name) for name in models.TRANSFORMERS},
    **{
        name: partial(single_file, name)
        for name in models.TRANSFORMERS
        if f"{name}_diffusers" in conversions()
    },
}


if __name__ == "__main__":
    sys.exit(main())
