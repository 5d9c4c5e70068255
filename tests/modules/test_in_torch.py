"""Merge methods on plain tensors and on torch modules."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import mecha_exp as m
from mecha_exp.method_api.method import Kind
from mecha_exp.method_api.registry import all_methods


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


A, B = rand(6, 5), rand(6, 5, seed=1)


def test_a_composite_of_tensors_is_a_tensor():
    merged = m.eager(m.ties_sum)(A, B, k=1.0)

    assert torch.equal(merged, m.ties_sum.__wrapped__(A, B, k=1.0))
    torch.testing.assert_close(merged, torch.where(A.sign() == B.sign(), (A + B) / 2, 0.0))
    assert int((m.eager(m.ties_sum)(A, k=0.5) != 0).sum()) == 16


def test_a_tensor_and_a_file_are_merged_alike():
    for method, named in (
        (m.slerp, {"alpha": 0.3}),
        (m.weighted_sum, {"alpha": 0.3}),
        (m.geometric_median, {}),
    ):
        of_files = m.merge(method(m.model({"w": A}), m.model({"w": B}), **named))["w"]
        assert torch.equal(m.eager(method)(A, B, **named), of_files)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_result_has_the_dtype_of_the_first_tensor(dtype: torch.dtype):
    merged = m.eager(m.weighted_sum)(A.to(dtype), B.to(dtype), alpha=0.25)

    assert merged.dtype is dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    torch.testing.assert_close(merged, torch.lerp(A.to(dtype).to(wide), B.to(dtype).to(wide), 0.25).to(dtype))


def test_no_tensors_sum_to_zero_and_empty_ones_stay_empty():
    assert m.ties_sum.__wrapped__(k=0.5) == 0
    assert m.ties_sum.__wrapped__(torch.tensor([]), torch.tensor([]), k=0.5).numel() == 0


def test_every_composite_of_tensors_alone_takes_tensors():
    """Those that need whole models or other keys say so."""
    tried = 0
    for method in all_methods():
        takes = [p for p in method.signature.parameters if p.required]
        is_plain = all(p.is_model and not p.is_state_dict for p in takes)
        builtin = method.__wrapped__.__module__.startswith("mecha_exp.methods")
        is_number = method.signature.returned.spaces == ("param",)
        if method.kind is not Kind.COMPOSITE or not is_plain or not builtin or is_number:
            continue
        count = sum(2 if p.variadic else 1 for p in takes)
        merged = method.__wrapped__(*(rand(6, 5, seed=n) for n in range(count)))
        assert merged.shape == (6, 5), method.identifier
        tried += 1
    assert tried > 20


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: m.eager(m.slerp)(A, B, alhpa=0.3), m.RecipeError, "Did you mean 'alpha'"),
        (
            lambda: m.eager(m.slerp)(A.int(), B.int()),
            m.RecipeError,
            "torch.int32 is not merged: whole",
        ),
        (lambda: m.eager(m.geometric_median)(), m.RecipeError, "geometric_median: give one tensor at least"),
        (lambda: m.eager(m.weighted_sum)(A, B[:3]), m.CheckpointError, "[3, 5]"),
        (lambda: m.merge_modules(m.slerp, []), m.RecipeError, "merge_modules: give one module at least"),
        (
            lambda: m.merge_modules(lambda a: 1, [nn.Linear(2, 2)]),
            m.RecipeError,
            "returned int, not a",
        ),
        (lambda: m.load_into(nn.Linear(2, 2), 3), m.RecipeError, "expected a path, a recipe or a state dict"),
        (lambda: m.load_into(nn.Linear(2, 2), {"weight": rand(2, 3)}), m.CheckpointError, "lacks 1 key of"),
        (
            lambda: m.load_into(nn.Linear(2, 2), {"wieght": rand(2)}),
            m.CheckpointError,
            "Did you mean 'weight'",
        ),
        (
            lambda: m.load_into(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2).state_dict()),
            m.CheckpointError,
            "2 tensors of the module are on the meta device, without values: weight, bias. Give it memory",
        ),
        (
            lambda: m.load_into(nn.Linear(2, 2, bias=False), {"weight": torch.ones(2, 2).int()}),
            m.CheckpointError,
            "weight is torch.float32 in the module and torch.int32 in the source",
        ),
        (
            lambda: m.load_into(
                nn.BatchNorm1d(1, affine=False),
                {"running_mean": rand(1)}
                | {"running_var": rand(1), "num_batches_tracked": torch.tensor(3.7)},
            ),
            m.CheckpointError,
            "num_batches_tracked is torch.int64 in the module and torch.float32 in the source",
        ),
        (
            lambda: m.load_into(nn.Linear(1, 1, bias=False), {"weight": [[1.0]]}),
            m.CheckpointError,
            "weight is a tensor in the module and list in the source",
        ),
        (
            lambda: m.merge_modules(m.n_average, [nn.Linear(1, 1).state_dict()]),
            m.RecipeError,
            "merge_modules: expected torch modules, got OrderedDict",
        ),
        (
            lambda: m.merge_modules(m.n_average, [nn.Linear(1, 1)], output="merged.safetensors"),
            m.RecipeError,
            "merge_modules: it returns a module",
        ),
    ],
)
def test_what_cannot_be_done_is_an_error(call, kind: type[Exception], message: str):
    with pytest.raises(kind, match=re.escape(message)):
        call()


class Tied(nn.Module):
    """An embedding that is the output layer, a frozen layer, and a counter."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed, self.head, self.frozen = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = rand(*parameter.shape, seed=seed + number)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.to(dtype)


def test_modules_are_merged_with_their_ties_and_frozen_parameters():
    first, second = Tied(0), Tied(50)
    before = {key: tensor.clone() for key, tensor in first.state_dict().items()}

    merged = m.merge_modules(lambda a, b: m.weighted_sum(a, b, alpha=0.25), [first, second])

    for key, tensor in merged.named_parameters():
        torch.testing.assert_close(tensor.data, torch.lerp(before[key], second.state_dict()[key], 0.25))
        assert torch.equal(first.state_dict()[key], before[key])
    assert merged.head.weight is merged.embed.weight
    assert [n for n, p in merged.named_parameters() if not p.requires_grad] == [
        "frozen.weight",
        "frozen.bias",
    ]


def test_a_file_is_loaded_into_a_module(tmp_path: Path):
    source, module = Tied(0), Tied(50, torch.bfloat16)
    stored = {k: v.clone() for k, v in source.state_dict().items() if k != "head.weight"}
    save_file(stored, tmp_path / "merged.safetensors")
    pointer = module.embed.weight.data_ptr()

    assert m.load_into(module, tmp_path / "merged.safetensors") is module

    assert module.head.weight is module.embed.weight and module.embed.weight.data_ptr() == pointer
    assert torch.equal(module.embed.weight, source.embed.weight.bfloat16())
    assert not module.frozen.weight.requires_grad


def test_tied_tensors_do_not_get_two_values():
    module, state = Tied(0), {k: v.clone() for k, v in Tied(1).state_dict().items()}
    state["head.weight"] += 1
    before = module.embed.weight.clone()

    with pytest.raises(m.MergeError, match=r"embed\.weight, head\.weight are one tensor in the module"):
        m.load_into(module, state)
    assert torch.equal(module.embed.weight, before)
