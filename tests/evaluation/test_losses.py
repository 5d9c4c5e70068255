"""Differentiable losses of merged models: their formulas, their batches, and what is refused."""

import math

import pytest
import torch

from mecha_exp import ConfigError, EvaluationError, logits_of, loss
from mecha_exp.evaluation.declaration import Evaluator
from mecha_exp.evaluation.learning import registry
from mecha_exp.evaluation.learning.losses import bound_loss, mean_cross_entropy, mean_entropy
from mecha_exp.evaluation.registry import find_evaluator
from mecha_exp.evaluation.scoring import Evaluation
from mecha_exp.evaluators.digits import digits_logits
from mecha_exp.evaluators.mini8 import mini8_logits
from mecha_exp.examples.digits.network import DigitsNetwork
from mecha_exp.examples.mini8.network import Encoder


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_logits", dict(registry._logits))
    monkeypatch.setattr(registry, "_losses", dict(registry._losses))


def evaluation(name: str = "mine", splits: tuple[str, ...] = (), **parameters) -> Evaluation:
    """An evaluator that measures nothing, with parameters."""
    mine = Evaluator(name, lambda state_dict: {"m": 0.0}, "m", "maximize", lambda shapes: True, splits=splits)
    return Evaluation(mine, {**parameters, **({"split": splits[0]} if splits else {})})


def two_tasks(state_dict, *, examples=None):
    """Logits of 6 and 4 examples with two classes; the second task asks for the other class."""
    w = state_dict["w"]
    everything = {"a": torch.stack([w, -w], 1), "b": torch.stack([w[:4] * 0, w[:4]], 1)}
    labels = {"a": torch.zeros(6).long(), "b": torch.ones(4).long()}
    rows = examples or {task: list(range(len(labels[task]))) for task in labels}
    return {task: (everything[task][places], labels[task][places]) for task, places in rows.items()}


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.linspace(-1, 2, 6, requires_grad=True)}


def test_entropy_is_that_of_the_predictions_and_cross_entropy_that_with_the_labels():
    logits, labels = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]]), torch.tensor([0, 1])

    assert mean_entropy(logits, labels).item() == pytest.approx(
        (math.log(2) - 0.75 * math.log(0.75) - 0.25 * math.log(0.25)) / 2
    )
    assert mean_cross_entropy(logits, labels).item() == pytest.approx((math.log(2) - math.log(0.25)) / 2)


def test_the_loss_is_the_sum_over_tasks_of_the_mean_over_examples():
    logits_of("mine")(two_tasks)

    value = bound_loss("cross_entropy", evaluation(), batch=None)(weights(), 0)

    parts = two_tasks(weights())
    assert value.item() == pytest.approx(sum(mean_cross_entropy(*pair).item() for pair in parts.values()))
    value.backward()


def test_a_batch_follows_from_seed_step_and_task_alone():
    logits_of("mine")(two_tasks)

    def drawn(seed: int, step: int):
        return bound_loss("entropy", evaluation(), batch=4, seed=seed).positions(weights(), step)

    assert drawn(0, 3) == drawn(0, 3)
    assert len({str(drawn(0, step)) for step in range(20)}) > 5
    assert [drawn(seed, 0) for seed in range(8)] != [drawn(0, 0)] * 8
    assert drawn(0, 3)["b"] == [0, 1, 2, 3], "a task with few examples has all of them in each step"
    assert drawn(0, 3)["a"] == sorted(set(drawn(0, 3)["a"])) and len(drawn(0, 3)["a"]) == 4


@pytest.mark.parametrize(
    ("network", "logits", "name"),
    [(DigitsNetwork, digits_logits, "digits"), (Encoder, mini8_logits, "mini8")],
)
def test_the_logits_of_the_demos_are_those_that_are_measured(network, logits, name):
    torch.manual_seed(0)
    state = {key: tensor.requires_grad_() for key, tensor in network().state_dict().items()}

    by_task = logits(state, split="validation")
    examples = {task: [0, 2, 5] for task in by_task}
    some = logits(state, split="validation", examples=examples)
    mean_entropy(*some[next(iter(some))]).backward()

    measured = find_evaluator(name, {key: tuple(t.shape) for key, t in state.items()}).score(state)
    for task, (values, labels) in by_task.items():
        assert (values.argmax(1) == labels).tolist() == (measured.values[task] == 1).tolist()
        assert torch.allclose(some[task][0], values[[0, 2, 5]], atol=1e-5)
        assert some[task][1].tolist() == labels[[0, 2, 5]].tolist()
    assert all(tensor.grad is not None for tensor in state.values())


def test_a_loss_of_ones_own_gets_the_keywords_that_it_declares():
    seen = {}

    @loss("own")
    def own(state_dict, *, split, step, seed, images=1):
        seen.update(split=split, step=step, seed=seed, images=images)
        return state_dict["w"].sum()

    bound = bound_loss("own", evaluation(splits=("validation", "test"), images=5, other=1), seed=9)

    assert bound(weights(), 7).item() == pytest.approx(3.0)
    assert seen == {"split": "validation", "step": 7, "seed": 9, "images": 5}


def test_a_loss_of_ones_own_must_be_told_which_part_of_the_data_to_use():
    loss("own")(lambda state_dict: state_dict["w"].sum())

    with pytest.raises(ConfigError) as raised:
        bound_loss("own", evaluation(splits=("validation", "test")))

    assert str(raised.value) == (
        "the loss 'own' has no parameter 'split', and its evaluator has splits: weights are learned on "
        "validation, and test is left alone. Add it, and use that part of the data alone; a loss that uses "
        "no data has it, too."
    )
    assert bound_loss("own", evaluation()).note is None, "without splits there is no test to leave alone"


def test_it_is_said_of_a_loss_of_ones_own_that_nothing_checks_its_data():
    loss("own")(lambda state_dict, split: state_dict["w"].sum())
    logits_of("mine")(lambda state_dict, split, examples=None: {})

    assert bound_loss("own", evaluation(splits=("validation", "test"))).note == (
        "the loss 'own' is yours: nothing checks that it uses 'validation' alone, not 'test'"
    )
    assert bound_loss("entropy", evaluation(), batch=4).note is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda state: 0.5, "must return a scalar tensor, not float"),
        (lambda state: state["w"], r"must return a scalar tensor, not shape \[6\]"),
        (lambda state: state["w"].detach().sum(), "does not depend on the tensors of the state dict"),
    ],
)
def test_a_loss_without_a_gradient_is_refused(function, message):
    loss("own")(function)

    with pytest.raises(EvaluationError, match=message):
        bound_loss("own", evaluation())(weights(), 0)


def test_logits_of_another_form_are_refused():
    logits_of("mine")(lambda state_dict, examples=None: {"a": state_dict["w"]})

    with pytest.raises(EvaluationError, match=r"must be \(logits, labels\) by task"):
        bound_loss("entropy", evaluation())(weights(), 0)


def test_what_has_no_loss_is_told_what_to_do():
    with pytest.raises(ConfigError, match=r"'mine' gives no logits to differentiate.*@logits_of\(\"mine\"\)"):
        bound_loss("entropy", evaluation())
    with pytest.raises(ConfigError, match=r"sweep\.loss=entropi: there is no such loss.*'entropy'"):
        bound_loss("entropi", evaluation())


def test_logits_without_examples_or_split_are_refused_where_they_are_needed():
    logits_of("mine")(lambda state_dict: {})

    with pytest.raises(ConfigError, match=r"no parameter 'examples'.*sweep\.batch=null"):
        bound_loss("entropy", evaluation(), batch=16)
    with pytest.raises(ConfigError, match="no parameter 'split'"):
        bound_loss("entropy", evaluation(splits=("validation", "test")), batch=None)


def test_names_are_taken_once():
    logits_of("mine")(two_tasks)
    with pytest.raises(ConfigError, match="the loss 'entropy' is built in"):
        loss("entropy")(lambda state_dict: None)

    two_tasks_elsewhere = type(two_tasks)(two_tasks.__code__, {"__name__": "elsewhere"})
    two_tasks_elsewhere.__module__ = "elsewhere"
    with pytest.raises(ConfigError, match="two modules have logits of the evaluator 'mine'"):
        logits_of("mine")(two_tasks_elsewhere)


def test_the_key_of_a_loss_changes_with_its_batches_and_its_code():
    logits_of("mine")(two_tasks)
    keys = {
        bound_loss(name, evaluation(), batch=b).key for name in ("entropy", "cross_entropy") for b in (4, 8)
    }

    logits_of("mine")(lambda state_dict, examples=None: two_tasks(state_dict))

    assert len(keys | {bound_loss("entropy", evaluation(), batch=4).key}) == 5
