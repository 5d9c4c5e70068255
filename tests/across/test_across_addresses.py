"""One merge of models that lie elsewhere by many tasks: each fetches the keys of its own files."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from range_server import RangeServer
from safetensors.torch import save_file

from mecha_exp import EngineOptions, merge
from mecha_exp.checkpoint.remote import lookup
from mecha_exp.graph.nodes import call
from mecha_exp.system.cache import MODELS_VARIABLE

LAYERS, SIDE = 8, 128
MODEL = LAYERS * SIDE * SIDE * 4
SHARD = MODEL // 4 + 1
HEADERS = 50_000
"""More bytes than the processes read of headers, and have of them in the cache folder."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """A web server of two models, in whose folder the test runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MECHA_EXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(MODELS_VARIABLE, "")
    monkeypatch.delenv(MODELS_VARIABLE)
    lookup.forget_lookups()
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        save_file({f"layers.{n}": torch.randn(SIDE, SIDE) for n in range(LAYERS)}, f"{name}.safetensors")
    with RangeServer(tmp_path) as running:
        yield running
    lookup.forget_lookups()


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.libraries)])
def cluster(request, server) -> Iterator[str]:
    """Processes, or a cluster of Ray that ran before, and so knows no variable of this process."""
    if request.param == "processes":
        yield "processes"
        return
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    ray.shutdown()
    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield running.address
    ray.shutdown()
    running.shutdown()


def contents(folder: str) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


def test_tasks_fetch_their_own_keys_and_keep_them_for_the_next_merge(server, cluster, tmp_path, monkeypatch):
    options = EngineOptions(workers=1, cluster=cluster)
    addresses = [f"{server.url}/{name}.safetensors" for name in "ab"]
    sent = []
    for name, more in {"one": {}, "first": {"across": 2}, "second": {"across": 2}}.items():
        before = server.sent
        merge(call("n_average", *addresses), name, options, shard_size=SHARD, card=False, **more)
        sent.append(server.sent - before)
        monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path / "kept"))

    assert contents("first") == contents("second") == contents("one")
    assert abs(sent[1] - 2 * MODEL) <= HEADERS
    assert sent[2] <= HEADERS
