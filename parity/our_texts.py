"""Write our texts of recipes that sd-mecha has words for: `python -m parity.our_texts FOLDER`."""

import sys
from pathlib import Path

import mecha_exp as m

ODD = 'my "fine" ä.safetensors'
A, B, C = (m.model(f"{name}.safetensors") for name in "abc")


def recipes() -> dict[str, m.Node]:
    """Recipes by the name of their file."""
    diamond = m.slerp(A, B, alpha=0.25)
    deltas = m.subtract(B, A), m.subtract(C, A)
    return {
        "weighted_sum": m.weighted_sum(A, B, alpha=0.3),
        "weighted_sum_by_key": m.weighted_sum(
            A, B, alpha={"wide": 0.2, "kernel": 1.0, "tall": -0.5, "vector": 0}
        ),
        "diamond": m.n_average(diamond, m.weighted_sum(diamond, C, alpha=0.75), diamond),
        "add_difference": m.add_difference(A, m.subtract(B, C), alpha=0.5),
        "negated": A - m.scale(m.subtract(B, C), alpha=2.0),
        "ties": m.add_difference(A, m.ties_sum(*deltas, k=0.5, vote_sgn=True), alpha=0.7),
        "model_stock": m.add_difference(A, m.model_stock(*deltas)),
        "perpendicular": m.add_difference(A, m.perpendicular_component(*deltas), alpha=0.8),
        "train_difference": m.add_difference(
            A, m.subtract(B, C), alpha=m.train_difference_mask(A, B, C, alpha=0.9)
        ),
        "delta_file": m.add_difference(A, m.scale(m.model(B.source, "delta"), alpha=2)),
        "cast": m.weighted_sum(A, B).to(dtype="float32"),
        "fallback": m.weighted_sum(A, B, alpha=0.125) | C,
        "a_path_with_quotes": m.weighted_sum(ODD, B, alpha=1e-05),
        "geometric_median": m.geometric_median(A, B, C, maxiter=5),
        "clamp": m.clamp(A, B, C, stiffness=0.5),
        "dropout": m.add_difference(A, m.dropout_deltas(*deltas, probability=0.0), alpha=0.7),
        "copy_region": m.add_difference(
            C, m.tensor_sum(m.subtract(A, C), m.subtract(B, C), width=0.4, offset=0.25)
        ),
    }


def main(folder: Path) -> None:
    """Write them all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, recipe in recipes().items():
        m.serialize_and_save(recipe, folder / name)
    sys.stdout.write(f"{len(recipes())} texts of ours in {folder}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
