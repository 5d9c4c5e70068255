"""The merge methods of mergekit 0.1.5, and what computes the same here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mecha_exp.errors import ConfigError
from mecha_exp.graph.nodes import Node, call
from mecha_exp.mergekit.settings import FLAG, INTEGER, NUMBER, Scalar

SHARED, INPUT, OTHER = "shared", "input", "other"
"""What a parameter has a value for: the whole merge, each input, or each input but the base."""

REQUIRED, OPTIONAL, IGNORED = "required", "optional", "ignored"
"""What the base model is to a method."""

SEED = "seed"
"""A parameter of methods that draw at random; in mergekit it is `--random-seed` of the command."""

NO_EFFECT = "int8_mask"
"""A parameter that decides how mergekit stores masks, and no value of the result: accepted anywhere."""

Arguments: TypeAlias = "dict[str, Any]"
"""The hyperparameters of a call, for one key."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method.

    Attributes:
        kind: of its values.
        scope: what it has a value for.
        default: None is a value that must be given, unless `may_lack`.
        may_lack: whether there is neither a value nor a default.
    """

    kind: str
    scope: str
    default: Scalar | None = None
    may_lack: bool = False


@dataclass(frozen=True)
class Values:
    """The values of all parameters at one key.

    Attributes:
        shared: by name.
        each: by name, those of each input, or of each but the base.
    """

    shared: Mapping[str, Any]
    each: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Method:
    """A merge method of mergekit.

    Attributes:
        parameters: by name.
        base: whether it needs a base model.
        counts: the fewest and the most inputs, the base counted.
        others: the fewest and the most inputs without the base.
        without_effect: the names of parameters that mergekit takes and does not use.
        arguments: the hyperparameters of our method, from the values at a key.
        build: makes the node from the base (or None), the other inputs and the hyperparameters.
    """

    parameters: Mapping[str, Parameter]
    base: str
    arguments: Callable[[Values], Arguments]
    build: Callable[[Node | None, Sequence[Node], Arguments], Node]
    counts: tuple[int, int | None] = (1, None)
    others: tuple[int, int | None] = (0, None)
    without_effect: tuple[str, ...] = ()


# sums and centres


def _linear(base: Node | None, models: Sequence[Node], arguments: Arguments) -> Node:
    return call("linear", *models, **arguments)


def _passthrough(base: Node | None, models: Sequence[Node], arguments: Arguments) -> Node:
    return models[0] if arguments["scale"] == 1.0 else call("passthrough", models[0], **arguments)


def _from_base(method: str) -> Callable[[Node | None, Sequence[Node], Arguments], Node]:
    """A builder for methods of a base and any number of models; without any the result is the base."""

    def build(base: Node | None, models: Sequence[Node], arguments: Arguments) -> Node:
        assert base is not None
        return call(method, base, *models, **arguments) if models else base

    return build


def _on_the_sphere(method: str) -> Callable[[Node | None, Sequence[Node], Arguments], Node]:
    """A builder for methods of models, or of their differences to a base."""

    def build(base: Node | None, models: Sequence[Node], arguments: Arguments) -> Node:
        if len(models) == 1:
            return models[0]
        if base is None:
            return call(method, *models, **arguments)
        return base + call(method, *(model - base for model in models), **arguments)

    return build


def _renamed(**names: str) -> Callable[[Values], Arguments]:
    """The shared values under our names."""
    return lambda values: {ours: values.shared[theirs] for ours, theirs in names.items()}


def _nuslerp_arguments(values: Values) -> Arguments:
    first, second = values.each["weight"]
    flatten, row_wise = values.shared["nuslerp_flatten"], values.shared["nuslerp_row_wise"]
    return {"weight_a": first, "weight_b": second, "flatten": flatten, "row_wise": row_wise}


def _sce_arguments(values: Values) -> Arguments:
    return {"select_topk": values.shared["select_topk"], "equal_below": 1e-6}


# mergekit's generalized task arithmetic: sparsify each delta, elect signs, add


@dataclass(frozen=True)
class _TaskArithmetic:
    """One of the methods that are task arithmetic with sparsified deltas and, some, an election of signs.

    Attributes:
        ours: the name of our method.
        elects: whether signs are elected. Without, dividing by the weights is done to the weights.
        normalize, rescale: the defaults of mergekit.
        sparsifies: whether deltas are made sparse.
        limit: the name of one more parameter of each model, with its default.
    """

    ours: str
    elects: bool
    normalize: bool
    rescale: bool
    sparsifies: bool = True
    limit: tuple[str, float] | None = None

    @property
    def parameters(self) -> dict[str, Parameter]:
        parameters = {
            "normalize": Parameter(FLAG, SHARED, self.normalize),
            "lambda": Parameter(NUMBER, SHARED, 1.0),
            "weight": Parameter(NUMBER, OTHER),
        }
        if self.sparsifies:
            parameters["rescale"] = Parameter(FLAG, SHARED, self.rescale)
            parameters["density"] = Parameter(NUMBER, OTHER, 1.0)
        if self.limit:
            parameters[self.limit[0]] = Parameter(NUMBER, OTHER, self.limit[1])
        if self.is_random:
            parameters[SEED] = Parameter(INTEGER, SHARED, 0)
        return parameters

    @property
    def is_random(self) -> bool:
        """Whether entries are dropped at random."""
        return self.ours.startswith(("dare", "della"))

    def arguments(self, values: Values) -> Arguments:
        """Our hyperparameters; what is divided by is mergekit's, and a density of 0 is a weight of 0."""
        weights = list(values.each["weight"])
        arguments: Arguments = {"scale": values.shared["lambda"]}
        if not self.elects and values.shared["normalize"]:
            total = sum(weights)
            weights = weights if abs(total) < 1e-8 else [weight / total for weight in weights]
        if self.sparsifies:
            arguments |= self._of_sparsity(values, weights)
        return {**arguments, "weights": weights, **self._of_election(values)}

    def _of_sparsity(self, values: Values, weights: list[float]) -> Arguments:
        densities = [min(density, 1.0) for density in values.each["density"]]
        for i, density in enumerate(densities):
            if density <= 0:
                weights[i], densities[i] = 0.0, 1.0
        arguments: Arguments = {"density": densities}
        rescale = values.shared["rescale"]
        if self.is_random:
            arguments |= {SEED: seed} if (seed := values.shared[SEED]) else {}
            arguments["rescale"] = "l1" if rescale else False
        elif rescale and any(density < 1 for density in densities):
            raise ConfigError(
                f"rescale: {self.ours} is not rescaled here. mergekit would scale what is left of each delta "
                "to the L1 norm that it had; remove 'rescale', or use dare_ties or dare_linear."
            )
        if self.limit:
            arguments[self.limit[0]] = list(values.each[self.limit[0]])
        return arguments

    def _of_election(self, values: Values) -> Arguments:
        normalize = values.shared["normalize"]
        if self.ours == "breadcrumbs_ties" and normalize:
            raise ConfigError(
                "normalize: breadcrumbs_ties adds what agrees here, and does not divide it by the weights. "
                "Set normalize: false."
            )
        if self.ours in ("ties", "dare_ties"):
            return {"combine": "mean" if normalize else "sum"}
        return {"normalize": normalize} if self.ours == "della" else {}

    def method(self) -> Method:
        """The entry of the table."""
        without_effect = () if self.sparsifies else ("density", "rescale")
        build = _from_base(self.ours)
        return Method(self.parameters, REQUIRED, self.arguments, build, without_effect=without_effect)


_FAMILY = (
    _TaskArithmetic("task_arithmetic", elects=False, normalize=False, rescale=False, sparsifies=False),
    _TaskArithmetic("ties", elects=True, normalize=True, rescale=False),
    _TaskArithmetic("dare_ties", elects=True, normalize=False, rescale=True),
    _TaskArithmetic("dare_linear", elects=False, normalize=False, rescale=True),
    _TaskArithmetic("breadcrumbs", False, normalize=False, rescale=False, limit=("gamma", 0.01)),
    _TaskArithmetic("breadcrumbs_ties", True, normalize=False, rescale=False, limit=("gamma", 0.01)),
    _TaskArithmetic("della", True, normalize=True, rescale=True, limit=("epsilon", 0.15)),
    _TaskArithmetic("della_linear", False, normalize=False, rescale=True, limit=("epsilon", 0.15)),
)

_WEIGHT = Parameter(NUMBER, OTHER)
_RAM = {"epsilon": Parameter(NUMBER, SHARED, 1e-5)}

METHODS: Mapping[str, Method] = {
    "linear": Method(
        {"weight": Parameter(NUMBER, INPUT), "normalize": Parameter(FLAG, SHARED, True)},
        IGNORED,
        lambda values: {"weights": list(values.each["weight"]), "normalize": values.shared["normalize"]},
        _linear,
    ),
    "karcher": Method(
        {"max_iter": Parameter(INTEGER, SHARED, 10), "tol": Parameter(NUMBER, SHARED, 1e-5)},
        IGNORED,
        _renamed(max_iter="max_iter", tol="tol", zero_below="tol"),
        _on_the_sphere("karcher"),
    ),
    "passthrough": Method(
        {"scale": Parameter(NUMBER, INPUT, may_lack=True)},
        IGNORED,
        lambda values: {"scale": 1.0 if (scale := values.each["scale"][0]) is None else scale},
        _passthrough,
        counts=(1, 1),
    ),
    "slerp": Method(
        {"t": Parameter(NUMBER, SHARED)},
        REQUIRED,
        _renamed(alpha="t"),
        _from_base("slerp_raw"),
        counts=(2, 2),
    ),
    "nuslerp": Method(
        {
            "weight": _WEIGHT,
            "nuslerp_row_wise": Parameter(FLAG, SHARED, False),
            "nuslerp_flatten": Parameter(FLAG, SHARED, True),
        },
        OPTIONAL,
        _nuslerp_arguments,
        _on_the_sphere("nuslerp"),
        others=(2, 2),
    ),
    "multislerp": Method(
        {
            "weight": _WEIGHT,
            "normalize_weights": Parameter(FLAG, SHARED, True),
            "eps": Parameter(NUMBER, SHARED, 1e-8),
        },
        OPTIONAL,
        lambda values: {
            "weights": list(values.each["weight"]),
            **_renamed(normalize_weights="normalize_weights", eps="eps")(values),
        },
        _on_the_sphere("multislerp"),
        others=(1, None),
    ),
    "model_stock": Method(
        {"filter_wise": Parameter(FLAG, SHARED, False)},
        REQUIRED,
        lambda values: {"filter_wise": values.shared["filter_wise"], "cos_eps": 1e-6},
        _from_base("model_stock_pairwise"),
        counts=(3, None),
    ),
    "nearswap": Method(
        {"t": Parameter(NUMBER, SHARED)}, REQUIRED, _renamed(t="t"), _from_base("nearswap"), counts=(2, 2)
    ),
    "arcee_fusion": Method({}, REQUIRED, _renamed(), _from_base("arcee_fusion"), counts=(2, 2)),
    "sce": Method(
        {"select_topk": Parameter(NUMBER, SHARED, 1.0)}, REQUIRED, _sce_arguments, _from_base("sce")
    ),
    "ram": Method(_RAM, REQUIRED, _renamed(epsilon="epsilon"), _from_base("ram")),
    "ramplus_tl": Method(
        {**_RAM, "r": Parameter(NUMBER, SHARED, 0.1), "alpha": Parameter(NUMBER, SHARED, 0.2)},
        REQUIRED,
        _renamed(epsilon="epsilon", r="r", alpha="alpha"),
        _from_base("ramplus_tl"),
    ),
    **{member.ours: member.method() for member in _FAMILY},
}
"""Every merge method of mergekit 0.1.5, by its name there."""
