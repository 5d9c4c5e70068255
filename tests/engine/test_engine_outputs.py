"""Where merged tensors go: several places at once, in several dtypes."""

import os
import threading

import pytest
import torch
from safetensors.torch import load_file
from state_dicts import contents

import mecha_exp as mx
from mecha_exp import CheckpointError, EngineOptions, Job, merge_many
from mecha_exp.graph.nodes import models_of


def test_one_pass_writes_several_destinations_in_several_dtypes(models, tmp_path):
    paths = models(3)
    recipe = mx.n_average(*paths)
    received = {}
    jobs = [
        Job(recipe, tmp_path / "half.safetensors", torch.float16),
        Job(recipe, tmp_path / "same.safetensors"),
        Job(recipe, wide := {}, torch.float64),
        Job(recipe, received.__setitem__, torch.bfloat16),
        Job(recipe, None, statistics=True),
    ]

    report = merge_many(jobs)

    alone = merge_many([jobs[1]])
    assert report.bytes_read == alone.bytes_read
    for got, dtype in [
        (load_file(tmp_path / "half.safetensors"), torch.float16),
        (load_file(tmp_path / "same.safetensors"), None),
        (wide, torch.float64),
        (received, torch.bfloat16),
    ]:
        merge_many([Job(recipe, expected := {}, dtype)])
        assert contents(dict(sorted(got.items()))) == contents(dict(sorted(expected.items())))
    assert set(report.moments[4]) == set(models_of(recipe))


def test_a_function_gets_each_tensor_once_whole_and_alone(models):
    recipe = mx.add_difference_ties(*models(3), k=0.3)
    merge_many([Job(recipe, expected := {})])
    seen, inside = [], threading.Lock()

    def receive(key, tensor):
        assert inside.acquire(blocking=False), "two threads at once"
        seen.append(key)
        assert torch.equal(tensor, expected[key])
        inside.release()

    merge_many([Job(recipe, receive)], EngineOptions(workers=4, tile_size=100))

    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("settings", [{}, {"shard_size": 900}], ids=["file", "folder"])
@pytest.mark.parametrize("old", [True, False])
def test_where_one_of_three_outputs_cannot_be_put_in_place_the_first_is_whole(
    models, tmp_path, settings, old
):
    name = "merged" if settings else "merged.safetensors"
    recipes = [mx.weighted_sum(*models(2), alpha=alpha) for alpha in (0.1, 0.2, 0.3)]
    jobs = [Job(r, tmp_path / place / name, **settings) for r, place in zip(recipes, "123", strict=True)]
    if old:
        merge_many([Job(recipes[0], job.output, torch.float16, **settings) for job in jobs])
    before = [all_bytes(tmp_path / place) for place in "123"]

    def spoil(*_):
        for partial in (tmp_path / "2").rglob(".*.safetensors.mecha-partial"):
            os.truncate(partial, 100)

    with pytest.raises(
        CheckpointError, match=rf"{tmp_path}/2/{name}.* was not saved: another process changed"
    ):
        merge_many(jobs, EngineOptions(workers=1), spoil)

    assert [all_bytes(tmp_path / place) for place in "23"] == before[1:]
    first = all_bytes(tmp_path / "1")
    merge_many(jobs)
    assert all_bytes(tmp_path / "1") == first


def all_bytes(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_the_function_raises_ends_the_merge(models):
    def refuse(key, tensor):
        raise ValueError("no room on the device")

    with pytest.raises(ValueError, match="no room on the device"):
        merge_many([Job(mx.n_average(*models(2)), refuse)])
