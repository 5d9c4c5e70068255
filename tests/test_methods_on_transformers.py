"""Methods of papers on a tiny Llama, in float32: within 1e-5 of the authors' formulas in float64."""

import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import authors
import pytest
import torch
from authors import StateDict
from torch import Tensor

import mecha_exp as m

sys.path.append(str(Path(__file__).parent / "evaluators"))
from tiny_tokenizers import SMALL

pytestmark = pytest.mark.libraries
SCALE = 0.7


@pytest.fixture(scope="module")
def models() -> list[StateDict]:
    """A Llama, and three experts that lie as near to it as fine-tuning leaves them."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=40, max_position_embeddings=64, **SMALL)
    base = {key: x.clone() for key, x in transformers.LlamaForCausalLM(config).state_dict().items()}
    return [base, *({key: x + 0.02 * torch.randn_like(x) for key, x in base.items()} for _ in range(3))]


def of_keys(formula: Callable[[Tensor], Tensor]) -> Callable[[list[StateDict]], StateDict]:
    """The merged task vector of a formula of the stacked task vectors of a key."""
    return lambda exact: authors.by_key(formula)(authors.task_vectors(exact))


def of_model(formula: Callable[[Tensor], Tensor]) -> Callable[[list[StateDict]], StateDict]:
    """The merged task vector of a formula of the flat task vectors."""
    return lambda exact: authors.as_a_whole(formula)(authors.task_vectors(exact))


def metagpt(vectors: Tensor) -> Tensor:
    squares = vectors.square().sum(1)
    return squares / squares.sum() @ vectors


def largest(deltas: Tensor) -> Tensor:
    return deltas.gather(0, deltas.abs().argmax(0, keepdim=True))[0]


def twin(deltas: Tensor) -> Tensor:
    common = 0.3 * deltas.sum(0)
    return common + authors.official_own_part(deltas[1] - common, 0.2)


def emr(exact: list[StateDict]) -> StateDict:
    return authors.emr_parts(authors.task_vectors(exact), 0.0)[0]


def doge(exact: list[StateDict]) -> StateDict:
    return authors.official_doge(authors.task_vectors(exact), 0.07, 0.3, 6)


CASES: dict[str, tuple[Callable[..., m.Node], Callable[[list[StateDict]], StateDict]]] = {
    "task_arithmetic": (m.task_arithmetic, of_keys(lambda x: x.sum(0))),
    "ties": (
        lambda *x, **given: m.ties(*x, density=0.2, variant="paper", **given),
        of_keys(lambda x: authors.paper_ties(x, Fraction(1, 5))),
    ),
    "ties, official": (
        lambda *x, **given: m.ties(*x, density=0.2, variant="official", **given),
        of_model(lambda x: authors.official_ties_merging(x, 20)),
    ),
    "breadcrumbs": (
        lambda *x, **given: m.breadcrumbs(*x, density=0.4, gamma=0.1, variant="paper", **given),
        of_keys(lambda x: authors.official_breadcrumbs(x, 0.4, 0.1)),
    ),
    "metagpt": (m.metagpt, of_model(metagpt)),
    "magmax": (m.magmax, of_keys(largest)),
    "pcb": (
        lambda *x, **given: m.pcb(*x, ratio=0.1, **given),
        of_model(lambda x: authors.official_pcb(x, 0.1)),
    ),
    "emr_unified": (m.emr_unified, emr),
    "localize_and_stitch": (
        lambda *x, **given: m.localize_and_stitch(*x, density=0.05, **given),
        of_model(lambda x: authors.stitched(x, 0.05, False)),
    ),
    "twin": (lambda *x, **given: m.twin(*x, task=1, density=0.2, **given), of_keys(twin)),
    "star": (
        lambda *x, **given: m.star(*x, eta=40.0, **given),
        of_keys(lambda x: authors.official_star(x, 40.0)),
    ),
    "fr_merging": (
        lambda *x, **given: m.fr_merging(*x, radius=0.2, variant="official", **given),
        of_keys(lambda x: authors.official_fr_merging(x, 0.2)),
    ),
    "iso_c": (m.iso_c, of_keys(authors.official_iso_c)),
    "iso_cts": (
        lambda *x, **given: m.iso_cts(*x, common=0.5, **given),
        of_keys(lambda x: authors.official_iso_cts(x, 0.5)),
    ),
    "tsv_m": (m.tsv_m, of_keys(authors.official_tsv_m)),
    "wudi": (m.wudi, of_keys(lambda x: authors.official_wudi(x, 300, 1e-5))),
    "doge": (lambda *x, **given: m.doge(*x, eta=0.07, density=0.3, subspace=6, **given), doge),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_method_computes_its_authors_formula(models, name):
    method, formula = CASES[name]
    exact = [{key: x.double() for key, x in model.items()} for model in models]

    made = m.merge(method(*models, scale=SCALE))

    vector = formula(exact)
    for key, base in exact[0].items():
        expected = (base + SCALE * vector[key]).float()
        torch.testing.assert_close(
            made[key], expected, rtol=1e-5, atol=1e-5, msg=lambda t, k=key: f"{k}: {t}"
        )


def test_knots_merges_in_the_directions_that_all_tasks_share(models):
    exact = [{key: x.double() for key, x in model.items()} for model in models]

    made = m.merge(m.knots(*models, k=0.2, scale=SCALE))

    for key, expected in authors.official(exact, 0.2, SCALE).items():
        torch.testing.assert_close(made[key], expected.float(), rtol=1e-5, atol=1e-5, msg=key)
