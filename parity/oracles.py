"""Write what an oracle makes of the inputs: `python -m parity.oracles sd-mecha golden.safetensors`.

It runs in the oracle's own environment, which needs torch, safetensors and the oracle alone. The tests
compare the methods of mecha_exp with the file under the same names (parity/test_oracles.py).
"""

import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parity.inputs import inputs

Oracle = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Graph = Callable[..., object]
KEYS = ("column", "wide")
"""What is compared in half precision, and of whole merges by the oracle."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""What the inputs are rounded to. The arithmetic is float64 for all of them."""


def sd_mecha() -> dict[str, Oracle]:
    """The methods of sd-mecha, on (x0, x1, x2, x3)."""
    import sd_mecha
    from sd_mecha.extensions.builtin.merge_methods import cosine, kronecker, linear, slicing, svd, ties

    def of(method: object, *chosen: int, **settings: object) -> Oracle:
        def oracle(*x: Tensor) -> Tensor:
            given = {k: torch.tensor(v, dtype=x[0].dtype) if k == "alpha" else v for k, v in settings.items()}
            return method.__wrapped__(*(x[i].clone() for i in chosen), **given)

        return oracle

    def of_deltas(method: object, **settings: object) -> Oracle:
        return lambda *x: method.__wrapped__(*(model - x[0] for model in x[1:]), **settings)

    def of_state_dicts(method: object, *chosen: int, **settings: object) -> Oracle:
        def oracle(*x: Tensor) -> Tensor:
            given = {k: torch.tensor(v, dtype=x[0].dtype) if k == "alpha" else v for k, v in settings.items()}
            return method.__wrapped__(*({"w": x[i]} for i in chosen), key="w", **given)

        return oracle

    def crossover(**settings: float) -> Oracle:
        return lambda *x: sd_mecha.crossover.__wrapped__(x[0], x[1], **settings)

    return {
        "weighted_sum": of_state_dicts(linear.weighted_sum, 0, 1, alpha=0.3),
        "n_average": of_state_dicts(linear.n_average, 0, 1, 2, 3),
        "slerp": of(linear.slerp, 0, 1, alpha=0.3),
        "perpendicular_component": of(linear.perpendicular_component, 0, 1),
        "train_difference_mask": of(linear.train_difference_mask, 0, 1, 2, alpha=0.7),
        "add_opposite_mask": of(linear.add_opposite_mask, 0, 1, 2, alpha=0.7),
        "add_strict_opposite_mask": of(linear.add_strict_opposite_mask, 0, 1, 2, alpha=0.7),
        "geometric_sum": of(linear.geometric_sum, 0, 1, alpha=0.3),
        "multiply_quotient": of(linear.multiply_quotient, 0, 1, 2, alpha=0.7),
        "add_cosine_a": of(cosine.add_cosine_a, 0, 1, alpha=0.2),
        "add_cosine_b": of(cosine.add_cosine_b, 0, 1, alpha=0.2),
        "ties_sum": of_deltas(ties.ties_sum, k=0.4),
        "ties_sum by value": of_deltas(ties.ties_sum, k=0.7, vote_sgn=True),
        "ties_sum_extended": of_deltas(ties.ties_sum_extended, k=0.4, apply_stock=True),
        "ties_sum_extended with stock": of_deltas(ties.ties_sum_extended, k=0.4, apply_stock=False),
        "ties_sum_extended with median": of_deltas(
            ties.ties_sum_extended, k=0.6, apply_median=True, maxiter=7
        ),
        "ties_sum_with_dropout": of_deltas(
            ties.ties_sum_with_dropout, probability=0.0, k=0.4, apply_stock=True
        ),
        "model_stock": of_deltas(ties.model_stock),
        "geometric_median": of(ties.geometric_median, 0, 1, 2, 3, maxiter=7),
        "tensor_sum": of(slicing.tensor_sum, 0, 1, width=0.4, offset=0.3),
        "tensor_sum around the end": of(slicing.tensor_sum, 0, 1, width=0.6, offset=0.7),
        "tensor_sum backwards": of(slicing.tensor_sum, 0, 1, width=-0.5, offset=0.25),
        "top_k_tensor_sum": of(slicing.top_k_tensor_sum, 0, 1),
        "top_k_tensor_sum in a window": of(slicing.top_k_tensor_sum, 0, 1, width=0.45, offset=0.35),
        "top_k_tensor_sum around the end": of(slicing.top_k_tensor_sum, 0, 1, width=0.5, offset=0.8),
        "crossover": crossover(alpha=0.37),
        "crossover with a slope": crossover(alpha=0.37, tilt=0.6),
        "crossover turned": crossover(alpha=0.37, tilt=2.6),
        "clamp": of(sd_mecha.clamp, 0, 1, 2, 3),
        "clamp, stiff": of(sd_mecha.clamp, 0, 1, 2, 3, stiffness=0.7),
        "rotate": of_state_dicts(svd.rotate, 0, 1, alpha=0.0, centralization=0.6),
        "rotate and blend": of_state_dicts(svd.rotate, 0, 1, alpha=0.4, centralization=0.6),
        "rotate in part": of_state_dicts(
            svd.rotate, 0, 1, alignment=0.3, alpha=0.4, centralization=0.6, stiefel_eps=1e-12
        ),
        "truncate_rank": of(svd.truncate_rank, 0, rank=3, use_approximate_basis=False),
        "get_rank_from_ratio": of(svd.get_rank_from_ratio, 0, ratio=0.4),
        "truncate_kronecker": of(kronecker.truncate_kronecker, 0, use_approximate_basis=False),
        "truncate_kronecker by ratio": of(
            kronecker.truncate_kronecker, 0, kronecker_ratio=0.25, use_approximate_basis=False
        ),
    }


def sd_mecha_graphs() -> dict[str, Graph]:
    """What sd-mecha composes of its methods, merged by sd-mecha itself. Alphas are float32 numbers."""
    import sd_mecha
    from sd_mecha.extensions.builtin.merge_methods import linear

    return {
        "add_difference": lambda a, b, c, d: sd_mecha.add_difference(a, b, c, alpha=0.75),
        "add_difference, clamped": lambda a, b, c, d: sd_mecha.add_difference(
            a, b, c, alpha=0.75, clamp_to_ab=True
        ),
        "subtract and scale": lambda a, b, c, d: linear.add_difference(
            a, linear.scale(linear.subtract(b, c), alpha=-0.5)
        ),
        "add_perpendicular": lambda a, b, c, d: sd_mecha.add_perpendicular(a, b, c, alpha=0.75),
        "n_model_stock": lambda a, b, c, d: sd_mecha.n_model_stock(a, b, c, d),
        "add_ties_with_dare": lambda a, b, c, d: sd_mecha.add_ties_with_dare(
            a, b, c, d, probability=0.0, k=0.4, alpha=0.75, apply_stock=True
        ),
        "copy_region": lambda a, b, c, d: sd_mecha.copy_region(a, b, width=0.4, offset=0.3),
        "copy_region of differences": lambda a, b, c, d: sd_mecha.copy_region(a, b, c, width=0.4, offset=0.3),
        "copy_region by rank": lambda a, b, c, d: sd_mecha.copy_region(
            a, b, c, width=0.45, offset=0.35, top_k=True
        ),
    }


def mergekit() -> dict[str, Oracle]:
    """The methods of mergekit; the first model is the base of those that have one."""
    from mergekit.merge_methods import merge_tensors

    def of(method: str, base: bool = True, count: int = 4, **settings: object) -> Oracle:
        def oracle(*x: Tensor) -> Tensor:
            chosen = [tensor.clone() for tensor in x[:count]]
            return merge_tensors(chosen, method, base_index=0 if base else None, parameters=settings)

        return oracle

    weights = [0.5, 0.3, 0.9]  # of the models that are no base
    return {
        "linear": of("linear", base=False, weight=[0.2, *weights]),
        "linear, not normalized": of("linear", base=False, weight=[0.2, *weights], normalize=False),
        "task_arithmetic": of("task_arithmetic", weight=weights, **{"lambda": 0.8}),
        "passthrough": of("passthrough", base=False, count=1, scale=0.7),
        "slerp_raw": of("slerp", count=2, t=0.3),
        "nuslerp": of("nuslerp", base=False, count=2, weight=[0.3, 0.9]),
        "nuslerp from a base": of("nuslerp", count=3, weight=[0.3, 0.9]),
        "nuslerp by the last axis": of(
            "nuslerp", base=False, count=2, weight=[0.3, 0.9], nuslerp_flatten=False
        ),
        "nuslerp by the first axis": of(
            "nuslerp", base=False, count=2, weight=[0.3, 0.9], nuslerp_flatten=False, nuslerp_row_wise=True
        ),
        "multislerp": of("multislerp", base=False, weight=[0.2, *weights]),
        "multislerp from a base": of("multislerp", weight=weights),
        "karcher": of("karcher", base=False),
        "ties": of("ties", weight=weights, density=0.4, **{"lambda": 0.8}),
        "ties, not normalized": of("ties", weight=weights, density=0.4, normalize=False),
        "ties with opposite weights": of("ties", weight=[1.0, -0.5, 0.3], density=[0.3, 0.6, 1.0]),
        "dare_linear": of("dare_linear", weight=weights, density=1.0),
        "dare_ties": of("dare_ties", weight=weights, density=1.0),
        "della": of("della", weight=weights, density=1.0),
        "della_linear": of("della_linear", weight=weights, density=1.0),
        "breadcrumbs": of("breadcrumbs", weight=weights, density=0.6, gamma=0.1),
        "breadcrumbs with too much gamma": of("breadcrumbs", weight=weights, density=0.9, gamma=0.3),
        "breadcrumbs_ties": of("breadcrumbs_ties", weight=weights, density=0.6, gamma=0.1),
        "sce": of("sce"),
        "sce of some": of("sce", select_topk=0.3),
        "ram": of("ram", epsilon=0.7),
        "ramplus_tl": of("ramplus_tl", epsilon=0.7, r=0.3, alpha=0.4),
        "nearswap": of("nearswap", count=2, t=0.6),
        "arcee_fusion": of("arcee_fusion", count=2),
        "model_stock_pairwise": of("model_stock"),
        "model_stock_pairwise by row": of("model_stock", filter_wise=True),
    }


def sd_mecha_mistakes() -> dict[str, Callable[[], object]]:
    """Where sd-mecha is known to be wrong: what it gives, or the error that it fails with."""
    import sd_mecha
    from sd_mecha.extensions.builtin.merge_methods import linear, ties

    a, b, c = (model["wide"] for model in inputs(torch.float32)[:3])
    nodes = [sd_mecha.model(f"{number}.safetensors") for number in range(3)]

    def stock_of_one() -> object:
        return ties.model_stock.__wrapped__(b - a)

    def unused_stock() -> object:
        plain, applied = (
            ties.ties_sum_extended.__wrapped__(b - a, c - a, k=1.0, apply_stock=apply)
            for apply in (False, True)
        )
        mean = ties.ties_sum.__wrapped__(b - a, c - a, k=1.0)
        return (
            f"true gives the plain mean: {torch.equal(applied, mean)}, false too: {torch.equal(plain, mean)}"
        )

    return {
        "slerp of 2 and -3, alpha 0.3": lambda: linear.slerp.__wrapped__(
            torch.tensor([2.0]), torch.tensor([-3.0]), alpha=torch.tensor(0.3)
        ).item(),
        "ties_sum_extended, apply_stock": unused_stock,
        "model_stock of one delta": stock_of_one,
        "add_difference_ties": lambda: sd_mecha.add_difference_ties(*nodes),
        "add_difference of a delta": lambda: sd_mecha.add_difference(nodes[0], sd_mecha.subtract(*nodes[1:])),
        "rotate of differences": lambda: sd_mecha.rotate(*nodes),
        "dropout, overlap 0.5": lambda: ties.dropout.__wrapped__(b - a, c - a, overlap=0.5),
    }


def mergekit_mistakes() -> dict[str, Callable[[], object]]:
    """Where mergekit is known to be wrong: what it gives, or the error that it fails with."""
    from mergekit.merge_methods import merge_tensors

    zeros, x = torch.zeros(5), torch.tensor([3.0, -4.0, 0.0])
    equal = torch.tensor([1.0, -1.0, 1.0, 1.0, 2.0])
    half = {"weight": 1.0, "density": 0.6}
    return {
        "ties of equal magnitudes": lambda: merge_tensors(
            [zeros, equal], "ties", base_index=0, parameters=half
        ).tolist(),
        "ties of the same, turned round": lambda: (
            merge_tensors([zeros, equal.flip(0)], "ties", base_index=0, parameters=half).flip(0).tolist()
        ),
        "multislerp of x, -x and 0": lambda: merge_tensors(
            [x, -x, 0 * x], "multislerp", base_index=None, parameters={"weight": 1.0}
        ),
        "linear, weights 1 and -1": lambda: merge_tensors(
            [x, x], "linear", base_index=None, parameters={"weight": [1.0, -1.0]}
        ).tolist(),
        "model_stock of one model": lambda: merge_tensors(
            [zeros, equal], "model_stock", base_index=0
        ).tolist(),
    }


def outcome(attempt: Callable[[], object]) -> str:
    """What comes of it, in a few words."""
    try:
        return str(attempt())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def merged(graph: Graph, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What sd-mecha makes of a graph over the models, in float64."""
    import sd_mecha

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.safetensors" for number in range(4)]
        for path, model in zip(paths, inputs(dtype), strict=True):
            save_file({key: model[key].contiguous() for key in KEYS}, path)
        made = Path(folder) / "made.safetensors"
        double = {"merge_dtype": torch.float64, "output_dtype": torch.float64}
        sd_mecha.merge(graph(*map(sd_mecha.model, paths)), **double, output=made)
        yield from load_file(made).items()


def main(oracle: str, output: str) -> None:
    """Run every method of an oracle on every key and dtype, and write what it gives as float64."""
    methods = {"sd-mecha": sd_mecha, "mergekit": mergekit}[oracle]()
    graphs = sd_mecha_graphs() if oracle == "sd-mecha" else {}
    mistakes = {"sd-mecha": sd_mecha_mistakes, "mergekit": mergekit_mistakes}[oracle]()
    results: dict[str, Tensor] = {}
    torch.set_default_dtype(torch.float64)  # or small values that oracles make of whole numbers are float32
    for name, method in methods.items():
        for label, dtype in DTYPES.items():
            models = inputs(dtype)
            for key in models[0] if label == "float32" else KEYS:
                made = torch.as_tensor(method(*(model[key] for model in models)), dtype=torch.float64)
                results[f"{name}|{label}|{key}"] = made.contiguous().clone()
    for name, graph in graphs.items():
        for label, dtype in DTYPES.items():
            results |= {f"{name}|{label}|{key}": tensor for key, tensor in merged(graph, dtype)}
    said = json.dumps({name: outcome(attempt) for name, attempt in mistakes.items()})
    about = {"oracle": f"{oracle} {importlib.metadata.version(oracle)}", "mistakes": said}
    save_file(results, output, metadata=about)
    sys.stdout.write(
        f"{len(methods) + len(graphs)} methods, {Path(output).stat().st_size:,} bytes in {output}\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
