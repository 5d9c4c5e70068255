"""Workers measure models side by side, and are replaced when they die."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import evaluator
from mecha_exp.entry_points import announced
from mecha_exp.errors import ConfigError, EvaluationError, Problems
from mecha_exp.evaluation import Context, Measurement, read_scoring
from mecha_exp.evaluation.isolation.pool import _environment, close_pools, evaluation_pool, read_workers
from mecha_exp.evaluation.isolation.shared_model import shared
from mecha_exp.evaluation.registry import GROUP, all_evaluators
from mecha_exp.plugins import load_plugins

PLUGIN = '''
import os, time
from pathlib import Path
from mecha_exp import evaluator

@evaluator("test_pool_meets", metric="sum")
def meets(state_dict, *, folder: str, count: int = 1, context):
    Path(folder, context.name).touch()
    while len(list(Path(folder).iterdir())) < count:
        time.sleep(0.01)
    return {"sum": float(state_dict["w"].sum()), "process": float(os.getpid())}

@evaluator("test_pool_dies", metric="sum")
def dies(state_dict, *, mark: str):
    """Die at the first attempt."""
    if not Path(mark).exists():
        Path(mark).touch()
        os._exit(7)
    return {"sum": float(state_dict["w"].sum())}

@evaluator("test_pool_counts", metric="sum")
def counts(state_dict, *, context):
    values = context.in_parts("rows", [range(2), range(2, 5)], lambda part: [float(n) for n in part])
    return {"sum": sum(map(sum, values))}

@evaluator("test_pool_hangs", metric="sum")
def hangs(state_dict):
    time.sleep(600)
'''
SHAPES = {"w": (3,)}
MODEL = {"w": torch.tensor([1.0, 2.0, 3.0])}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("pool") / "pool_plugin.py"
    path.write_text(PLUGIN)
    load_plugins([str(path)])
    yield str(path)
    close_pools()


def start(plugin: str, name: str, model=MODEL, context: str = "a", **settings) -> "Future[Measurement]":
    scoring = read_scoring({"name": name, "workers": 2, **settings}, SHAPES, [plugin])
    return scoring.start(scoring.evaluations[0], model, Context(context))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5, dtype=torch.float64),
        torch.arange(7, dtype=torch.int16),
        torch.empty(0, 3),
        torch.randn(3, 5).T,
        torch.randn(5).to(torch.bfloat16),
        torch.randn(9).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
    ],
    ids=lambda t: str(t.dtype),
)
def test_a_shared_model_has_the_same_bytes_and_is_not_changed_by_its_reader(tensor):
    model = {"first": torch.ones(3, dtype=torch.uint8), "second": tensor}

    with shared(model) as there:
        mapped = there.open()
        again = there.open()
    mapped["first"].zero_()

    assert list(mapped) == list(model)
    assert mapped["second"].dtype == tensor.dtype and mapped["second"].shape == tensor.shape
    assert torch.equal(mapped["second"].float(), tensor.float())
    assert again["first"].tolist() == [1, 1, 1]


def test_a_shared_model_may_be_empty():
    with shared({}) as there:
        assert there.open() == {}


def test_models_in_memory_and_in_files_are_measured_side_by_side(plugin, tmp_path):
    save_file({"w": torch.full((3,), 4.0)}, tmp_path / "m.safetensors")
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    settings = {"folder": str(meeting), "count": 2}

    both = [
        start(plugin, "test_pool_meets", context="a", **settings),
        start(plugin, "test_pool_meets", tmp_path / "m.safetensors", context="b", **settings),
    ]
    first, second = (future.result(timeout=120).metrics for future in both)

    assert (first["sum"], second["sum"]) == (6.0, 12.0)
    assert first["process"] != second["process"]


def test_a_worker_that_dies_is_replaced_and_its_model_tried_once_more(plugin, tmp_path, caplog):
    measurement = start(plugin, "test_pool_dies", mark=str(tmp_path / "mark"), context="alpha=0.3").result()

    assert measurement.metrics == {"sum": 6.0}
    assert "alpha=0.3: the evaluator 'test_pool_dies' ended its process (status 7)" in caplog.text
    assert "It is tried once more." in caplog.text


def test_a_worker_that_hangs_is_ended_twice_and_the_point_fails(plugin):
    with pytest.raises(EvaluationError, match=r"'test_pool_hangs' was not done after 0.2 s and was ended"):
        start(plugin, "test_pool_hangs", timeout=0.2).result()


def test_closing_ends_a_measurement_at_once(plugin):
    hanging = start(plugin, "test_pool_hangs")
    waiting = [start(plugin, "test_pool_hangs", context=str(i)) for i in range(2)]
    before = time.monotonic()
    while not hanging.running():
        time.sleep(0.01)

    close_pools()

    with pytest.raises(EvaluationError, match=r"ended its process|could not be started"):
        hanging.result(timeout=60)
    assert waiting[-1].cancelled() or waiting[-1].exception(timeout=60)
    assert time.monotonic() - before < 60
    assert evaluation_pool((plugin,), 2, ()) is not None  # a new one can be used
    close_pools()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"workers": -1},
            "evaluator.workers: expected a number of processes from 0 to 1024, or null for none, got -1",
        ),
        (
            {"workers": "two"},
            "evaluator.workers: expected a number of processes from 0 to 1024, or null for none, got 'two'",
        ),
        ({"devices": [1]}, r"evaluator.devices: expected names such as \[cuda:0,cuda:1\], got \[1\]"),
        ({"devices": ["gpu"]}, "evaluator.devices=gpu: unknown device. Use cpu, or cuda:0, cuda:1, ..."),
        ({"devices": ["cuda:99"]}, "evaluator.devices=cuda:99: torch sees .* here. Use cpu, or leave it out"),
        ({"workers": 1, "devices": ["cpu", "cpu"]}, "evaluator.workers=1: too few for 2 devices"),
    ],
)
def test_workers_and_devices_that_cannot_be_are_refused(plugin, settings, message):
    with pytest.raises(ConfigError, match=message):
        read_scoring({"name": "test_pool_hangs", **settings}, SHAPES, [plugin])


@pytest.mark.parametrize(
    ("devices", "device"), [(["cuda:1"], "cuda:1"), (["cuda:0", "cuda:1"], "cuda:0"), (["cpu"], "cuda")]
)
def test_a_gpu_that_a_worker_does_not_see_is_refused_before_a_merge(monkeypatch, devices, device):
    @evaluator("test_pool_on_device", metric="x")
    def on_device(state_dict, *, device: str = "auto"):
        return {"x": 0.0}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings = {"name": "test_pool_on_device", "devices": devices}

    message = re.escape(
        f"evaluator.device={device} with evaluator.devices=[{','.join(devices)}]: each worker sees"
    )
    with pytest.raises(ConfigError, match=f"{message} its own of these alone. Leave evaluator.device out"):
        read_scoring({**settings, "device": device}, SHAPES)
    assert read_scoring(settings, SHAPES).workers == len(devices)


def test_evaluators_follow_the_gpu_of_their_worker():
    """Each that has a device leaves the choice of it to the process that measures."""
    defaults = {
        n: e.parameters["device"].default for n, e in all_evaluators().items() if "device" in e.parameters
    }

    assert {"image_classification", "clip_zero_shot", "images", "perplexity"} <= set(defaults)
    assert {
        name: default for name, default in defaults.items() if name in announced(GROUP) and default != "auto"
    } == {}


def test_there_is_a_worker_a_device_and_each_sees_its_own_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert read_workers(None, ["cpu", "cpu"], Problems()) == (2, ("cpu", "cpu"))
    assert read_workers(None, "cpu", Problems()) == (1, ("cpu",))
    assert read_workers(3, None, Problems()) == (3, ())
    assert read_workers(None, None, Problems()) == (0, ())
    assert _environment(1, "cuda:1")["CUDA_VISIBLE_DEVICES"] == "1"
    assert _environment(1, "cpu")["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in _environment(2, None)
    assert int(_environment(10_000, None)["OMP_NUM_THREADS"]) == 1

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert _environment(1, "cuda:1")["CUDA_VISIBLE_DEVICES"] == "7"


def test_progress_comes_from_the_workers(plugin: str):
    shown: list[tuple[str, int, int]] = []
    context = Context("a", report=lambda *done: shown.append(done))
    read = read_scoring({"name": "test_pool_counts", "workers": 1}, SHAPES, plugins=[plugin])

    assert read.measure(MODEL, context) == {"sum": 10.0}
    assert shown == [("rows", 0, 5), ("rows", 2, 5), ("rows", 5, 5)]


def test_workers_that_have_begun_measure_the_models_that_come_later(plugin: str, tmp_path):
    close_pools()
    read = read_scoring({"name": "test_pool_meets", "workers": 3, "folder": str(tmp_path)}, SHAPES, [plugin])

    read.pool.begin(2)
    read.pool.begin(2)

    begun = [worker._running.pid for worker in read.pool._workers if worker._running]
    assert len(begun) == 2
    assert read.measure(MODEL, Context("a"))["process"] in begun
    close_pools()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_worker_measures_on_its_gpu(tmp_path):
    path = tmp_path / "on_gpu.py"
    path.write_text(ON_GPU)
    load_plugins([str(path)])
    scoring = read_scoring({"name": "test_pool_on_gpu", "devices": ["cuda:0", "cuda:0"]}, SHAPES, [str(path)])

    started = [
        scoring.start(scoring.evaluations[0], {"w": factor * MODEL["w"]}, Context(str(factor)))
        for factor in (1, 2, 3)
    ]

    assert [future.result(timeout=120).metrics["sum"] for future in started] == [6.0, 12.0, 18.0]
    close_pools()


ON_GPU = """
import torch
from mecha_exp import evaluator
from mecha_exp.evaluators.common.devices import chosen_device

@evaluator("test_pool_on_gpu", metric="sum")
def on_gpu(state_dict, *, device: str = "auto"):
    place = chosen_device(device)
    assert place.type == "cuda" and torch.cuda.device_count() == 1
    return {"sum": float(state_dict["w"].to(place).sum())}
"""
