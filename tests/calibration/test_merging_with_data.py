"""Fisher merging and RegMean: the authors' formulas, from statistics in files; and what is refused.

The formulas are written out in plain torch.
"""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import mecha_exp as m
from mecha_exp.checkpoint import open_stored
from mecha_exp.graph.nodes import models_of
from mecha_exp.lab.content_hash import content_of
from mecha_exp.lab.signature import signature_of
from mecha_exp.methods.calibrated import solved_layer
from mecha_exp.sources.statistics.header import StatisticsHeader, fingerprint

SHAPES = {"conv.weight": (5, 2, 3, 3), "head.weight": (4, 6), "head.bias": (4,), "embed.weight": (7, 3)}
INPUTS = {"conv.weight": 18, "head.weight": 6}
WITHOUT = "embed.weight"
NAMES = ("a", "b", "c")
OPTIONS = [
    m.EngineOptions(workers=w, tile_size=t, fuse=f) for w, t, f in ((1, 1 << 16, "never"), (3, 32, "always"))
]

Statistics = dict[str, Tensor]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Three models in the current folder, and statistics of each in `NAME.stats.safetensors`."""
    monkeypatch.chdir(tmp_path)
    made = []
    for seed, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(seed)
        model = {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
        save_file({**model, "steps": torch.tensor(3)}, f"{name}.safetensors")
        made.append(model)
        inputs = {key: torch.randn(50, size, generator=generator) for key, size in INPUTS.items()}
        write_statistics(
            name,
            {
                key: torch.rand(shape, generator=generator) ** 3
                for key, shape in SHAPES.items()
                if key != WITHOUT
            },
            {key: x.T @ x / 50 for key, x in inputs.items()},
        )
    return made


def write_statistics(name: str, fisher: Statistics, gram: Statistics, rows: int = 50) -> None:
    with open_stored(Path(f"{name}.safetensors")) as stored:
        unmeasured = {
            kind: {
                key: (stored.info(key).dtype, list(stored.info(key).shape))
                for key in stored.keys()
                if key not in of
            }
            for kind, of in (("fisher", fisher), ("gram", gram))
        }
        header = StatisticsHeader(
            f"{name}.safetensors", "", fingerprint(stored), "data", "", rows, 0, "true", ("fisher", "gram"),
            dict.fromkeys(gram, rows), unmeasured,
        )  # fmt: skip
    tensors = {f"fisher/{key}": value for key, value in fisher.items()}
    tensors |= {f"gram/{key}": value for key, value in gram.items()}
    save_file(tensors, f"{name}.stats.safetensors", header.metadata())


def statistics_of(kind: str, key: str) -> list[Tensor]:
    return [load_file(f"{name}.stats.safetensors")[f"{kind}/{key}"] for name in NAMES]


def given(kind: str, names: tuple[str, ...] = NAMES) -> m.Node:
    return m.statistics(*(f"{name}.stats.safetensors" for name in names), kind=kind)


def merged(method: Any, kind: str, **settings: Any) -> dict[str, Tensor]:
    """The merge of the three models, which is the same on any schedule."""
    node = method(*(f"{name}.safetensors" for name in NAMES), statistics=given(kind), **settings)
    first, other = (m.merge(node, options=options) for options in OPTIONS)
    assert all(torch.equal(first[key], other[key]) for key in first)
    return first


def official_fisher(
    models: list[Tensor], fishers: list[Tensor], coefficients: list[float], floor: float, favour: bool
) -> Tensor:
    """`_merge_with_coeffs` of the authors for one variable."""
    above, below = torch.zeros_like(models[0]), torch.zeros_like(models[0])
    for place, (model, fisher, coefficient) in enumerate(zip(models, fishers, coefficients, strict=True)):
        diagonal = fisher.clamp(min=floor) if place == 0 or not favour else fisher
        above += coefficient * diagonal * model
        below += coefficient * diagonal
    return above / below


@pytest.mark.parametrize("favour", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_fisher_weighs_each_entry_by_what_the_outputs_depend_on(models, normalize, favour):
    weights, floor = [0.5, 1.0, 0.25], 0.05
    norms = [1.0] * 3
    if normalize:
        parts = [statistics_of("fisher", key) for key in SHAPES if key != WITHOUT]
        norms = [float(torch.cat([part[i].flatten() for part in parts]).norm()) for i in range(3)]

    made = merged(m.fisher, "fisher", weights=weights, normalize=normalize, floor=floor, favour_first=favour)

    for key in SHAPES:
        if key != WITHOUT:
            coefficients = [w / n for w, n in zip(weights, norms, strict=True)]
            tensors = [model[key] for model in models]
            expected = official_fisher(tensors, statistics_of("fisher", key), coefficients, floor, favour)
            torch.testing.assert_close(made[key], expected, rtol=1e-5, atol=1e-5, msg=key)


def weighted_mean(models: list[dict[str, torch.Tensor]], key: str) -> torch.Tensor:
    """As of equal information, with the weights 0.5, 1 and 0.25."""
    return (0.5 * models[0][key] + models[1][key] + 0.25 * models[2][key]) / 1.75


def test_what_has_no_information_gets_the_mean_and_is_counted(models, caplog):
    made = merged(m.fisher, "fisher", weights=[0.5, 1.0, 0.25])

    torch.testing.assert_close(made[WITHOUT], weighted_mean(models, WITHOUT))
    assert made["steps"].item() == 3
    assert (
        "a.stats.safetensors and 2 more: 1 of 5 keys have no fisher and get the mean of the models: "
        "embed.weight" in caplog.text
    )


def test_entries_without_information_of_any_model_get_the_mean(models):
    for name in NAMES:
        fisher = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
        fisher["head.weight"][0] = 1.0
        write_statistics(name, fisher, {})

    made = merged(m.fisher, "fisher", floor=0.0, weights=[0.5, 1.0, 0.25])["head.weight"][1:]

    torch.testing.assert_close(made, weighted_mean(models, "head.weight")[1:])


def official_regmean(models: list[Tensor], grams: list[Tensor], alpha: float) -> Tensor:
    """`regmean_mean_params` of the authors: columns of a linear layer's transposed weight."""
    reduced = [gram * (alpha + (1 - alpha) * torch.eye(len(gram)).to(gram)) for gram in grams]
    total = torch.linalg.inv(sum(reduced).double())
    made = total @ sum(g.double() @ w.double().T for g, w in zip(reduced, models, strict=True))
    return made.T.to(models[0].dtype)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
def test_regmean_solves_each_layer_for_its_outputs(models, alpha):
    made = merged(m.regmean, "gram", alpha=alpha)

    for key in INPUTS:
        tensors = [model[key].flatten(1) for model in models]
        expected = official_regmean(tensors, statistics_of("gram", key), alpha).reshape(SHAPES[key])
        torch.testing.assert_close(made[key], expected, rtol=1e-4, atol=1e-5, msg=key)
    for key in SHAPES.keys() - INPUTS.keys():
        torch.testing.assert_close(made[key], sum(model[key] for model in models) / 3, msg=key)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
def test_regmean_of_float64_matrices_is_damped_too_and_leaves_them_as_they_are(alpha):
    generator = torch.Generator().manual_seed(0)
    models = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in NAMES]
    inputs = [torch.randn(40, 6, generator=generator, dtype=torch.float64) for _ in NAMES]
    grams = [x.T @ x / 40 for x in inputs]
    before = [gram.clone() for gram in grams]

    made = solved_layer(models, [{"layer": gram} for gram in grams], "layer", alpha)

    torch.testing.assert_close(made, official_regmean(models, grams, alpha), rtol=1e-12, atol=1e-12)
    assert all(map(torch.equal, grams, before))


def test_regmean_without_damping_is_the_least_squares_fit_of_the_outputs(models):
    made = merged(m.regmean, "gram", alpha=1.0)["head.weight"].double()

    def loss(weight: Tensor) -> Tensor:
        apart = [weight - model["head.weight"].double() for model in models]
        grams = [gram.double() for gram in statistics_of("gram", "head.weight")]
        return sum(((d @ g) * d).sum() for d, g in zip(apart, grams, strict=True))

    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        step = 1e-2 * torch.randn(4, 6, generator=generator).double()
        assert loss(made + step) > loss(made)


def test_one_gram_matrix_is_in_memory_at_a_time():
    read: list[weakref.ref[Tensor]] = []

    class File(dict[str, Tensor]):
        def __getitem__(self, key: str) -> Tensor:
            assert not any(reference() is not None for reference in read)
            gram = super().__getitem__(key).clone()
            read.append(weakref.ref(gram))
            return gram

    rows = torch.randn(3, 40, 6, generator=torch.Generator().manual_seed(0))
    weights = list(torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1)))
    grams = [x.T @ x / 40 for x in rows]

    made = solved_layer(weights, [File(layer=gram) for gram in grams], "layer", 0.9)

    assert len(read) == 3
    torch.testing.assert_close(made, official_regmean(weights, grams, 0.9), rtol=1e-4, atol=1e-5)


def test_layers_without_gram_matrices_are_counted(models, caplog):
    merged(m.regmean, "gram")

    assert (
        "a.stats.safetensors and 2 more: 2 of 5 keys have no gram and get the mean of the models"
        in caplog.text
    )


def test_too_few_rows_are_a_warning_with_the_numbers(models, caplog):
    for name in NAMES:
        grams = {key: statistics_of("gram", key)[0] for key in INPUTS}
        write_statistics(name, {}, grams, rows=7)

    merged(m.regmean, "gram")

    assert (
        "1 Gram matrix is of fewer rows than its layer has inputs ('conv.weight': 7 rows, 18" in caplog.text
    )


@pytest.mark.parametrize(("method", "kind"), [(m.fisher, "fisher"), (m.regmean, "gram")])
def test_running_statistics_are_pooled_over_the_models(tmp_path, monkeypatch, method, kind):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(seed)
        norm = {
            f"n.{part}": torch.rand(5, generator=generator)
            for part in ("weight", "running_mean", "running_var")
        }
        save_file({**norm, "head.weight": torch.rand(4, 6, generator=generator)}, f"{name}.safetensors")
        write_statistics(name, {"head.weight": torch.rand(4, 6)}, {"head.weight": torch.eye(6)})
    names = [f"{name}.safetensors" for name in NAMES]

    made, expected = (m.merge(node) for node in (method(*names, statistics=given(kind)), m.n_average(*names)))

    for part in ("weight", "running_mean", "running_var"):
        torch.testing.assert_close(made[f"n.{part}"], expected[f"n.{part}"])


def test_singular_gram_matrices_are_an_error_unless_damped(models):
    rows = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    for name in NAMES:
        write_statistics(name, {}, {"head.weight": rows.T @ rows / 2}, rows=2)

    with pytest.raises(m.MergeError, match=r"'head\.weight' are singular in sum.*set alpha below 1"):
        merged(m.regmean, "gram", alpha=1.0)
    assert merged(m.regmean, "gram", alpha=0.9)["head.weight"].isfinite().all()


def test_one_missing_row_is_found_in_spite_of_rounding(models):
    found = 0
    for seed in range(20):
        rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        for name in NAMES:
            write_statistics(name, {}, {"head.weight": rows.T @ rows / 5})
        try:
            merged(m.regmean, "gram", alpha=1.0)
        except m.MergeError as error:
            found += "singular in sum" in str(error)

    assert found == 20


def test_inputs_of_very_different_sizes_are_not_taken_for_singular(models):
    sizes = torch.logspace(-5, 4, 6)
    for name in NAMES:
        rows = sizes * torch.randn(60, 6, generator=torch.Generator().manual_seed(ord(name)))
        write_statistics(name, {}, {"head.weight": rows.T @ rows / 60})

    made = merged(m.regmean, "gram", alpha=1.0)["head.weight"]

    alike = [gram / sizes / sizes[:, None] for gram in statistics_of("gram", "head.weight")]
    expected = official_regmean([model["head.weight"] * sizes for model in models], alike, 1.0) / sizes
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-5)


def test_inputs_that_no_data_has_leave_the_mean_in_their_columns(models):
    live = [0, 1, 3, 5]
    for name in NAMES:
        gram = torch.zeros(6, 6)
        rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(ord(name)))
        gram[torch.tensor(live)[:, None], torch.tensor(live)] = rows.T @ rows / 40
        write_statistics(name, {}, {"head.weight": gram})

    made = merged(m.regmean, "gram", alpha=1.0)["head.weight"]

    tensors = [model["head.weight"] for model in models]
    torch.testing.assert_close(made[:, [2, 4]], sum(tensors)[:, [2, 4]] / 3)
    grams = [gram[live][:, live] for gram in statistics_of("gram", "head.weight")]
    expected = official_regmean([t[:, live] for t in tensors], grams, 1.0)
    torch.testing.assert_close(made[:, live], expected, rtol=1e-4, atol=1e-5)


def test_statistics_that_are_not_finite_are_an_error(models):
    for name in NAMES:
        write_statistics(
            name,
            {key: torch.full(s, torch.nan) for key, s in SHAPES.items()},
            {"head.weight": torch.full((6, 6), torch.nan)},
        )

    for method, kind in ((m.fisher, "fisher"), (m.regmean, "gram")):
        with pytest.raises(m.MergeError, match="not finite"):
            merged(method, kind)


@pytest.mark.parametrize("method", ["fisher", "regmean"])
def test_statistics_of_another_model_are_an_error_that_names_both(models, method):
    kind = {"fisher": "fisher", "regmean": "gram"}[method]
    swapped = given(kind, ("b", "a", "c"))

    with pytest.raises(
        m.RecipeError,
        match=r"b\.stats\.safetensors holds statistics of b\.safetensors, whose content is not that of "
        r"models\[0\], a\.safetensors.*python -m mecha_exp calibrate a\.safetensors",
    ):
        m.merge(getattr(m, method)("a.safetensors", "b.safetensors", "c.safetensors", statistics=swapped))


def test_a_model_that_has_changed_since_is_another_model(models):
    changed = load_file("a.safetensors")
    changed["head.bias"] += 1
    save_file(changed, "a.safetensors")

    with pytest.raises(
        m.RecipeError, match=r"statistics of a\.safetensors, whose content is not that of models\[0\]"
    ):
        merged(m.fisher, "fisher")


def of(name: str) -> str:
    return f"{name}.safetensors"


def both() -> m.Node:
    return m.weighted_sum(of("a"), of("b"))


REFUSED = {
    "too few": (
        lambda: m.fisher(of("a"), of("b"), statistics=given("fisher", ("a",))),
        "statistics of 1 model are given for 2 models",
    ),
    "Gram matrices for Fisher": (
        lambda: m.fisher(of("a"), statistics=given("gram", ("a",))),
        "fisher: it needs the statistics fisher, got gram",
    ),
    "Fisher information for RegMean": (
        lambda: m.regmean(of("a"), statistics=given("fisher", ("a",))),
        "regmean: it needs the statistics gram, got fisher",
    ),
    "of a merge": (
        lambda: m.fisher(both(), statistics=given("fisher", ("a",))),
        r"models\[0\] is weighted_sum\(a, b\).*Merge to a file first",
    ),
    "from a merge": (
        lambda: m.fisher(of("a"), statistics=m.statistics(both(), kind="fisher")),
        r"files is weighted_sum\(a, b\), not a file \(of each model, .* calibrate",
    ),
    "a model": (
        lambda: m.fisher(of("a"), statistics=m.statistics(of("a"), kind="fisher")),
        r"a\.safetensors does not hold statistics",
    ),
    "a number": (
        lambda: m.fisher(of("a"), statistics=m.norm(of("a"))),
        r"expected statistics\(\.\.\., kind=fisher\) of 1 model",
    ),
}


@pytest.mark.parametrize(("node", "message"), REFUSED.values(), ids=REFUSED)
def test_statistics_that_do_not_fit_are_refused(models, node, message):
    with pytest.raises(m.MechaError, match=message):
        m.merge(node())


@pytest.mark.parametrize(
    ("kind", "tensor", "message"),
    [
        ("fisher", {"head.bias": torch.ones(1)}, r"'fisher/head\.bias', F32 \[1\], is not what calibrate"),
        ("fisher", {"head.bias": torch.ones(4, dtype=torch.int32)}, r"'fisher/head\.bias', I32 \[4\]"),
        ("fisher", {"other": torch.ones(4)}, r"'fisher/other', F32 \[4\]"),
        ("gram", {"head.weight": torch.eye(5)}, r"'gram/head\.weight', F32 \[5, 5\]"),
        ("gram", {"conv.weight": torch.eye(2)}, r"'gram/conv\.weight', F32 \[2, 2\]"),
        ("gram", {"head.weight": torch.eye(6).half()}, r"'gram/head\.weight', F16 \[6, 6\]"),
    ],
)
def test_statistics_that_calibrate_does_not_write_are_refused(models, kind, tensor, message):
    write_statistics("a", **{"fisher": {}, "gram": {}, kind: tensor})
    method = {"fisher": m.fisher, "gram": m.regmean}[kind]

    with pytest.raises(m.CheckpointError, match=message):
        m.merge(method(of("a"), statistics=given(kind, ("a",))))


def test_gram_matrices_with_squares_below_zero_are_an_error(models):
    for name in NAMES:
        write_statistics(name, {}, {"head.weight": -torch.eye(6)})

    with pytest.raises(m.MergeError, match=r"Gram matrix of 'head\.weight' has a square below 0"):
        merged(m.regmean, "gram")


@pytest.mark.parametrize("weights", [[0.0, 0.0, 0.0], [1.0, -1.0, 1.0], 0.0])
def test_weights_that_make_no_mean_are_refused(models, weights):
    with pytest.raises(m.RecipeError, match="must be 0 or more, and not all 0"):
        merged(m.fisher, "fisher", weights=weights)


def test_a_signature_has_the_content_of_the_statistics(models):
    node = m.fisher(*(f"{name}.safetensors" for name in NAMES), statistics=given("fisher"))

    def digest() -> str:
        contents = {model: content_of(Path(str(model.source))) for model in models_of(node)}
        return signature_of(node, contents, m.EngineOptions(), {}).digest

    before = digest()
    tensors = load_file("a.stats.safetensors")
    tensors["fisher/head.bias"] += 1
    write_statistics("a", {k[7:]: v for k, v in tensors.items() if k.startswith("fisher/")}, {})

    assert digest() != before


def regmean_of_files() -> m.Node:
    return m.regmean(*(f"{name}.safetensors" for name in NAMES), statistics=given("gram"), alpha=0.7)


def test_a_recipe_with_statistics_survives_as_text(models):
    made = m.merge(regmean_of_files())

    again = m.merge(m.deserialize(m.serialize(regmean_of_files())))

    assert all(torch.equal(value, made[key]) for key, value in again.items())


@pytest.mark.heavy
def test_the_recipes_take_statistics_and_leave_them_out_of_the_inputs(tmp_path, as_a_user):
    for task in ("0_3", "4_6"):
        words = [
            f"pkg://mecha_exp.examples.digits/expert_{task}.safetensors",
            "module=digits",
            f"data={task}",
            "count=40",
        ]
        outcome = as_a_user("calibrate", *words, f"output={task}.safetensors", cwd=tmp_path)
        assert outcome.status == 0, outcome.err
    experts = ",".join(
        f"pkg://mecha_exp.examples.digits/expert_{task}.safetensors" for task in ("0_3", "4_6")
    )
    words = [f"models.experts=[{experts}]", "statistics=[0_3.safetensors,4_6.safetensors]", "tracking=none"]

    outcome = as_a_user("recipe=fisher,regmean", *words, "-m", "hydra.sweep.dir=sweep", cwd=tmp_path)

    assert outcome.status == 0, outcome.err
    assert "cannot be measured" not in outcome.err
    points = [json.loads(path.read_text()) for path in sorted((tmp_path / "sweep").glob("*/run.json"))]
    assert len(points) == 2
