"""Every built-in method of the registry gives the same bytes however it is run."""

from itertools import product

import pytest
import simulated_gpu
import torch
from method_calls import METHODS, SHAPES, models_in, recipe_of
from method_cases import OF_ADAPTERS, OF_NETWORKS
from safetensors.torch import load_file, save_file
from state_dicts import contents
from toy_lora import BASE, LORA, LYCORIS, OF_Q, base_model
from toy_networks import ATTENTION, MLP, drawn_model
from written import digest

import mecha_exp as mx
from mecha_exp import (
    EngineOptions,
    Job,
    merge_many,
    model,
)
from mecha_exp.architectures import from_yaml, register
from mecha_exp.engine.runtime import small_keys

WORKERS, TILES = (1, 2, 4), (1 << 12, 1 << 18, 1 << 20)  # the last two hold every tensor of SHAPES whole


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return models_in(tmp_path_factory.mktemp("models"), SHAPES)


@pytest.fixture(scope="module")
def small_files(tmp_path_factory):
    return models_in(
        tmp_path_factory.mktemp("small"), SHAPES | {"blocks.0.weight": ((131, 8), torch.float32)}
    )


def run(recipe, path, fuse="never", **options):
    merge_many([Job(recipe, path, durable=False)], EngineOptions(fuse=fuse, **options))
    return digest(path)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.identifier)
def test_neither_workers_nor_tiles_nor_interrupts_nor_repeats_leave_a_trace(method, files, tmp_path):
    check_that_no_run_leaves_a_trace(recipe_of(method, files), tmp_path)


def check_that_no_run_leaves_a_trace(recipe, tmp_path):
    path = tmp_path / "out.safetensors"
    runs = [*product(WORKERS, TILES[:2]), (2, 1 << 12)]
    digests = {run(recipe, path, workers=workers, tile_size=size) for workers, size in runs}

    heard = set()

    def interrupt(key, nbytes):
        heard.add(key)
        if len(heard) == 3:
            raise KeyboardInterrupt

    job = Job(recipe, tmp_path / "resumed.safetensors")
    with pytest.raises(KeyboardInterrupt):
        merge_many([job], EngineOptions(fuse="never", workers=1), interrupt)
    report = merge_many([job], EngineOptions(fuse="never"))
    with mx.plan([job]) as planned:
        assert report.resumed_keys or planned.trips  # a trip before the pass was interrupted
    digests.add(digest(job.output))

    assert len(digests) == 1


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.identifier)
def test_compiled_loops_give_what_torch_gives(method, files, tmp_path):
    recipe, path = recipe_of(method, files), tmp_path / "out.safetensors"

    assert run(recipe, path, "always", workers=4, tile_size=1 << 12) == run(recipe, path)


SMALL_SHAPES = {
    f"blocks.{n}.{size}": ((size,), dtype)
    for n in range(5)
    for size, dtype in ((1, torch.float32), (63, torch.float16), (2100, torch.bfloat16), (640, torch.float16))
}


@pytest.fixture(scope="module")
def many_small_files(tmp_path_factory):
    """Models of many small keys; of each size one is zero, one constant, and one has few different values."""
    paths = models_in(tmp_path_factory.mktemp("many"), SMALL_SHAPES)
    for place, path in enumerate(paths):
        tensors = load_file(path)
        for key, values in tensors.items():
            if key.startswith("blocks.1."):
                values.zero_()
            elif key.startswith("blocks.2."):
                values.fill_(0.25 * place)
            elif key.startswith("blocks.3."):
                values.mul_(10).round_()
        save_file(tensors, path)
    return paths


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.identifier)
def test_small_keys_that_go_together_give_what_each_gives_alone(
    method, many_small_files, monkeypatch, tmp_path
):
    recipe, path = recipe_of(method, many_small_files), tmp_path / "out.safetensors"
    monkeypatch.setattr(small_keys, "MANY", 2)
    together = run(recipe, path, on_nonfinite="keep")
    monkeypatch.setattr(small_keys, "MANY", 10**9)

    assert run(recipe, path, on_nonfinite="keep") == together


DIFFUSERS = "identifier: toy-diffusers_lora\nadapter: {base: toy-kohya, names: {'': [transformer.]}}"

OF_OTHER_FILES = {
    "randperm": lambda save: mx.randperm(save("one", drawn_model(ATTENTION, 1)), seed=3),
    "rebasin": lambda save: mx.rebasin(save("one", drawn_model(MLP, 1)), save("other", drawn_model(MLP, 2))),
    "balance_attention": lambda save: mx.balance_attention(save("one", drawn_model(ATTENTION, 1))),
    "lora_delta": lambda save: mx.add_difference(
        save("base", base_model()), mx.lora_delta(save("lora", OF_Q), save("base", base_model())), alpha=0.5
    ),
    "extract_kohya_lora": lambda save: mx.extract_kohya_lora(toy_difference(save), rank=2),
    "extract_lycoris_lora": lambda save: mx.extract_lycoris_lora(toy_difference(save), rank=2),
    "extract_diffusers_lora": lambda save: mx.extract_diffusers_lora(toy_difference(save), rank=2),
    "extract_kohya_lokr": lambda save: mx.extract_kohya_lokr(toy_difference(save)),
    "extract_lycoris_lokr": lambda save: mx.extract_lycoris_lokr(toy_difference(save)),
}
"""Of the methods for files that a model config knows: a recipe, of what saves a model under a name."""


def toy_difference(save):
    return model(save("fine", base_model(2)), "toy-kohya") - model(save("base", base_model()), "toy-kohya")


@pytest.fixture
def toys(registries, save):
    """Saves models; the configs of toys are known."""
    register(MLP)
    register(ATTENTION)
    for text in (BASE, LORA, LYCORIS, DIFFUSERS):
        register(from_yaml(text))
    return save


def test_there_is_a_recipe_for_each_method_of_other_files():
    assert OF_OTHER_FILES.keys() == OF_NETWORKS | OF_ADAPTERS


@pytest.mark.parametrize("name", OF_OTHER_FILES)
def test_nor_do_they_with_files_that_a_config_knows(name, toys, tmp_path):
    check_that_no_run_leaves_a_trace(OF_OTHER_FILES[name](toys), tmp_path)


def test_these_nine_in_a_batch_give_what_each_gives_alone(toys, tmp_path):
    def named(name):
        return lambda part, tensors: toys(f"{name}-{part}", tensors)

    recipes = {name: make(named(name)) for name, make in OF_OTHER_FILES.items()}
    jobs = {
        name: Job(recipe, tmp_path / f"{name}.made.safetensors", durable=False)
        for name, recipe in recipes.items()
    }

    merge_many(list(jobs.values()), EngineOptions(fuse="never"))

    for name, job in jobs.items():
        assert digest(job.output) == run(job.recipe, tmp_path / "alone.safetensors"), name


def streams(recipe):
    with mx.plan([Job(recipe, {})], EngineOptions(fuse="never")) as plan:
        return not plan.whole_bytes


def test_tensors_of_several_tiles_of_any_size_give_the_same_bytes(files, tmp_path):
    shapes = {"large": ((1301, 1001), torch.float16), "long": ((1 << 20 | 77,), torch.bfloat16)}
    large = models_in(tmp_path, shapes)
    streaming = [method for method in METHODS if streams(recipe_of(method, files))]
    recipes = [recipe_of(method, large) for method in streaming]
    assert len(recipes) > 50

    digests = []
    for workers, size in zip(WORKERS, TILES, strict=True):
        jobs = [Job(recipe, tmp_path / f"{n}.safetensors", durable=False) for n, recipe in enumerate(recipes)]
        merge_many(jobs, EngineOptions(fuse="never", workers=workers, tile_size=size))
        digests.append([digest(job.output) for job in jobs])

    assert digests[1:] == digests[:1] * 2


@pytest.mark.parametrize("first", range(0, len(METHODS), 8))
def test_a_batch_of_eight_gives_what_each_gives_alone(first, files, tmp_path):
    jobs = {
        method: Job(recipe_of(method, files), tmp_path / f"{method.identifier}.safetensors", durable=False)
        for method in METHODS[first : first + 8]
    }

    merge_many(list(jobs.values()), EngineOptions(fuse="never"))

    for method, job in jobs.items():
        assert digest(job.output) == run(job.recipe, tmp_path / "alone.safetensors"), method.identifier


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.identifier)
def test_a_device_that_lags_behind_gives_what_the_cpu_gives(method, small_files, monkeypatch):
    check_on_a_device_that_lags_behind(recipe_of(method, small_files), monkeypatch)


@pytest.mark.parametrize("name", OF_OTHER_FILES)
def test_so_it_does_with_files_that_a_config_knows(name, toys, monkeypatch):
    check_on_a_device_that_lags_behind(OF_OTHER_FILES[name](toys), monkeypatch)


def check_on_a_device_that_lags_behind(recipe, monkeypatch):
    simulated_gpu.install(monkeypatch)
    merged = []
    for device in ("cpu", simulated_gpu.NAME):
        options = EngineOptions(fuse="never", tile_size=256, workers=1, on_nonfinite="keep")
        object.__setattr__(options, "device", device)
        merged.append({})
        merge_many([Job(recipe, merged[-1])], options)

    assert contents(merged[1]) == contents(merged[0])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.identifier)
def test_a_gpu_gives_the_same_bytes_each_time_and_nearly_those_of_the_cpu(method, files, monkeypatch):
    monkeypatch.setattr("mecha_exp.engine.planner.keys.key_plan.SMALL_KEY", 0)
    recipe, merged = recipe_of(method, files), []
    for device in ("cpu", "cuda", "cuda"):
        options = EngineOptions(device=device, on_nonfinite="keep")
        merged.append({})
        merge_many([Job(recipe, merged[-1])], options)

    here, there, again = merged
    assert contents(again) == contents(there)
    for key, expected in here.items():
        off = (there[key].double() - expected.double()).abs()
        limit = 4 * torch.finfo(expected.dtype).eps * max(1.0, float(expected.abs().max())) + 1e-5
        assert (off > limit).double().mean() < 1e-3, key  # a rank or a sign may fall otherwise at an entry


def operations(recipe):
    """How many operations the loops of a recipe do; None where some of it runs eagerly."""
    with mx.plan([Job(recipe, {})], EngineOptions(fuse="always")) as plan:
        if set(plan.fused) != {"fused"}:
            return None
        return sum(way.operations for way in plan.backends.values())


def test_a_batch_of_eight_in_one_loop_gives_what_torch_gives_alone(files, tmp_path):
    recipes = {method.identifier: recipe_of(method, files) for method in METHODS}
    sizes = {name: size for name, recipe in recipes.items() if (size := operations(recipe)) is not None}
    assert len(sizes) > 20
    cheapest = sorted(sizes, key=lambda name: sizes[name])[:8]  # what is compiled takes its time
    jobs = [Job(recipes[name], tmp_path / f"{name}.safetensors", durable=False) for name in cheapest]

    merge_many(jobs, EngineOptions(fuse="always"))

    for job in jobs:
        assert digest(job.output) == run(job.recipe, tmp_path / "alone.safetensors"), job.output.stem
