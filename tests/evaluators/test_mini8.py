"""The eight-task bench has the structure that its page promises."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.evaluators.mini8 import mini8
from mecha_exp.examples.mini8 import train
from mecha_exp.examples.mini8.measured import KINDS, measure
from mecha_exp.examples.mini8.network import Encoder, encoder_shapes
from mecha_exp.examples.mini8.storage import pack, unpack
from mecha_exp.examples.mini8.tasks import SPLITS, tasks
from mecha_exp.sources.search import find_model

BASE = Path(train.__file__).with_name("base.safetensors")


def test_a_source_lies_in_one_split_for_all_tasks():
    sources = {s: {name for task in tasks()[s].values() for name in task.sources} for s in SPLITS}

    assert not sources["train"] & sources["validation"]
    assert not sources["train"] & sources["test"]
    assert not sources["validation"] & sources["test"]


def test_splits_have_half_a_seventh_and_a_third_of_the_images():
    counts = {split: sum(len(task.labels) for task in tasks()[split].values()) for split in SPLITS}
    total = sum(counts.values())

    assert {split: round(count / total, 2) for split, count in counts.items()} == {
        "train": 0.5,
        "validation": 0.15,
        "test": 0.35,
    }


@pytest.mark.parametrize("split", SPLITS)
def test_every_class_of_every_task_is_in_every_split(split: str):
    for name, task in tasks()[split].items():
        assert set(task.labels.tolist()) == set(range(task.classes)), name
        assert 0 <= float(task.images.min()) <= float(task.images.max()) <= 1
        assert len(task.sources) == len(task.images) == len(task.labels)


def test_the_evaluator_gives_the_hits_of_plain_torch():
    weights, heads = load_file(BASE), load_file(BASE.with_name("heads.safetensors"))
    network = Encoder()
    network.load_state_dict(weights)

    outcomes = mini8(weights, split="validation")

    for name, task in tasks()["validation"].items():
        with torch.no_grad():
            logits = network(task.images) @ heads[f"{name}.weight"].T + heads[f"{name}.bias"]
        assert outcomes.values[name].tolist() == (logits.argmax(1) == task.labels).double().tolist()
        assert outcomes.clusters[name].tolist() == list(task.sources)


def test_logits_that_are_not_finite_are_misses():
    weights = {key: torch.full_like(tensor, torch.nan) for key, tensor in load_file(BASE).items()}

    assert mini8(weights).means("accuracy")["accuracy"] == 0


def test_another_model_is_refused():
    with pytest.raises(ConfigError, match="evaluator=mini8 measures the encoder of examples/mini8 only"):
        mini8({"x": torch.zeros(3)})


def test_the_base_is_of_the_encoder_and_better_than_chance():
    accuracies = train.accuracies(load_file(BASE), "test")

    assert {key: tuple(tensor.shape) for key, tensor in load_file(BASE).items()} == encoder_shapes()
    assert all(value > 1.3 / tasks()["test"][name].classes for name, value in accuracies.items())


def test_an_expert_is_the_same_to_the_bit_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train, "EXPERT_STEPS", 3)
    first, second = train.train_expert("photos", 0), train.train_expert("photos", 0)
    other = train.train_expert("photos", 1)

    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_eight_bits_are_off_by_half_a_step_at_most():
    random = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(9, 5, generator=random), "b": torch.zeros(3)}
    expert = {"w": base["w"] + torch.randn(9, 5, generator=random) / 50, "b": torch.zeros(3)}

    packed = pack(expert, base)
    again = unpack(packed, base)

    assert packed["w"].dtype == torch.int8 and int(packed["w"].abs().max()) == 127
    assert float((again["w"] - expert["w"]).abs().max()) <= 0.5001 * float(packed["w/step"])
    assert torch.equal(again["b"], expert["b"])


def test_the_stored_experts_are_written_without_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def train_expert(name: str, seed: int) -> None:
        raise AssertionError("nothing is trained")

    monkeypatch.setattr(train, "train_expert", train_expert)
    train.make_experts(tmp_path, [0])

    written = {path.stem: load_file(path) for path in (tmp_path / "seed0").iterdir()}
    assert set(written) == set(tasks()["train"])
    for weights in written.values():
        assert {key: tuple(tensor.shape) for key, tensor in weights.items()} == encoder_shapes()
    assert train.STORED[0].stat().st_size < 1_200_000


@pytest.mark.heavy
def test_the_stored_experts_are_those_that_training_makes():
    stored, trained = train._stored_expert("photos", 0), train.train_expert("photos", 0)

    off = torch.cat(
        [(stored[key].float() - trained[key].float()).abs().flatten() for key in encoder_shapes()]
    )
    assert float((off > 0).float().mean()) < 0.05  # another processor may round a few to the next step
    assert float(off.max()) <= 2


def test_missing_experts_are_trained_on_first_use_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MECHA_EXP_CACHE", str(tmp_path))
    trained = []

    def make_experts(folder: Path, seeds: list[int]) -> None:
        trained.append(seeds)

    monkeypatch.setattr(train, "make_experts", make_experts)
    train._experts_folder.cache_clear()

    path = find_model("made://mini8/seed3/photos.safetensors", [])
    train._experts_folder.cache_clear()

    assert trained == [[3]]
    assert path.is_relative_to(tmp_path) and path.parts[-2:] == ("seed3", "photos.safetensors")
    assert find_model("made://mini8/base.safetensors", []) == BASE


def test_statistics_of_an_expert_are_measured_on_first_use_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("MECHA_EXP_CACHE", str(tmp_path))
    measured = []

    def measure(kind: str, seed: int, task: str, path: Path) -> None:
        measured.append((kind, seed, task))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    monkeypatch.setattr(train, "measure", measure)
    train._experts_folder.cache_clear()

    for _ in range(2):
        find_model("made://mini8/seed1/photos.statistics.safetensors", [])
        find_model("made://mini8/seed0/digits.mask.safetensors", [])
    train._experts_folder.cache_clear()

    assert measured == [("statistics", 1, "photos"), ("mask", 0, "digits")]


def test_two_processes_that_measure_the_same_do_not_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path, outputs = tmp_path / "seed0" / "photos.mask.safetensors", []

    def calibrate(words: list[str]) -> int:
        output = Path(words[-1].removeprefix("output="))
        outputs.append(output)
        if len(outputs) == 1:  # the other process begins later and ends first
            measure("mask", 0, "photos", path)
        output.write_text(f"of process {outputs.index(output) + 1}")
        return 0

    monkeypatch.setattr("mecha_exp.calibration.seams.calibrate.main", calibrate)
    measure("mask", 0, "photos", path)

    assert outputs[0].parent != outputs[1].parent
    assert path.read_text() == "of process 2"  # what another merge may be reading stays
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "wanted"), [("statistics", {"fisher", "gram"}), ("mask", {"mask"})])
def test_what_is_measured_of_an_expert_is_what_merges_need(
    kind: str, wanted: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    few = [word for word in KINDS[kind] if not word.startswith("count=")]
    monkeypatch.setitem(KINDS, kind, (*few, "count=8"))

    measure(kind, 0, "halves", tmp_path / "halves.safetensors")

    found = load_file(tmp_path / "halves.safetensors")
    assert {name.partition("/")[0] for name in found} == wanted


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("made://mini9/base.safetensors", "there is no bench 'mini9'. Did you mean 'mini8'?"),
        ("made://mini8/seed0/cars.safetensors", "seed0/cars.safetensors is neither"),
        ("made://mini8/seedx/photos.safetensors", "seedx/photos.safetensors is neither"),
        (
            "made://mini8/seed0/photos.gram.safetensors",
            "seed0/TASK.mask.safetensors; seed0/photos.gram.safetensors is neither",
        ),
    ],
)
def test_an_unknown_model_of_a_bench_is_an_error(path: str, message: str):
    with pytest.raises(CheckpointError) as caught:
        find_model(path, [])

    assert message in str(caught.value)
