"""Statistics of a model on data: what they are, on any schedule, resumed, and refused."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.calibration import LABELS, Request, Subject, calibrate, load_subject
from mecha_exp.calibration.collectors import FisherCollector, collectors_of, looking
from mecha_exp.calibration.seams import calibrate as verb
from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import CheckpointError, ConfigError, EvaluationError
from mecha_exp.sources.statistics.header import METADATA, StatisticsHeader, fingerprint
from mecha_exp.sources.statistics.view import StatisticsSource


def measured(output: str = "a.stats.safetensors", model: str = "a", **given: Any) -> dict[str, Tensor]:
    """The statistics that a calibration writes."""
    words = {"data": f"{model}.pt", "module": "net.py:subject", "output": output, **given}
    assert verb.main([f"{model}.safetensors", *(f"{name}={value}" for name, value in words.items())]) == 0
    return load_file(output)


def network(model: str = "a") -> tuple[torch.nn.Module, Tensor, Tensor]:
    """The network of the fixture with the weights of a model, its images and labels."""
    spec = importlib.util.spec_from_file_location("net", "net.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net: torch.nn.Module = module.Net()
    weights = load_file(f"{model}.safetensors")
    net.load_state_dict({key: weights[key] for key in net.state_dict()})
    content = torch.load(f"{model}.pt", weights_only=True)
    return net, content["images"], content["labels"]


def header_of(path: str) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        header: dict[str, Any] = json.loads(file.metadata()[METADATA])
    return header


def squared_gradients(net: torch.nn.Module, value: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    value.backward()
    return {
        name: (p.grad if p.grad is not None else torch.zeros_like(p)) ** 2
        for name, p in net.named_parameters()
    }


def test_fisher_of_true_labels_is_the_mean_of_the_squared_gradients_of_each_example(bench):
    net, images, labels = network()
    expected: dict[str, Tensor] = {}
    for image, label in zip(images, labels, strict=True):
        squares = squared_gradients(net, -F.cross_entropy(net(image[None]), label[None]))
        expected = {key: expected.get(key, 0) + square / len(images) for key, square in squares.items()}

    made = measured(kind="fisher", labels="true")

    assert made.keys() == {f"fisher/{key}" for key in expected}
    for key, value in expected.items():
        torch.testing.assert_close(made[f"fisher/{key}"], value, rtol=1e-5, atol=1e-8)
    of_batch = squared_gradients(net, -F.cross_entropy(net(images), labels))["head.weight"]
    assert not torch.allclose(made["fisher/head.weight"], of_batch, rtol=0.1)  # which is another number


def test_exact_fisher_is_the_expectation_over_the_labels_of_the_model(bench):
    net, images, _ = network()
    expected = torch.zeros(3, 16)
    for image in images:
        chances = net(image[None]).softmax(1)[0].detach()
        for label, chance in enumerate(chances):
            value = net(image[None]).log_softmax(1)[0, label]
            expected += chance * squared_gradients(net, value)["head.weight"] / len(images)

    made = measured(kind="fisher", labels="exact")

    torch.testing.assert_close(made["fisher/head.weight"], expected, rtol=1e-4, atol=1e-8)


def test_gradient_norms_are_of_each_example_and_tensor(bench):
    net, images, labels = network()
    norms = [
        {key: square.sum().sqrt() for key, square in squared_gradients(net, F.cross_entropy(x, y)).items()}
        for x, y in ((net(image[None]), label[None]) for image, label in zip(images, labels, strict=True))
    ]

    made = measured(kind="gradient,gram", labels="true")

    assert {key for key in made if key.startswith("gradient/")} == {f"gradient/{key}" for key in norms[0]}
    for key in norms[0]:
        mean = torch.stack([norm[key] for norm in norms]).mean()
        torch.testing.assert_close(made[f"gradient/{key}"], mean.reshape(1), rtol=1e-5, atol=1e-8)
    assert header_of("a.stats.safetensors")["labels"] == "true"


def test_gradient_norms_and_fisher_information_are_measured_at_once(bench):
    both = measured(kind="fisher,gradient", labels="exact")

    alone = measured(kind="fisher", labels="exact") | measured(kind="gradient", labels="exact")
    assert both.keys() == alone.keys()
    assert all(torch.equal(both[key], alone[key]) for key in both)


def test_sampled_labels_are_a_function_of_the_seed_and_nothing_else(bench):
    first, again, other = (
        measured(f"{name}.safetensors", kind="fisher", seed=seed)
        for name, seed in (("x", 3), ("y", 3), ("z", 4))
    )

    assert torch.equal(first["fisher/head.weight"], again["fisher/head.weight"])
    assert not torch.equal(first["fisher/head.weight"], other["fisher/head.weight"])


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (torch.nn.Conv1d(3, 5, 4, padding="same", dilation=2), (2, 3, 9)),
        (torch.nn.Conv1d(3, 5, 3, stride=2, padding=1), (3, 9)),
        (torch.nn.Conv2d(2, 4, (1, 3), padding="same"), (2, 2, 5, 6)),
        (torch.nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect", stride=2), (1, 2, 5, 6)),
    ],
    ids=repr,
)
def test_a_convolution_is_its_weight_times_the_patches_that_are_collected(layer, shape):
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    subject = Subject(layer.eval(), [images], layer)
    (collector,) = collectors_of(subject, ("gram",))
    collector.start()
    rows: list[Tensor] = []
    collector.add = rows.append  # type: ignore[method-assign]

    with torch.no_grad(), looking([collector]):
        expected = layer(images)

    made = rows[0].float() @ layer.weight.flatten(1).T + layer.bias
    batch = expected if expected.ndim == layer.weight.ndim else expected[None]
    torch.testing.assert_close(made, batch.flatten(2).transpose(1, 2).flatten(0, 1))


def test_gram_matrices_are_those_of_the_inputs_of_layers(bench):
    net, images, _ = network()
    hidden = torch.tanh(net.conv(images)).flatten(1)
    patches = F.unfold(images, 3, padding=1, stride=2).transpose(1, 2).reshape(-1, 18)
    assert torch.allclose(  # the rows of the filters times the patches are the convolution
        patches @ net.conv.weight.flatten(1).T + net.conv.bias,
        net.conv(images).flatten(2).transpose(1, 2).reshape(-1, 4),
        atol=1e-5,
    )

    made = measured(kind="gram,mean,norm")

    torch.testing.assert_close(made["gram/head.weight"], hidden.T @ hidden / 30, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made["gram/conv.weight"], patches.T @ patches / 120, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made["mean/head.weight"], hidden.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made["norm/head.weight"], hidden.square().mean(0).sqrt(), rtol=1e-5, atol=1e-6)
    assert header_of("a.stats.safetensors")["rows"] == {"conv.weight": 120, "head.weight": 30}


def test_little_memory_takes_more_trips_and_gives_the_same_bytes(bench):
    whole = measured("whole.safetensors", kind="fisher,gram")

    in_parts = measured("parts.safetensors", kind="fisher,gram", memory=700)

    assert whole.keys() == in_parts.keys()
    assert all(torch.equal(whole[key], in_parts[key]) for key in whole)


class Stopped(BaseException):
    """An interruption."""


@pytest.mark.parametrize("stop", [3, 14, 29, 45])
def test_an_interrupted_calibration_goes_on_where_its_sums_were_written(bench, stop):
    expected = measured("expected.safetensors", kind="fisher,gram", memory=2500, chunk=4)

    def run(stop: int | None) -> int:
        seen: list[int] = []
        with open_stored(Path("a.safetensors")) as stored:
            subject = load_subject(stored, "a.pt", "net.py:subject")
            logits = subject.logits

            def look(example: int) -> Tensor:
                if len(seen) == stop:
                    raise Stopped
                seen.append(example)
                return logits(example)

            object.__setattr__(subject, "logits", look)
            calibrate(
                subject,
                stored,
                Request(("fisher", "gram"), memory=2500, chunk=4),
                Path("a.stats.safetensors"),
            )
        return len(seen)

    with pytest.raises(Stopped):
        run(stop)
    assert not Path("a.stats.safetensors").exists()
    rest = run(None)

    made = load_file("a.stats.safetensors")
    assert all(torch.equal(expected[key], made[key]) for key in expected)
    whole = run(None)  # finished: another begins anew
    assert rest == whole - (stop // 30 * 30 + stop % 30 // 4 * 4)  # 30 examples a trip, 4 a chunk
    assert [*bench.glob(".*.calibration")] == []


def test_what_another_request_has_left_is_not_used(bench):
    left = bench / ".a.stats.safetensors.calibration"
    left.mkdir()
    (left / "request.json").write_text("{}")
    save_file({"fisher/head.weight": torch.ones(3, 16)}, left / "group-0.safetensors", {"rows": "{}"})

    made = measured(kind="fisher")

    assert not torch.equal(made["fisher/head.weight"], torch.ones(3, 16))


def test_the_header_pins_model_data_count_seed_and_code(bench):
    measured(kind="fisher", seed=7, count=12)

    header = header_of("a.stats.safetensors")

    assert (header["model"], header["data"], header["count"], header["seed"]) == (
        "a.safetensors",
        "a.pt",
        12,
        7,
    )
    assert len(header["model_sha256"]) == len(header["data_sha256"]) == len(header["fingerprint"]) == 64
    assert header["labels"] == "sampled" and header["code"].startswith("0.")
    assert header["settings"] == {"module": "net.py:subject"}
    assert header["unmeasured"]["fisher"] == {"steps": ["I64", []]}


def test_a_fingerprint_tells_models_apart_that_differ_in_one_value(bench):
    weights = load_file("a.safetensors")
    weights["head.bias"][2] += 1e-3
    save_file(weights, "c.safetensors")

    prints = []
    for name in ("a", "c"):
        with open_stored(Path(f"{name}.safetensors")) as stored:
            prints.append(fingerprint(stored))

    assert prints[0] != prints[1]


def test_layers_that_share_a_weight_have_no_gram_matrix():
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.body = torch.nn.Linear(4, 4)

    from mecha_exp.calibration import Subject

    collectors = collectors_of(Subject(Tied(), [1], lambda example: torch.zeros(1, 2)), ("fisher", "gram"))

    assert [c.name for c in collectors] == [
        "fisher/embed.weight", "fisher/body.weight", "fisher/body.bias", "gram/body.weight",
    ]  # fmt: skip


def test_a_gradient_that_is_not_finite_is_an_error_that_names_the_example():
    collector = FisherCollector("w", (2,), torch.nn.Parameter(torch.zeros(2)))
    collector.start()

    with pytest.raises(EvaluationError, match="the gradient of 'w' is NaN or infinite at example 5"):
        collector.add(torch.tensor([1.0, torch.nan]), 1.0, 5)


def test_inputs_that_are_not_finite_are_an_error(bench):
    content = torch.load("a.pt", weights_only=True)
    content["images"][4, 0, 0, 0] = torch.inf
    torch.save(content, "a.pt")

    with pytest.raises(EvaluationError, match=r"an input of the layer of 'conv\.weight' is NaN or infinite"):
        measured(kind="gram")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"output": None}, r"output=\.\.\. is missing"),
        ({"data": None, "output": None}, r"data=\.\.\. is missing"),
        ({"output": "stats.pt"}, r"output: expected a \.safetensors file, got stats\.pt"),
        (
            {"kind": "fischer"},
            r"kind=fischer: expected fisher, gram, .*, activations, mask\. Did you mean 'fisher'",
        ),
        ({"kind": ","}, "kind: expected fisher"),
        ({"seeds": "1"}, r"'seeds=1' is not a setting such as data=FILE\. Did you mean 'seed'"),
        ({"count": "ten"}, "count: expected a whole number, got ten"),
        ({"count": "0"}, "count: expected a number above 0, got 0"),
        ({"labels": "drawn"}, "labels: expected sampled or true or exact, got drawn"),
        ({"module": "none.py:subject"}, "there is no file 'none.py'.*Or name one of digits, mini8"),
        ({"module": "net.py:subjekt"}, "has no function 'subjekt'"),
        ({"module": "net.py:something"}, "returns a int: expected a Subject"),
        ({"module": "net.py:without_labels", "labels": "true"}, "labels=true: the data have no labels"),
        ({"module": "net.py:in_training"}, r"Net is in training mode.*Call its eval\(\)"),
        (
            {"module": "net.py:of_another_model"},
            r"the parameter 'head\.weight' of Net, \[3, 16\], is not the tensor 'head\.weight' of "
            r"a\.safetensors.*Load the weights of the model",
        ),
        (
            {"module": "net.py:under_the_wrong_key"},
            r"the parameter 'unused' of Net, \[2\], is not the tensor 'head\.bias' of a\.safetensors, \[3\]",
        ),
        ({"data": "none.pt"}, r"cannot take the model or data=none\.pt: FileNotFoundError"),
        ({"module": None}, r"a\.safetensors has no config\.json beside it"),
        ({"length": "5"}, r"length: is a setting of transformers, and not of module=net\.py:subject"),
        ({"module": "digits", "data": "0_4"}, r"data=0_4: digits has no such task\. Did you mean '0_3'"),
        ({"module": "mini8", "data": "digit"}, r"data=digit: mini8 has no such task\. Did you mean 'digits'"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(bench, words, message):
    given = {"data": "a.pt", "module": "net.py:subject", "output": "x.safetensors", **words}

    with pytest.raises(ConfigError, match=message):
        verb.main(
            ["a.safetensors", *(f"{name}={value}" for name, value in given.items() if value is not None)]
        )
    assert not Path("x.safetensors").exists()


@pytest.mark.parametrize("output", ["a.safetensors", "./a.safetensors", "data.safetensors"])
def test_an_output_that_is_an_input_is_refused_and_stays(bench, output):
    Path("data.safetensors").write_bytes(b"anything")
    before = Path(output).read_bytes()

    with pytest.raises(ConfigError, match="is an input, which would be destroyed"):
        measured(output, data="data.safetensors", module="net.py:whatever_the_data")

    assert Path(output).read_bytes() == before


def test_parameters_that_nothing_uses_may_have_a_trip_of_their_own(bench):
    whole = measured("whole.safetensors", kind="fisher")

    alone = measured("alone.safetensors", kind="fisher", memory=8)

    assert torch.equal(alone["fisher/unused"], torch.zeros(2))
    assert all(torch.equal(whole[key], alone[key]) for key in whole)


def test_an_example_that_fails_is_named(bench):
    with pytest.raises(EvaluationError, match="example 0 fails: IndexError: Target 7 is out of bounds"):
        measured(module="net.py:with_wrong_labels", labels="true")


def test_logits_that_are_not_numbers_are_an_error(bench):
    content = torch.load("a.pt", weights_only=True)
    content["images"][4] = torch.nan
    torch.save(content, "a.pt")

    with pytest.raises(EvaluationError, match="the logits of example 4 are NaN"):
        measured(kind="fisher")


def test_the_code_of_the_users_module_is_in_the_header(bench):
    measured(kind="fisher", count=2)
    before = header_of("a.stats.safetensors")["code"]

    path = Path("net.py")
    path.write_text(path.read_text() + "\n# another version\n")
    measured(kind="fisher", count=2)

    assert header_of("a.stats.safetensors")["code"] != before


def test_a_module_with_parameters_that_the_model_lacks_is_refused(bench):
    weights = load_file("a.safetensors")
    del weights["steps"]
    save_file({f"model.{key}": value for key, value in weights.items()}, "c.safetensors")
    text = Path("net.py").read_text().replace("state_dict[key]", "state_dict[f'model.{key}']")
    Path("other.py").write_text(text)

    with pytest.raises(
        ConfigError, match=r"the parameter 'unused' of its module is not a key of c\.safetensors"
    ):
        measured(model="c", data="a.pt", module="other.py:subject")


def test_a_file_without_statistics_says_how_to_make_them(bench):
    with (
        open_stored(Path("a.safetensors")) as stored,
        pytest.raises(
            CheckpointError,
            match=r"a\.safetensors does not hold statistics.*python -m mecha_exp calibrate MODEL",
        ),
    ):
        StatisticsHeader.of(stored)


def test_a_file_without_the_kind_says_which_it_holds(bench):
    measured(kind="fisher")

    with (
        open_stored(Path("a.stats.safetensors")) as stored,
        pytest.raises(
            CheckpointError, match=r"holds fisher of a\.safetensors, and not gram\. Calibrate with kind=gram"
        ),
    ):
        StatisticsSource(stored, "gram")


def test_few_examples_are_worth_a_warning(bench, capsys):
    measured(kind="fisher", count=9)

    said = capsys.readouterr().out
    assert "a.stats.safetensors: fisher of 9 examples" in said
    assert "Fisher information of sampled labels" in said
    assert "warning: only 9 examples" in said


def test_the_verb_offers_the_labels_that_there_are():
    assert all(label in verb.EXAMPLE for label in LABELS)


@pytest.mark.parametrize(
    ("model", "module", "data", "layers"),
    [
        ("pkg://mecha_exp.examples.digits/expert_4_6.safetensors", "digits", "4_6", 4),
        ("made://mini8/base.safetensors", "mini8", "halves", 17),
    ],
)
def test_the_bundled_models_are_calibrated_on_their_tasks(tmp_path, model, module, data, layers):
    output = tmp_path / "s.safetensors"

    status = verb.main(
        [model, f"module={module}", f"data={data}", "count=5", f"output={output}", "labels=exact"]
    )

    assert status == 0
    made = load_file(output)
    assert sum(name.startswith("gram/") for name in made) == layers
    assert all(tensor.isfinite().all() for tensor in made.values())
