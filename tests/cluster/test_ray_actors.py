"""Ray with logical GPUs: what fits where, parts of GPUs, and actors that map what they receive."""

import os
from pathlib import Path

import numpy as np
import pytest
from cluster_tasks import double, mapping_of, use_gpu

from mecha_exp.cluster import LostWorker, RayWorkers
from mecha_exp.cluster.actors import Actor
from mecha_exp.cluster.ray import places_on
from mecha_exp.errors import ClusterError

CPU_NODE, GPU_NODE = {"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("nodes", "together", "places"),
    [
        ([{"CPU": 4.0}, {"CPU": 3.0}], [{"CPU": 2}], 3),
        ([{"CPU": 2.0}, {"CPU": 2.0}], [{"CPU": 3}], 0),  # the cores are there, on no machine together
        ([GPU_NODE], [{"CPU": 1, "GPU": 0.5}], 2),
        ([{"CPU": 64.0, "GPU": 1.0}], [{"CPU": 1, "GPU": 0.1}], 10),
        ([{"CPU": 64.0, "GPU": 2.0}], [{"CPU": 1, "GPU": 0.4}], 4),  # two on each GPU, and none across both
        ([{"CPU": 64.0, "GPU": 2.0}], [{"CPU": 1, "GPU": 1 / 3}], 6),
        ([{"CPU": 64.0, "GPU": 5.0}], [{"CPU": 1, "GPU": 2}], 2),
        ([GPU_NODE, CPU_NODE], [*[{"CPU": 1, "GPU": 0.5}] * 2, {"CPU": 1, "GPU": 0}], 1),
        ([CPU_NODE], [{"CPU": 1, "GPU": 0.5}], 0),
        ([], [{"CPU": 1}], 0),
    ],
)
def test_what_runs_together_is_counted_machine_by_machine(nodes, together, places):
    assert places_on(nodes, together) == places


@pytest.fixture(scope="module")
def two_gpus():
    """Ray with two GPUs that are not there."""
    ray = pytest.importorskip("ray")
    ray.shutdown()  # what other tests have left
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), before.get("PYTHONPATH", "")])
    ray.init("local", num_cpus=6, num_gpus=2, include_dashboard=False, logging_level="error")
    yield ray
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.libraries
def test_two_tasks_share_a_gpu_at_a_half_and_no_more_run_at_once(two_gpus, tmp_path):
    with RayWorkers(gpus=0.5) as workers:
        used = [result for _, result in workers.run(use_gpu, [(n, str(tmp_path), 4) for n in range(8)])]

    assert workers.count == 4
    begun, ended = [(began, gpu, 1) for gpu, began, _ in used], [(end, gpu, -1) for gpu, _, end in used]
    at_once, most = {"0": 0, "1": 0}, {"0": 0, "1": 0}
    for _, gpu, change in sorted(begun + ended):
        at_once[gpu] += change
        most[gpu] = max(most[gpu], at_once[gpu])
    assert most == {"0": 2, "1": 2}


@pytest.mark.libraries
def test_more_than_a_cluster_has_is_an_error(two_gpus):
    for more, message in (
        ({"gpus": 3}, "a task with 1 CPU, 3 GPU. There: 1 machine with 6 CPU, 2 GPU. Ask for less."),
        (
            {"gpus": 0.5, "actors": 5},
            "a task with 1 CPU, 0 GPU and 5 actors, each with 1 CPU, 0.5 GPU. There: 1 machine with 6 CPU",
        ),
        ({"cores": 7}, "a task with 7 CPU, 0 GPU. There: 1 machine with 6 CPU, 2 GPU."),
    ):
        with pytest.raises(ClusterError) as error:
            RayWorkers(1, **more)
        assert f"Ray on this machine has no place for {message}" in str(error.value)

    assert RayWorkers(9, gpus=0.5, actors=2).count == 2  # each with its actors


@pytest.mark.libraries
def test_actors_share_gpus_and_map_what_they_receive(two_gpus):
    actors = [Actor(1, 0.5) for _ in range(4)]
    array = np.arange(1 << 20, dtype=np.uint8)

    gpus = [actor.call(mapping_of, (), {"x": array}) for actor in actors]

    assert sorted(gpu for gpu, _, _ in gpus) == ["0", "0", "1", "1"]
    assert {sum_ for _, sum_, _ in gpus} == {int(array.sum(dtype=np.int64))}
    assert all("plasma" in path for _, _, path in gpus)  # Ray's object store, not a copy of the process
    for actor in actors:
        actor.close()


@pytest.mark.libraries
def test_an_actor_that_dies_or_takes_too_long_is_replaced_by_the_next_call(two_gpus):
    actor = Actor()
    with pytest.raises(ValueError, match="too large"):
        actor.call(double, (1000, 0.0), {})
    assert not actor.is_ready
    assert actor.call(double, (4, 0.0), {}) == 8
    assert actor.is_ready
    with pytest.raises(ValueError, match="too large"):
        actor.call(double, (1000, 0.0), {})
    with pytest.raises(TimeoutError):
        actor.call(double, (4, 60.0), {}, seconds=0.2)
    assert not actor.is_ready
    assert actor.call(double, (4, 0.0), {}) == 8
    with pytest.raises(LostWorker, match="an actor of Ray was lost: The actor died"):
        actor.call(double, (-1, 0.0), {})
    assert actor.call(double, (5, 0.0), {}) == 10
    actor.close()
