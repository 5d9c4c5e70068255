"""LoRA and LyCORIS: what such a file adds to a model, and models' differences as such files.

Model configs hold the names of their tensors (`sd1-kohya_kohya_lora` and others): docs/lora.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mecha_exp import MergeMethod, Parameter, RecipeError, Return, StateDict, merge_method
from mecha_exp.architectures import (
    AdapterConfig,
    ModelConfig,
    View,
    get_all_adapters,
    is_convertible,
    member_of,
    views,
)
from mecha_exp.extensions.merge_methods import adapter_conversion, viewed
from mecha_exp.methods.spectral import (
    BasisIterations,
    BasisSeed,
    UseApproximation,
    kronecker_shapes,
    low_rank_svd,
    singular_parts,
)

Configs = Mapping[str, Sequence[ModelConfig]]
"""The possible model configs of each argument."""

BEGINNINGS = {"kohya": "lora_", "lycoris": "lycoris_", "diffusers": "transformer."}
"""How the names of modules begin, by the naming scheme."""

OF_LORA, OF_LOKR = ("lora_up.weight", "lora_down.weight", "alpha"), ("lokr_w1", "lokr_w2")
OF_DIFFUSERS = ("lora_B.weight", "lora_A.weight")
"""The tensors of a module. Without alpha the product is not scaled, as with an alpha of the rank."""

Rank = Parameter(int, ge=1, help="the rank of each module, or of a tensor that has less the full one")
Ratio = Parameter(float, ge=0, le=1, help="size of the first factor, logarithmically")


def _conversion(configs: Configs) -> MergeMethod:
    """The conversion from what the LoRA may be to what the model may be."""
    ways = (adapter_conversion(a, b) for a in configs["lora"] for b in configs["base"])
    found = next((way for way in ways if way is not None), None)
    if found is None:
        lora, base = (_named(configs[name]) for name in ("lora", "base"))
        if configs["lora"] and lora == base:
            raise RecipeError(
                f"what is given as the LoRA is a model of {lora} itself, as the base is. Models are merged "
                "by recipe=weighted_sum or ties; recipe=extract_lora makes a LoRA of their difference."
            )
        raise RecipeError(
            f"the LoRA is of {lora} and the base of {base}, and no conversion leads from the one to the "
            "other. Say what they are, if that is wrong: model('lora.safetensors', 'sdxl-kohya_kohya_lora')."
        )
    return found


@merge_method(is_interface=True, choose=_conversion, arranges="keys")
def lora_delta(
    lora: Parameter(StateDict[Tensor], "weight"), base: Parameter(StateDict[Tensor], "weight")
) -> Return(Tensor, "delta"):
    """What a LoRA adds to the base at strength 1, in the base's format: up down alpha / rank of each module.

    Of `base` only the model config is asked. LoRA with and without `lora_mid`, LoHa, LoKr and whole
    differences; a tensor that no module changes has a difference of zero. As `convert(lora, base)`, but it is
    found out when a merge is planned what both are.
    Agrees: kohya and LyCORIS to the rounding of float32.
    Source: LoRA, Hu et al. 2021, arXiv:2106.09685; LyCORIS, Yeh et al. 2023, arXiv:2309.14859; sd-mecha.
    """


def _extraction(writer: str, make: Callable[[AdapterConfig, ModelConfig, str], MergeMethod]) -> Any:
    """Return the function that chooses the extraction method for the LoRA names of a writer."""

    def choose(configs: Configs) -> MergeMethod:
        start = BEGINNINGS[writer]
        fitting = [c for c in get_all_adapters() if any(b.startswith(start) for b in c.beginnings)]
        found = [
            (c.on(member_of(c.base, s)), s)
            for c in fitting
            for s in configs["base"]
            if c.base.identifier == s.identifier or is_convertible(s, c.base)
        ]
        if not found:
            raise RecipeError(
                f"there are no names of modules for {_named(configs['base'])}, only for the architectures "
                f"{', '.join(sorted({c.base.architecture for c in fitting}))}."
            )
        adapter, source = min(found, key=lambda f: (f[0].base != f[1], len(f[0].identifier)))
        return make(adapter, source, writer)

    return choose


def _named(configs: Sequence[ModelConfig]) -> str:
    return " or ".join(f"'{config.identifier}'" for config in configs) or "no known model config"


def _in_modules(
    adapter: AdapterConfig, source: ModelConfig, writer: str, suffixes: Sequence[str]
) -> Callable[[Any], None]:
    """`map_keys`: the tensors of a module are made together; `meta` is what of the difference they are of."""
    infos = adapter.base.keys()
    same = adapter.base == source
    by_key = {key: View((key,)) for key in infos} if same else views(source, adapter.base).by_key
    made = {
        tuple(f"{module}.{suffix}" for suffix in suffixes): view
        for key, view in by_key.items()
        if len(infos[key].shape) > 1 and key.endswith(".weight") and adapter.names_of(key)
        for module in [name for name in adapter.modules_of(key) if name.startswith(BEGINNINGS[writer])][:1]
    }

    def map_keys(b: Any) -> None:
        present = {key: key for key in b.base.keys()}
        own = {source.resolve_alias(key): key for key in present} | present
        for outputs, view in made.items():
            if own.keys() >= set(view.sources):
                stored = replace(view, sources=tuple(own[key] for key in view.sources))
                b[outputs] = b.base.keys[stored.sources] @ stored

    return map_keys


def _difference(base: StateDict[Tensor], relation: Any) -> Tensor:
    """The difference that a module is extracted from."""
    made: Tensor = viewed(relation.meta, [base[key] for key in relation.meta.sources])
    return made


@cache
def _lora_extraction(adapter: AdapterConfig, source: ModelConfig, writer: str) -> MergeMethod:
    suffixes = OF_DIFFUSERS if writer == "diffusers" else OF_LORA
    kind = "diffusers_lora" if writer == "diffusers" else "lora"

    @merge_method(
        identifier=f"extract_{kind}_'{adapter.identifier}'_from_'{source.identifier}'",
        register=False,
        skip_unchanged=True,
    )
    class extraction:
        """As `extract_kohya_lora`, for one model config."""

        map_keys = staticmethod(_in_modules(adapter, source, writer, suffixes))

        def __call__(
            self,
            base: Parameter(StateDict[Tensor], "delta"),
            rank: Rank,
            use_approximate_basis: UseApproximation,
            approximate_basis_iters: BasisIterations,
            approximate_basis_seed: BasisSeed,
            **kwargs: Any,
        ) -> Return(Tensor, "weight", adapter.identifier):
            relation = kwargs["key_relation"]
            delta = _difference(base, relation)
            seed = approximate_basis_seed or 0
            basis = (approximate_basis_iters, seed) if use_approximate_basis else None
            return dict(zip(relation.outputs, lora_factors(delta, rank, basis)[: len(suffixes)], strict=True))

    return extraction


@cache
def _lokr_extraction(adapter: AdapterConfig, source: ModelConfig, writer: str) -> MergeMethod:
    @merge_method(
        identifier=f"extract_lokr_'{adapter.identifier}'_from_'{source.identifier}'",
        register=False,
        skip_unchanged=True,
    )
    class extraction:
        """As `extract_kohya_lokr`, for one model config."""

        map_keys = staticmethod(_in_modules(adapter, source, writer, OF_LOKR))

        def __call__(
            self, base: Parameter(StateDict[Tensor], "delta"), kronecker_ratio: Ratio, **kwargs: Any
        ) -> Return(Tensor, "weight", adapter.identifier):
            relation = kwargs["key_relation"]
            factors = kronecker_factors(_difference(base, relation), kronecker_ratio)
            return dict(zip(relation.outputs, factors, strict=True))

    return extraction


def lora_factors(
    delta: Tensor, rank: int, basis: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """up, down and alpha, which make the nearest tensor of a rank: U sqrt(S), sqrt(S) V^T, and the rank.

    Args:
        basis: power iterations and seed of a random subspace to look in; None: the exact decomposition.
    """
    matrix = delta.flatten(1)
    count = min(rank, *matrix.shape)
    of_up = (delta.shape[0], count, *[1] * (delta.ndim - 2))
    of_down = (count, *delta.shape[1:])
    if delta.is_meta:
        return delta.new_empty(of_up), delta.new_empty(of_down), delta.new_empty(())
    u, s, vh = low_rank_svd(matrix, count, *basis) if basis else singular_parts(matrix)
    root = s[:count].sqrt()
    up, down = u[:, :count] * root, root.unsqueeze(-1) * vh[:count]
    return up.reshape(of_up), down.reshape(of_down), torch.tensor(float(count), dtype=delta.dtype)


def kronecker_factors(delta: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """The two tensors whose Kronecker product is nearest; both have the same norm."""
    m1, m2, n1, n2 = kronecker_shapes(tuple(delta.shape), ratio)
    of_first, of_second = (m1, n1), (m2, n2, *delta.shape[2:])
    if delta.is_meta:
        return delta.new_empty(of_first), delta.new_empty(of_second)
    blocks = delta.reshape(m1, m2, n1, -1).transpose(1, 2).reshape(m1 * n1, -1)
    u, s, vh = singular_parts(blocks)
    root = s[0].sqrt()
    return (root * u[:, 0]).reshape(of_first), (root * vh[0]).reshape(of_second)


@merge_method(is_interface=True, choose=_extraction("kohya", _lora_extraction))
def extract_kohya_lora(
    base: Parameter(StateDict[Tensor], "delta"),
    rank: Rank = 8,
    use_approximate_basis: UseApproximation = True,
    approximate_basis_iters: BasisIterations = 2,
    approximate_basis_seed: BasisSeed = 0,
) -> Return(Tensor, "weight"):
    """A difference of models as a LoRA file: U sqrt(S) and sqrt(S) V^T of its `rank` largest singular parts.

    For every tensor of two and more axes that is not the same in both models, with kohya's names; others are
    left out. Exact (Eckart & Young 1936), or in a random subspace (Halko et al. 2011, arXiv:0909.4061). What
    is not in a format with names of modules is converted: SDXL to `sdxl-kohya`. Needs whole tensors.
    Source: sd-mecha.
    """


@merge_method(is_interface=True, choose=_extraction("lycoris", _lora_extraction))
def extract_lycoris_lora(
    base: Parameter(StateDict[Tensor], "delta"),
    rank: Rank = 8,
    use_approximate_basis: UseApproximation = True,
    approximate_basis_iters: BasisIterations = 2,
    approximate_basis_seed: BasisSeed = 0,
) -> Return(Tensor, "weight"):
    """As `extract_kohya_lora`, with the names of LyCORIS, which begin with `lycoris_`.

    Source: sd-mecha.
    """


@merge_method(is_interface=True, choose=_extraction("diffusers", _lora_extraction))
def extract_diffusers_lora(
    base: Parameter(StateDict[Tensor], "delta"),
    rank: Rank = 8,
    use_approximate_basis: UseApproximation = True,
    approximate_basis_iters: BasisIterations = 2,
    approximate_basis_seed: BasisSeed = 0,
) -> Return(Tensor, "weight"):
    """As `extract_kohya_lora`, with the names of diffusers: `transformer.MODULE.lora_A.weight` and `lora_B`.

    For diffusion transformers. A model in another format is converted; alpha is the rank and is not written.
    Source: diffusers for the names; sd-mecha.
    """


@merge_method(is_interface=True, choose=_extraction("kohya", _lokr_extraction))
def extract_kohya_lokr(base: Parameter(StateDict[Tensor], "delta"), kronecker_ratio: Ratio = 0.5) -> Return(
    Tensor, "weight"
):
    """A difference of models as a LoKr file: the two factors of the nearest Kronecker product of each tensor.

    Otherwise as `extract_kohya_lora`. It is the first singular part of a rearrangement, exactly.
    Source: Van Loan & Pitsianis 1993; sd-mecha.
    """


@merge_method(is_interface=True, choose=_extraction("lycoris", _lokr_extraction))
def extract_lycoris_lokr(base: Parameter(StateDict[Tensor], "delta"), kronecker_ratio: Ratio = 0.5) -> Return(
    Tensor, "weight"
):
    """As `extract_kohya_lokr`, with the names of LyCORIS, which begin with `lycoris_`.

    Source: sd-mecha.
    """
