"""The engine on another device runs the same program; what needs a GPU is skipped where there is none."""

from types import SimpleNamespace

import pytest
import simulated_gpu
import torch
from state_dicts import contents, floating

import mecha_exp as mx
from mecha_exp import ConfigError, EngineOptions, Job, merge_many
from mecha_exp.checkpoint.model import Checkpoint
from mecha_exp.engine.devices import check_device, default_tile, default_workers, explained
from mecha_exp.engine.ir.order_statistic import Bracket, partition, sort_key, split
from mecha_exp.engine.residence import Residence

cuda = pytest.mark.cuda
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@mx.merge_method(register=False)
def reverse(a: mx.Parameter(torch.Tensor)) -> mx.Return(torch.Tensor):
    """A function of the whole tensor."""
    return a.flip(tuple(range(a.ndim)))


def recipes(a, b, c):
    return [
        mx.weighted_sum(a, b, alpha=0.3),
        mx.slerp(a, b, alpha=0.3),
        mx.add_difference_ties(a, b, c, k=0.3),
        mx.dare_ties(a, b, c),
        mx.n_model_stock(a, b, c),
        mx.weighted_sum(reverse(mx.slerp(a, reverse(b))), c, alpha=0.1),
    ]


def merged(paths, device):
    jobs = [Job(recipe, {}, statistics=True) for recipe in recipes(*paths)]
    merge_many(jobs, on(device))
    return [dict(sorted(job.output.items())) for job in jobs]


def on(device, **settings):
    """On any device that torch has."""
    options = EngineOptions(**{"fuse": "never", "tile_size": 4096, **settings})
    object.__setattr__(options, "device", device)
    return options


def test_the_way_of_a_device_gives_the_bytes_of_the_cpu(models):
    paths = models(3, large=((301, 1000), torch.float16))

    for plain, moved in zip(merged(paths, "cpu"), merged(paths, "cpu:0"), strict=True):
        assert contents(moved) == contents(plain)


def test_statistics_are_the_same_on_a_device_that_lags_behind(models, monkeypatch):
    simulated_gpu.install(monkeypatch)
    job = Job(mx.slerp(*models(2), alpha=0.3), {}, statistics=True)

    plain, moved = (
        merge_many([job], on(device, workers=1)).moments[0] for device in ("cpu", simulated_gpu.NAME)
    )

    assert moved.keys() == plain.keys()
    assert all(torch.equal(moved[model][key], sums[key]) for model, sums in plain.items() for key in sums)


def test_a_simulated_gpu_copies_late_and_keeps_devices_apart():
    buffer = torch.zeros(3)
    with torch.inference_mode(), simulated_gpu.own_stream(simulated_gpu.NAME):
        late = buffer.to(simulated_gpu.NAME, non_blocking=True) + 1
        buffer.fill_(4)
        early = buffer.to(simulated_gpu.NAME)
        buffer.fill_(8)

        assert late.device == torch.device(simulated_gpu.NAME)
        assert (late.cpu().tolist(), (early + 1).cpu().tolist()) == ([5, 5, 5], [5, 5, 5])
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            late + buffer


@without_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_without_a_gpu_the_way_out_is_said(device):
    with pytest.raises(ConfigError, match=f"device: {device} is wanted, but this torch .* Use engine=cpu"):
        EngineOptions(device=device)


@pytest.mark.parametrize("device", ["gpu", "mps", "", "cuda:x"])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(ConfigError, match="expected 'cpu', 'cuda' or 'cuda:N', got"):
        check_device(device)


@pytest.mark.parametrize("tile", [1 << 17, 1 << 20])
def test_a_device_keeps_the_inputs_that_it_reads_again(models, monkeypatch, tile):
    simulated_gpu.install(monkeypatch)
    paths = models(3, large=((301, 1000), torch.float16))
    read = []
    monkeypatch.setattr(Checkpoint, "read_bytes_into", counted(Checkpoint.read_bytes_into, read))
    recipes = {
        "of a key": mx.add_difference_ties(*paths, alpha=1.0, k=0.3),
        "of the model": mx.ties(*paths, density=0.3, trim="global"),
    }
    options = on(simulated_gpu.NAME, workers=1, tile_size=tile, compute_dtype="float32")
    for recipe in recipes.values():
        read.clear()
        merge_many([Job(recipe, {})], options)
        large = [nbytes for key, nbytes in read if key == "large"]

        once = 3 * 301 * 1000 * 2
        assert once <= sum(large) < 2 * once  # samples too, where a key is more than a tile
        if tile > 301 * 1000:
            assert sum(large) == once


def counted(read, seen):
    """Reads, and notes the key and the bytes."""

    def read_bytes_into(self, key, start, view):
        seen.append((key, len(view)))
        read(self, key, start, view)

    return read_bytes_into


def test_a_gpu_has_four_to_eight_workers(monkeypatch):
    for cores, workers in ((2, 4), (6, 6), (64, 8)):
        monkeypatch.setattr("mecha_exp.engine.devices.available_cores", lambda cores=cores: cores)
        assert (default_workers("cuda:1"), default_workers("cpu")) == (workers, cores)


def test_the_tiles_of_a_gpu_go_by_its_memory_and_not_by_what_is_free(monkeypatch):
    for gigabytes, tile in ((4, 1 << 20), (8, 1 << 21), (24, 1 << 23), (80, 1 << 24)):
        gpu = SimpleNamespace(total_memory=gigabytes * 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
        assert default_tile("cuda") == tile
    assert EngineOptions().tile_elements == default_tile("cpu") == 1 << 19
    assert EngineOptions(tile_size=4096).tile_elements == 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_are_counted_on_a_device_as_they_are_here(dtype):
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    values[:50], values[50:200], values[200:300] = torch.nan, 0, 1.5
    keys = sort_key(values)
    zero, some = int(keys[50]), int(keys[250])
    brackets = [(zero, zero), (some, some), (zero, some), (0, 1), (5, 7), (int(keys.min()), some)]

    for bracket in (Bracket.everything(dtype), *(Bracket(*ends) for ends in brackets)):
        *counts, inside = split(keys, bracket)
        *expected, numbers = partition(keys.numpy(), bracket)
        assert (counts, inside.tolist()) == (expected, numbers.tolist())


def test_what_does_not_fit_is_not_kept():
    residence = Residence("cpu")
    residence._room = 100
    first, second = torch.zeros(20), torch.zeros(20)
    residence.keep("key", ("a",), first)
    residence.keep("key", ("b",), second)
    assert list(residence.of("key")) == [("a",)]

    residence.drop("key")
    residence.keep("other", ("b",), second)
    assert (residence.of("key"), list(residence.of("other"))) == ({}, [("b",)])


def test_too_little_memory_on_a_gpu_says_what_helps():
    error = explained(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee ..."), "cuda")
    assert str(error).startswith(
        "cuda has too little memory: CUDA out of memory. Tried to allocate 2 GiB. Use "
    )
    other = ValueError("other")
    assert explained(other, "cuda") is other


@cuda
@with_gpu
def test_a_gpu_gives_nearly_what_the_cpu_gives(models):
    paths = models(3, large=((301, 1000), torch.float16))

    for there, here in zip(merged(paths, "cuda"), merged(paths, "cpu"), strict=True):
        for key in floating(here):
            torch.testing.assert_close(there[key], here[key])


@cuda
@with_gpu
def test_a_gpu_gives_the_same_bytes_every_time(models):
    paths = models(3)

    assert list(map(contents, merged(paths, "cuda"))) == list(map(contents, merged(paths, "cuda")))
