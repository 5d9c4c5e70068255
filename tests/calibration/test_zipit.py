"""ZipIt: the formula of its authors, trained networks, and what cannot be zipped.

The formula is written out in plain torch.
"""

import pytest
import torch
from matched_networks import KINDS, Attention, barrier, measured, saved, statistics
from safetensors.torch import load_file, save_file
from torch import Tensor

import mecha_exp as m
from mecha_exp.methods.matching import correlations, pairs_merged

pytestmark = pytest.mark.usefixtures("units_known")
EXACT = m.EngineOptions(compute_dtype=torch.float64)
StateDict = dict[str, Tensor]


def official_zip(covariance: Tensor, models: int, alpha: float, beta: float) -> Tensor:
    """The unmerge matrix of match_tensors_zipit: [units of all models, merged units].

    The covariance becomes correlations. A pair that is merged loses a row and a column.
    """
    deviation = covariance.diagonal().sqrt()
    likeness = covariance / torch.outer(deviation, deviation).clamp_min(1e-7)
    count = len(likeness)
    width = count // models
    likeness.fill_diagonal_(-torch.inf)
    unmerge = torch.eye(count, dtype=torch.float64)
    origin = torch.arange(count) // width
    budget = [int((count - width) // models * beta + 1e-4)] * models
    while unmerge.shape[1] > width:
        row, column = sorted(divmod(int(likeness.flatten().argmax()), likeness.shape[1]))
        unmerge[:, row] += unmerge[:, column]
        joined = alpha * torch.minimum(likeness[row], likeness[column])
        likeness[row], likeness[:, row] = joined, joined
        is_within, owner = bool(origin[row] == origin[column]), origin[row]
        others = [unit for unit in range(len(likeness)) if unit != column]
        likeness, origin, unmerge = likeness[others][:, others], origin[others], unmerge[:, others]
        if is_within:
            budget[owner] -= 1
            if budget[owner] <= 0:
                of_owner = origin == owner
                likeness[of_owner[:, None] & of_owner] = -torch.inf
    return unmerge


def official_zipit(models: list[StateDict], names: str, alpha: float, beta: float) -> StateDict:
    """Every layer zipped: the mean over models of N M_i W_i U_i, M being U^T over the number of units."""
    unmerges = {}
    for key in ("2.weight", "4.weight"):
        features = torch.cat(
            [load_file(f"{name}.stats.safetensors")[f"activations/{key}"].double().T for name in names]
        )
        mean = features.mean(1)
        covariance = features @ features.T / features.shape[1] - torch.outer(mean, mean)
        unmerges[key] = official_zip(covariance, len(models), alpha, beta)
    merges = {key: (u / (u.sum(0) + 1e-5)).T.chunk(len(models), 1) for key, u in unmerges.items()}
    copies = {key: u.chunk(len(models)) for key, u in unmerges.items()}
    made: StateDict = {}
    for number, model in enumerate(models):
        weights = {key: value.double() for key, value in model.items()}
        first, second = (len(models) * merges[key][number] for key in ("2.weight", "4.weight"))
        parts = {
            "0.weight": first @ weights["0.weight"],
            "0.bias": first @ weights["0.bias"],
            "2.weight": second @ weights["2.weight"] @ copies["2.weight"][number],
            "2.bias": second @ weights["2.bias"],
            "4.weight": weights["4.weight"] @ copies["4.weight"][number],
            "4.bias": weights["4.bias"],
        }
        made = {key: made.get(key, 0) + part / len(models) for key, part in parts.items()}
    return made


@pytest.mark.parametrize(
    ("names", "alpha", "beta"),
    [("ab", 0.3, 0.125), ("ab", 1.0, 1.0), ("ab", 0.5, 0.5), ("bc", 0.01, 0.2), ("abc", 0.7, 1.0)],
)
def test_zipit_is_the_formula_of_its_authors(networks, names, alpha, beta):
    chosen = [networks["abc".index(name)] for name in names]
    expected = official_zipit(chosen, names, alpha, beta)

    files = [f"{name}.safetensors" for name in names]
    node = m.zipit(*files, statistics=statistics(*names), alpha=alpha, beta=beta)
    made = m.merge(node, options=EXACT, dtype=torch.float64)

    assert made.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(made[key].double(), value, rtol=1e-4, atol=1e-5)


def test_zipped_networks_lose_less_than_their_mean(networks):
    files = ("a.safetensors", "b.safetensors")
    naive = barrier(m.merge(m.n_average(*files)), networks[:2])

    zipped = barrier(
        m.merge(m.zipit(*files, statistics=statistics("a", "b"), alpha=1.0, beta=1.0)), networks[:2]
    )

    assert naive > 0.5
    assert zipped < 0.3 * naive


def test_without_a_budget_each_unit_is_merged_with_one_of_another_model(networks):
    units = [load_file(f"{name}.stats.safetensors")["activations/2.weight"].double().T for name in "ab"]

    joined = pairs_merged(correlations(torch.cat(units)), 2, alpha=1.0, beta=0.0)

    assert joined is not None
    places, counts = joined.unique(return_counts=True)
    assert places.tolist() == list(range(32))
    assert counts.tolist() == [2] * 32


@pytest.mark.parametrize(("kind", "shape"), KINDS.values(), ids=KINDS)
def test_a_network_zipped_with_itself_is_itself(tmp_path, monkeypatch, kind, shape):
    monkeypatch.chdir(tmp_path)
    model = {key: value + key.endswith("bias") for key, value in saved(kind, "a", 3).items()}  # no unit rests
    for name in "ab":
        save_file(model, f"{name}.safetensors")
    examples = torch.randn(40, *shape, generator=torch.Generator().manual_seed(0))
    for name in "ab":
        measured(kind, name, examples)

    made = m.merge(m.zipit("a.safetensors", "b.safetensors", statistics=statistics("a", "b"), alpha=0.1))

    for key, value in model.items():
        torch.testing.assert_close(made[key], value)


def test_queries_and_keys_are_averaged_and_values_zipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models = [saved(Attention, name, seed) for seed, name in enumerate("ab")]
    examples = torch.randn(40, 6, 8, generator=torch.Generator().manual_seed(0))
    for name in "ab":
        measured(Attention, name, examples)

    made = m.merge(m.zipit("a.safetensors", "b.safetensors", statistics=statistics("a", "b")))

    mean = {key: sum(model[key] for model in models) / 2 for key in made}
    for key in ("qkv.weight", "qkv.bias"):
        torch.testing.assert_close(made[key][:16], mean[key][:16])
        assert not torch.allclose(made[key][16:], mean[key][16:])
    assert not torch.allclose(made["out.weight"], mean["out.weight"])
    torch.testing.assert_close(made["out.bias"], mean["out.bias"])


def test_units_that_nothing_may_be_merged_with_are_an_error(networks):
    node = m.zipit(*(f"{name}.safetensors" for name in "abc"), statistics=statistics(*"abc"), beta=0.0)

    with pytest.raises(
        m.MergeError, match=r"no two units of '\d\.weight' may be merged any more.*Raise beta"
    ):
        m.merge(node)


def test_units_that_never_do_anything_are_merged_last():
    units = torch.randn(8, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    units[[1, 6]] = 0.0
    units[4:6] = units[[2, 0]]

    joined = pairs_merged(correlations(units), 2, alpha=1.0, beta=1.0)

    assert joined is not None
    assert joined[4] == joined[2] and joined[5] == joined[0]
    assert joined.unique().numel() == 4
