"""Evaluators on a GPU: nearly the numbers of the CPU, the same ones twice, and a network that is built once.

`pytest -m cuda` runs them where there is a GPU. With the libraries of the extras they run on the CPU, too.
"""

import io
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from state_dicts import numbers_of
from tiny_tokenizers import SMALL, WORDS, write_tokenizer

from mecha_exp import Context
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import Measurement, Scoring, read_scoring
from mecha_exp.evaluation.isolation.pool import close_pools
from mecha_exp.evaluation.transfers import expect, transfers_to
from mecha_exp.evaluators.common import ModelFolder, network
from mecha_exp.evaluators.common.devices import check_room
from mecha_exp.evaluators.common.loading import Loader
from mecha_exp.evaluators.common.networks import _slot

GPU = "cuda:0"
on_a_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries are not ours
Weights = dict[str, torch.Tensor]
Near = Callable[[Measurement, Measurement], None]


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.libraries), pytest.param(GPU, marks=on_a_gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], list[object]]:
    """Notes the calls of a method in a list."""

    def count(owner: type, name: str) -> list[object]:
        calls: list[object] = []
        method = getattr(owner, name)

        def noted(self: object, *arguments: object, **more: object) -> object:
            calls.append(self)
            return method(self, *arguments, **more)

        monkeypatch.setattr(owner, name, noted)
        return calls

    return count


@dataclass(frozen=True)
class Case:
    """What is measured: points between two inputs, and how near the numbers of two devices must be."""

    settings: Mapping[str, Any]
    inputs: Sequence[Path]
    near: Near

    @property
    def context(self) -> Context:
        return Context("point", inputs=dict(zip("ab", self.inputs, strict=True)))

    @property
    def points(self) -> list[Weights]:
        a, b = map(numbers_of, self.inputs)
        return [{key: torch.lerp(a[key], b[key], alpha) for key in a} for alpha in (0.2, 0.9)]

    def scoring(self, **more: Any) -> Scoring:
        shapes = {key: tuple(tensor.shape) for key, tensor in numbers_of(self.inputs[0]).items()}
        return read_scoring({**self.settings, **more}, shapes, context=self.context)

    def measured(self, scoring: Scoring, points: Sequence[Weights]) -> list[Measurement]:
        return [scoring.measure_one(scoring.evaluations[0], point, self.context) for point in points]


def numbers_within(relative: float) -> Near:
    """Each number differs by this share at most."""

    def near(there: Measurement, here: Measurement) -> None:
        assert dict(there.metrics) == pytest.approx(dict(here.metrics), rel=relative)

    return near


def few_other_answers(there: Measurement, here: Measurement) -> None:
    """In each task two answers may be other ones: some are nearly ties, and a GPU's convolutions are TF32."""
    assert there.outcomes is not None and here.outcomes is not None
    for task, values in here.outcomes.values.items():
        assert 0 < values.mean() < 1
        assert int((there.outcomes.values[task] != values).sum()) <= 2, task


def pictures_alike(there: Measurement, here: Measurement) -> None:
    """The pixels, from 0 to 255, differ by 2 in the mean at most: convolutions are TF32 on a GPU."""
    assert list(there.files) == list(here.files) != []
    for name in here.files:
        ours, theirs = (_pixels(measurement.files[name]) for measurement in (there, here))
        assert theirs.std() > 10
        assert np.abs(ours - theirs).mean() <= 2, name
    assert dict(there.metrics) == pytest.approx(dict(here.metrics), abs=2)


def _pixels(content: bytes | Path) -> np.ndarray:
    assert isinstance(content, bytes)
    return np.asarray(Image.open(io.BytesIO(content))).astype(float)


def batch_of_tokens(request: pytest.FixtureRequest) -> Case:
    pytest.importorskip("transformers")
    data = request.getfixturevalue("tmp_path") / "ids.pt"
    ids = torch.randint(3, 24, (12, 9), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(9) < torch.arange(12)[:, None] + 2).long()
    torch.save({"input_ids": ids, "attention_mask": mask}, data)
    settings = {"name": "forward", "data": str(data), "batch_size": 5}
    return Case(settings, request.getfixturevalue("llamas"), numbers_within(1e-3))


def documents(request: pytest.FixtureRequest, **more: Any) -> dict[str, Any]:
    draw, data = random.Random(5), request.getfixturevalue("tmp_path") / "documents.jsonl"
    rows = [{"text": " ".join(draw.choices(WORDS.split(), k=draw.randint(3, 40)))} for _ in range(6)]
    data.write_text("\n".join(map(json.dumps, rows)))
    return {"name": "perplexity", "data": str(data), "length": 16, "stride": 8, "batch_size": 3, **more}


def documents_of_llamas(request: pytest.FixtureRequest) -> Case:
    pytest.importorskip("transformers")
    return Case(documents(request), request.getfixturevalue("llamas"), numbers_within(1e-3))


def documents_in_bfloat16(request: pytest.FixtureRequest) -> Case:
    pytest.importorskip("transformers")
    settings = documents(request, dtype="bfloat16")
    return Case(settings, request.getfixturevalue("llamas"), numbers_within(0.05))


def documents_of_gpt2(request: pytest.FixtureRequest) -> Case:
    """Its output layer is its embedding."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        folders.append(request.getfixturevalue("tmp_path") / f"gpt{seed}")
        config = transformers.GPT2Config(vocab_size=40, bos_token_id=1, eos_token_id=2, **sizes)
        transformers.GPT2LMHeadModel(config).save_pretrained(folders[-1])
        write_tokenizer(folders[-1])
    return Case(documents(request), folders, numbers_within(1e-3))


def tasks_of_the_harness(request: pytest.FixtureRequest) -> Case:
    pytest.importorskip("lm_eval")
    tasks = str(request.getfixturevalue("word_task")())
    settings = {"name": "lm_eval", "tasks": ["word_choice"], "include_path": tasks, "batch_size": 4}
    return Case(settings, request.getfixturevalue("llamas"), few_other_answers)


def rows_with_heads(request: pytest.FixtureRequest) -> Case:
    """A regression, whose numbers follow the logits, by a head that is not merged."""
    for name in ("sklearn", "scipy"):
        pytest.importorskip(name)
    transformers = pytest.importorskip("transformers")
    root, draw = request.getfixturevalue("tmp_path"), random.Random(5)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        config = transformers.BertConfig(
            vocab_size=40, max_position_embeddings=32, initializer_range=0.5, num_labels=2, **SMALL
        )
        transformers.BertForSequenceClassification(config).save_pretrained(root / name)
        write_tokenizer(root / name)
    texts = [" ".join(draw.choices(WORDS.split(), k=draw.randint(2, 7))) for _ in range(48)]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    rows = [{"sentence1": a, "sentence2": b, "label": draw.random() * 5} for a, b in pairs]
    (root / "stsb.jsonl").write_text("\n".join(map(json.dumps, rows)))
    torch.manual_seed(9)
    head = {"classifier.weight": torch.randn(1, 16), "classifier.bias": torch.zeros(1)}
    save_file(head, root / "stsb.safetensors")
    settings = {"name": "text_classification", "data": str(root), "heads": str(root), "tasks": ["stsb"]}
    settings |= {"metrics": ["pearson"], "batch_size": 5}
    return Case(settings, [root / "a", root / "b"], numbers_within(1e-2))


def pictures_of(name: str, model: str) -> Callable[[pytest.FixtureRequest], Case]:
    def case(request: pytest.FixtureRequest) -> Case:
        pytest.importorskip("transformers")
        root = request.getfixturevalue("vision")
        settings = {"name": name, "data": str(root / "data"), "tasks": ["pets", "toys"], "batch_size": 7}
        return Case(settings, [root / f"{model}_1", root / f"{model}_2"], few_other_answers)

    return case


def drawn_pictures(request: pytest.FixtureRequest) -> Case:
    for name in ("diffusers", "transformers"):
        pytest.importorskip(name)
    root = request.getfixturevalue("pipelines")
    settings = {"name": "images", "prompts": ["a photo of a cat"], "seeds": [0, 3], "steps": 2}
    scores = {"guidance": 3.0, "clip": str(root / "clip")}
    return Case({**settings, **scores}, [root / "a", root / "b"], pictures_alike)


CASES = {
    "forward": batch_of_tokens,
    "perplexity": documents_of_llamas,
    "perplexity in bfloat16": documents_in_bfloat16,
    "perplexity of GPT-2": documents_of_gpt2,
    "lm_eval": tasks_of_the_harness,
    "text_classification": rows_with_heads,
    "image_classification": pictures_of("image_classification", "vit"),
    "clip_zero_shot": pictures_of("clip_zero_shot", "clip"),
    "images": drawn_pictures,
}


@pytest.mark.parametrize("name", CASES)
def test_points_have_nearly_the_numbers_of_the_cpu_and_the_same_ones_twice(request, name, device, counted):
    case = CASES[name](request)
    here = case.measured(case.scoring(device="cpu"), case.points)
    scoring, (first, second) = case.scoring(device=device), case.points
    loads = counted(Loader, "load")

    there = case.measured(scoring, [first])
    built = len(loads)
    there += case.measured(scoring, [second])
    again = case.measured(scoring, [first, second])

    assert len(loads) == built  # no point but the first builds a network
    assert there[0].metrics != there[1].metrics
    for one, other, expected in zip(there, again, here, strict=True):
        assert one.metrics == other.metrics
        assert one.files == other.files
        examples, once_more = (measurement.by_metric("main") for measurement in (one, other))
        assert examples.keys() == once_more.keys()
        assert all(outcomes.equals(once_more[metric]) for metric, outcomes in examples.items())
        case.near(one, expected)


def test_each_point_is_swapped_into_one_network(request, llamas, device, counted, monkeypatch):
    """On a GPU each of its tensors is pinned once, and the next point is there before it is asked for."""
    case, folder = documents_of_llamas(request), ModelFolder(llamas[0])
    points, is_gpu = [*case.points, *case.points], device == GPU
    monkeypatch.setattr("mecha_exp.evaluation.transfers._transfers", {})
    _slot.cache_clear()
    loads, pins = counted(Loader, "load"), counted(torch.Tensor, "pin_memory")
    networks = []

    for number, weights in enumerate(points):
        with network(folder, weights, "AutoModelForCausalLM", device=device) as module:
            networks.append(module)
            assert len(pins) == (is_gpu and (number + 1) * len(weights))
            for name, tensor in module.state_dict().items():
                assert tensor.device == torch.device(device)
                assert is_gpu or tensor.data_ptr() == weights[name].data_ptr()
                torch.testing.assert_close(tensor.cpu(), weights[name], rtol=0, atol=0)
            if is_gpu and number + 1 < len(points):
                expect(points[number + 1])
                transfers_to(torch.device(device)).wait()
                assert len(pins) == (number + 2) * len(weights)
        assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}

    assert len(loads) == 1
    assert len(set(map(id, networks))) == 1


WHERE = """
import torch

class OnDevice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, x):
        assert x.device.type == self.layer.weight.device.type == "{kind}", x.device
        return self.layer(x)
"""


@pytest.fixture
def linear(tmp_path: Path, device: str) -> Case:
    """Points between two layers that refuse to compute on another kind of device."""
    (tmp_path / "net.py").write_text(WHERE.format(kind=torch.device(device).type))
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        layer = torch.nn.Linear(3, 4).state_dict(prefix="layer.")
        save_file(dict(layer), tmp_path / f"{name}.safetensors")
    torch.save({"x": torch.randn(10, 5, 3)}, tmp_path / "x.pt")
    settings = {
        "name": "forward", "data": str(tmp_path / "x.pt"), "module": f"{tmp_path / 'net.py'}:OnDevice",
    }  # fmt: skip
    return Case(settings, [tmp_path / f"{name}.safetensors" for name in "ab"], numbers_within(1e-4))


@pytest.mark.parametrize("by", ["devices", "workers"])
def test_workers_measure_on_the_device_what_this_process_does(linear: Case, device: str, by: str):
    asked = {"devices": [device]} if by == "devices" else {"workers": 2, "device": device}
    here = linear.measured(linear.scoring(device=device), linear.points)
    scoring = linear.scoring(**asked)

    started = [scoring.start(scoring.evaluations[0], point, linear.context) for point in linear.points]
    there = [future.result(timeout=120) for future in started]
    close_pools()

    assert there[0].metrics != there[1].metrics
    for one, expected in zip(there, here, strict=True):
        linear.near(one, expected)


def test_workers_measure_a_language_model_on_the_device(request, device: str):
    case = documents_of_llamas(request)
    here = case.measured(case.scoring(device=device), case.points)

    there = case.measured(case.scoring(workers=1, device=device), case.points)
    close_pools()

    for one, expected in zip(there, here, strict=True):
        case.near(one, expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_that_is_too_small_is_refused_with_both_sizes(tmp_path: Path):
    free, total = torch.cuda.mem_get_info(GPU)
    rows = total // 16  # of 3 weights and a bias, in float32
    shapes, needed = {"weight": (rows, 3), "bias": (rows,)}, 16 * rows
    (tmp_path / "wide.py").write_text(f"import torch\n\ndef make():\n    return torch.nn.Linear(3, {rows})\n")
    torch.save({"input": torch.randn(2, 3)}, tmp_path / "x.pt")
    asked = {"name": "forward", "data": str(tmp_path / "x.pt"), "module": f"{tmp_path / 'wide.py'}:make"}

    with pytest.raises(ConfigError) as error:
        read_scoring({**asked, "dtype": "float32", "device": GPU}, shapes)

    said = re.search(
        r"cuda:0: the weights need ([\d,]+) bytes, and ([\d,]+) are free there", str(error.value)
    )
    assert said is not None
    assert [int(number.replace(",", "")) for number in said.groups()] == [
        needed,
        pytest.approx(free, rel=0.1),
    ]

    third = {"weight": (free // 12, 2)}  # two thirds of what is free
    check_room(GPU, third, "float32", Context())
    with pytest.raises(ConfigError, match=r"the weights of 2 workers need .* Use fewer workers"):
        check_room(GPU, third, "float32", Context(devices=("", GPU)))


@pytest.mark.parametrize("key", ["device", "devices"])
def test_a_gpu_beyond_those_that_are_there_is_refused(linear: Case, key: str):
    beyond = f"cuda:{torch.cuda.device_count()}"

    with pytest.raises(ConfigError, match=f"evaluator.{key}={beyond}: torch sees (no GPU|[1-9] GPUs?) here"):
        linear.scoring(**{key: beyond})
