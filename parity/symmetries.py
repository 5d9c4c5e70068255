"""What sd-mecha finds for small networks: `python -m parity.symmetries FILE`, in its environment.

Its methods know SDXL alone, so this asks the parts that they are made of: the search over a graph of
permutations, here that of two hidden layers that share a tensor, and the balance of two sides of a head.
"""

import sys

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.written import hash_of

SHAPES = {
    "0.weight": (12, 5),
    "0.bias": (12,),
    "1.weight": (12,),
    "1.bias": (12,),
    "2.weight": (9, 12),
    "2.bias": (9,),
    "3.weight": (3, 9),
}
HEAD = 4


def drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard normal values."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def found(a: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, Tensor]:
    """a in the order of ref."""
    from sd_mecha.extensions.builtin.merge_methods.rebasin import sdxl_sgm
    from sd_mecha.extensions.builtin.merge_methods.rebasin.perm_graph import PermGraph, PermSlice, Permutation
    from sd_mecha.streaming import TensorMetadata

    graph = PermGraph({key: TensorMetadata(torch.Size(x), torch.float64) for key, x in SHAPES.items()})
    rows, columns = PermSlice(0), PermSlice(1)
    first = dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias"), rows)
    graph.add(Permutation(12, {**first, "2.weight": columns}))
    graph.add(Permutation(9, {"2.weight": rows, "2.bias": rows, "3.weight": columns}))
    (closure,) = graph.closures()
    orders = sdxl_sgm._init_pid_perm(closure, torch.device("cpu"))
    sdxl_sgm._solve_all_components(
        closure, orders, a.__getitem__, ref.__getitem__, torch.device("cpu"), torch.float64, 100
    )
    return sdxl_sgm._apply_inverse_all(closure, orders, a.__getitem__)


def groups_of_sdxl() -> str:
    """The hash of the sets of keys that are permuted together."""
    from sd_mecha.extensions.builtin.merge_methods.rebasin.sdxl_sgm import perm_graph

    return hash_of(closure.keys for closure in perm_graph.closures())


def main(path: str) -> None:
    """Write the file."""
    from sd_mecha.extensions.builtin.merge_methods.balance_attention.algorithms import balance_head_energy

    generator = torch.Generator().manual_seed(23)
    a, ref = ({key: drawn(shape, generator) for key, shape in SHAPES.items()} for _ in range(2))
    q, bias, k = (drawn(shape, generator) for shape in ((8, 7), (8,), (8, 9)))
    with_bias = torch.cat([q, bias.unsqueeze(1)], 1)
    balanced = balance_head_energy(*(x.unflatten(0, (-1, HEAD)) for x in (with_bias, k)))
    golden = {f"a.{key}": x for key, x in a.items()} | {f"ref.{key}": x for key, x in ref.items()}
    golden |= {f"found.{key}": x for key, x in found(a, ref).items()}
    golden |= {"in.q": q, "in.q.bias": bias, "in.k": k}
    golden |= {f"balanced.{name}": x.flatten(0, 1) for name, x in zip("qk", balanced, strict=True)}
    save_file(
        {key: x.contiguous() for key, x in golden.items()}, path, {"groups of sdxl-sgm": groups_of_sdxl()}
    )


if __name__ == "__main__":
    main(sys.argv[1])
