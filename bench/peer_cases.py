"""Cases in the words of sd-mecha 1.1.8 and mergekit 0.1.5, by the name of the case or of a method's row.

A row has a peer where its name is here. A method's row has the method's defaults, which are the peer's but
for weights. Read in the peers' own environments, so it imports nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

BY_METHOD = "method:"
"""Before the name of a method, which is called with the inputs and its defaults."""

Recipe: TypeAlias = Callable[..., Any]
"""(sd_mecha, model, ...) -> a recipe."""


def _deltas(peer: Any, base: Any, experts: Sequence[Any]) -> list[Any]:
    return [peer.subtract(expert, base) for expert in experts]


def _method(peer: Any, name: str) -> Any:
    """A method of sd-mecha itself: some of its wrappers of the same name fail."""
    return peer.extensions.merge_methods.resolve(name)


def _ties(peer: Any, base: Any, *experts: Any) -> Any:
    total = peer.ties_sum(*_deltas(peer, base, experts), k=0.2)
    return _method(peer, "add_difference")(base, total, alpha=0.7)


def _dare_ties(peer: Any, base: Any, *experts: Any) -> Any:
    deltas = _deltas(peer, base, experts)
    total = peer.ties_sum_with_dropout(*deltas, probability=0.5, k=1.0, seed=0)
    return _method(peer, "add_difference")(base, total, alpha=1.0)


def _called(name: str) -> Recipe:
    return lambda peer, *models: getattr(peer, name)(*models)


def _rotate(peer: Any, a: Any, b: Any) -> Any:
    return _method(peer, "rotate")(a, b)


def _train_difference(peer: Any, a: Any, b: Any, c: Any) -> Any:
    mask = _method(peer, "train_difference_mask")(a, b, c)
    return _method(peer, "add_difference")(a, peer.subtract(b, c), mask)


_SAME_NAME = (
    *("weighted_sum", "n_average", "slerp", "perpendicular_component", "add_perpendicular"),
    *("geometric_sum", "multiply_quotient", "add_cosine_a", "add_cosine_b", "tensor_sum"),
    *("top_k_tensor_sum", "crossover", "clamp", "n_model_stock"),
    *("geometric_median", "add_ties_with_dare"),
)
SD_MECHA: dict[str, Recipe] = {
    "weighted_sum": lambda peer, a, b: peer.weighted_sum(a, b, alpha=0.3),
    "add_difference": lambda peer, a, b, c: peer.add_difference(a, b, c, alpha=0.7),
    "slerp": lambda peer, a, b: peer.slerp(a, b, alpha=0.3),
    "perpendicular": _called("perpendicular_component"),
    "ties": _ties,
    "dare_ties": _dare_ties,
    "n_average": _called("n_average"),
    "keys": lambda peer, a, b: peer.weighted_sum(a, b, alpha=0.3),
    "centres": _called("n_model_stock"),
    "difference": _train_difference,
    "frequency": lambda peer, a, b: peer.crossover(a, b, alpha=0.3),
    "limiting": lambda peer, *models: peer.clamp(*models, stiffness=0.3),
    "slicing": lambda peer, a, b: peer.tensor_sum(a, b, width=0.4),
    "spectral": _rotate,
    "nine_tenths": lambda peer, *models: peer.add_ties_with_dare(*models, probability=0.9, k=0.2),
    "by_rank": lambda peer, a, b: peer.top_k_tensor_sum(a, b, width=0.4),
    "cosine": _called("add_cosine_b"),
    **{BY_METHOD + name: _called(name) for name in _SAME_NAME},
    BY_METHOD + "train_difference": _train_difference,
    BY_METHOD + "rotate": _rotate,
}

Config: TypeAlias = Callable[[str, Sequence[str]], dict[str, Any]]
"""(base, experts) -> a configuration without its dtype."""


def _beside_base(method: str, weight: float | None = None, **settings: Any) -> Config:
    """A method of a base and experts, which have one weight."""

    def config(base: str, experts: Sequence[str]) -> dict[str, Any]:
        given = {} if weight is None else {"weight": weight}
        models = [{"model": path, "parameters": given} for path in experts]
        return {"merge_method": method, "base_model": base, "models": models, "parameters": settings}

    return config


def _of_all(method: str, *weights: float, **settings: Any) -> Config:
    """A method of equals; one weight stands for all."""

    def config(base: str, experts: Sequence[str]) -> dict[str, Any]:
        paths = [base, *experts]
        shares = weights if len(weights) > 1 else weights * len(paths)
        models = [
            {"model": path, "parameters": {"weight": share}}
            for path, share in zip(paths, shares or [1.0] * len(paths), strict=True)
        ]
        return {"merge_method": method, "models": models, "parameters": settings}

    return config


def _add_difference(base: str, experts: Sequence[str]) -> dict[str, Any]:
    return _beside_base("task_arithmetic", 0.7)(base, experts[:1])


MERGEKIT: dict[str, Config] = {
    "weighted_sum": _of_all("linear", 0.7, 0.3),
    "add_difference": _add_difference,
    "ties": _beside_base("ties", 0.7, density=0.2),
    "dare_ties": _beside_base("dare_ties", 0.5, density=0.5),
    "n_average": _of_all("linear"),
    "dropout": _beside_base("della", 1.0, density=0.5, epsilon=0.15),
    "linear": _beside_base("task_arithmetic", 0.3),
    "outliers": _beside_base("breadcrumbs", 1.0, density=0.9, gamma=0.01),
    "spherical": _of_all("karcher"),
    "trimming": _beside_base("ties", 1.0, density=0.2),
    "importance": _beside_base("arcee_fusion"),
    BY_METHOD + "linear": _of_all("linear"),
    BY_METHOD + "task_arithmetic": _beside_base("task_arithmetic", 1.0),
    BY_METHOD + "slerp_raw": _beside_base("slerp", t=0.5),
    BY_METHOD + "nuslerp": _of_all("nuslerp"),
    BY_METHOD + "multislerp": _of_all("multislerp"),
    BY_METHOD + "karcher": _of_all("karcher"),
    BY_METHOD + "ties": _beside_base("ties", 1.0, density=1.0),
    BY_METHOD + "dare_linear": _beside_base("dare_linear", 1.0, density=0.5),
    BY_METHOD + "dare_ties": _beside_base("dare_ties", 1.0, density=0.5),
    BY_METHOD + "della": _beside_base("della", 1.0, density=0.5, epsilon=0.15),
    BY_METHOD + "della_linear": _beside_base("della_linear", 1.0, density=0.5, epsilon=0.15),
    BY_METHOD + "breadcrumbs": _beside_base("breadcrumbs", 1.0, density=0.9, gamma=0.01),
    BY_METHOD + "breadcrumbs_ties": _beside_base("breadcrumbs_ties", 1.0, density=0.9, gamma=0.01),
    BY_METHOD + "sce": _beside_base("sce"),
    BY_METHOD + "nearswap": _beside_base("nearswap", t=0.0001),
    BY_METHOD + "arcee_fusion": _beside_base("arcee_fusion"),
    BY_METHOD + "model_stock_pairwise": _beside_base("model_stock"),
}
