"""Networks on a GPU: each tensor is copied once, and those of the next model while one is measured."""

import gc
import weakref

import pytest
import simulated_gpu
import torch
from counted_transfers import Counting
from torch import nn

from mecha_exp.evaluation.transfers import Transfers, expect, transfers_to
from mecha_exp.evaluators.common import module_network
from mecha_exp.evaluators.common.networks import _slot

GPU = simulated_gpu.NAME
X = torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.fixture
def transfers(monkeypatch):
    _slot.cache_clear()
    counting = Counting(torch.device(GPU))
    monkeypatch.setattr("mecha_exp.evaluation.transfers._transfers", {torch.device(GPU): counting})
    return counting


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def model(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {key: tensor.detach() for key, tensor in classifier().state_dict().items()}


def answers(weights: dict[str, torch.Tensor], device: str) -> torch.Tensor:
    with module_network(classifier, weights, name=f"classifier on {device}", device=device) as module:
        return module(X.to(device)).cpu()


@pytest.mark.parametrize("is_expected", [False, True])
def test_points_have_the_answers_of_the_cpu_and_each_tensor_is_copied_once(transfers, is_expected):
    models = [model(seed) for seed in range(3)]
    expected = [answers(weights, "cpu") for weights in models]
    with simulated_gpu.own_stream(GPU):
        for number, weights in enumerate(models, 1):
            if is_expected and number < len(models):
                expect(models[number])
            copied = transfers.copies
            assert torch.equal(answers(weights, GPU), expected[number - 1])
            assert transfers.copies - copied == (0 if is_expected and number > 2 else len(weights))

    assert transfers.copies == sum(map(len, models))


def test_heads_of_one_encoder_are_copied_and_the_encoder_is_not_again(transfers):
    encoder = {key: tensor for key, tensor in model(0).items() if key.startswith("0.")}
    heads = [{key: tensor for key, tensor in model(seed).items() if key.startswith("2.")} for seed in (1, 2)]
    expected = [answers({**encoder, **head}, "cpu") for head in heads]

    with simulated_gpu.own_stream(GPU):
        there = [answers({**encoder, **head}, GPU) for head in heads]

    assert all(map(torch.equal, there, expected))

    assert transfers.copies == len(encoder) + 2 * len(heads[0])


def test_a_tensor_that_was_changed_is_copied_again(transfers):
    weights = model(0)
    with simulated_gpu.own_stream(GPU):
        answers(weights, GPU)
        weights["0.bias"] += 1
        there = answers(weights, GPU)

    assert torch.equal(there, answers(weights, "cpu"))
    assert transfers.copies == len(weights) + 1


def test_copies_go_with_the_model_and_with_the_one_after_it(transfers):
    first, second = model(0), model(1)
    with simulated_gpu.own_stream(GPU):
        answers(first, GPU)
        copies = [weakref.ref(copy.tensor) for copy in transfers._present.values()]
        answers(second, GPU)
        gc.collect()
        assert not any(copy() for copy in copies)

        copies = [weakref.ref(copy.tensor) for copy in transfers._present.values()]
        assert len(copies) == len(second)
        del second
        gc.collect()
        assert not any(copy() for copy in copies)


def test_a_model_of_other_keys_is_not_expected(transfers):
    with simulated_gpu.own_stream(GPU):
        answers(model(0), GPU)
        copied = transfers.copies
        expect({"other": torch.ones(3)})

    assert transfers.copies == copied


def test_a_device_has_one_set_of_copies(transfers):
    assert transfers_to(torch.device(GPU)) is transfers


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_has_the_next_model_before_it_is_asked_for_and_nearly_the_answers_of_the_cpu(monkeypatch):
    _slot.cache_clear()
    device = torch.device("cuda:0")
    copying = Transfers(device)
    monkeypatch.setattr("mecha_exp.evaluation.transfers._transfers", {device: copying})
    models = [model(seed) for seed in range(4)]

    for number, weights in enumerate(models):
        there = answers(weights, "cuda:0")
        torch.testing.assert_close(there, answers(weights, "cpu"))
        if number + 1 < len(models):
            expect(models[number + 1])
            copying.wait()
            assert len(copying._next) == len(weights)  # so that nothing is copied when it is measured
            copies = {key: copying._next[tensor].tensor for key, tensor in models[number + 1].items()}
            moved = copying.moved(models[number + 1], dict.fromkeys(weights, torch.float32))
            assert all(moved[key] is copies[key] for key in copies)
