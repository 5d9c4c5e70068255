"""Write recipe texts with sd-mecha, and merge texts with it: `python -m parity.texts tests/golden/texts`.

It runs in the environment of sd-mecha. In the folder `theirs` gets what sd-mecha writes, `ours` holds what
mecha_exp writes (`parity.our_texts`), and `merged.safetensors` gets what sd-mecha makes of all of them.
parity/test_texts.py compares mecha_exp with these files.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import sd_mecha
import torch
from safetensors.torch import load_file, save_file
from sd_mecha.extensions.builtin.merge_methods import linear, ties

from parity.inputs import plain_inputs

NAMES = ("a", "b", "c", 'my "fine" ä')
"""Of the models, each in a file of its own in the current folder."""


def save_models() -> None:
    """The inputs of all texts, as files in the current folder."""
    for name, tensors in zip(NAMES, plain_inputs(), strict=True):
        save_file(tensors, f"{name}.safetensors")


def recipes() -> dict[str, object]:
    """What is written as text, as its users write it."""
    a, b, c, odd = (sd_mecha.model(f"{name}.safetensors") for name in NAMES)
    diamond = sd_mecha.slerp(a, b, alpha=0.25)
    deltas = linear.subtract(b, a), linear.subtract(c, a)
    return {
        "weighted_sum": sd_mecha.weighted_sum(a, b, alpha=0.3),
        "weighted_sum_by_key": sd_mecha.weighted_sum(
            a, b, alpha={"wide": 0.2, "kernel": 1.0, "tall": -0.5, "vector": 0}
        ),
        "diamond": sd_mecha.n_average(diamond, sd_mecha.weighted_sum(diamond, c, alpha=0.75), diamond),
        "add_difference": sd_mecha.add_difference(a, b, c, alpha=0.5),
        "ties": linear.add_difference(a, ties.ties_sum(*deltas, k=0.5, vote_sgn=True), alpha=0.7),
        "model_stock": sd_mecha.n_model_stock(a, b, c),
        "perpendicular": sd_mecha.add_perpendicular(a, b, c, alpha=0.8),
        "train_difference": linear.add_difference(
            a, linear.subtract(b, c), alpha=linear.train_difference_mask(a, b, c, alpha=0.9)
        ),
        "delta_file": linear.add_difference(
            a, linear.scale(sd_mecha.model("b.safetensors", merge_space="delta"), alpha=2)
        ),
        "cast": sd_mecha.weighted_sum(a, b, alpha=0.5).to(dtype=torch.float32),
        "fallback": sd_mecha.weighted_sum(a, b, alpha=0.125) | c,
        "a_path_with_quotes": sd_mecha.weighted_sum(odd, b, alpha=0.5),
        "geometric_median": sd_mecha.geometric_median(a, b, c, maxiter=5),
        "clamp": sd_mecha.clamp(a, b, c, stiffness=0.5),
        # Nothing is drawn at probability 0; the text has `seed=null`.
        "dare": sd_mecha.add_ties_with_dare(a, b, c, probability=0.0, k=0.5, alpha=0.7),
        "dropout": sd_mecha.dropout(a, b, c, probability=0.0, alpha=0.7),
        "copy_region": sd_mecha.tensor_sum(a, b, c, width=0.4, offset=0.25),
        "truncate_rank": linear.add_difference(
            a, sd_mecha.truncate_rank(deltas[0], rank=2, use_approximate_basis=False)
        ),
    }


def texts() -> Iterator[tuple[str, str]]:
    """Each recipe as it is, and as sd-mecha has solved it, which names the config of each model."""
    here = f'model "{Path.cwd()}{os.sep}'
    for name, recipe in recipes().items():
        yield name, sd_mecha.serialize(recipe, finalize=False)
        yield f"{name}_solved", sd_mecha.serialize(recipe).replace(here, 'model "')


def merged(text: str) -> dict[str, torch.Tensor]:
    """What sd-mecha makes of a text; it cannot read the configs of unknown structures that it writes."""
    readable = text.replace('model_config="structural"', "model_config=null")
    sd_mecha.merge(
        sd_mecha.deserialize(readable),
        merge_dtype=torch.float64,
        output_dtype=torch.float64,
        output=Path("merged.safetensors"),
    )
    return {key: tensor.clone() for key, tensor in load_file("merged.safetensors").items()}


def main(folder: Path) -> None:
    """Write their texts, then merge theirs and ours."""
    results: dict[str, torch.Tensor] = {}
    theirs, ours = folder / "theirs", sorted((folder / "ours").glob("*.mecha"))
    theirs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as models:
        os.chdir(models)
        save_models()
        for name, text in texts():
            (theirs / f"{name}.mecha").write_text(text, encoding="utf-8", newline="\n")
        for path in [*sorted(theirs.glob("*.mecha")), *ours]:
            made = merged(path.read_text(encoding="utf-8"))
            results |= {f"{path.parent.name}/{path.stem}|{key}": tensor for key, tensor in made.items()}
        os.chdir(folder)
    save_file(results, folder / "merged.safetensors", metadata={"oracle": "sd-mecha"})
    sys.stdout.write(f"{len(list(theirs.iterdir()))} texts of theirs and {len(ours)} of ours in {folder}\n")


if __name__ == "__main__":
    sd_mecha.set_log_level("ERROR")
    main(Path(sys.argv[1]).absolute())
