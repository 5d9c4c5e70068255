"""The nodes inside a real ComfyUI, on the processor, over its own interface.

It is not in the package index. `COMFYUI=FOLDER COMFYUI_PYTHON=PYTHON` name a checkout and the Python that
has its requirements; without them these tests are skipped. The checkout is only read: models, nodes and
outputs lie elsewhere.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mecha_exp as m
from mecha_exp.comfyui import NODE_CLASS_MAPPINGS

CHECKOUT = os.environ.get("COMFYUI", "")
PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)
SECONDS = 180

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not CHECKOUT, reason="COMFYUI names no checkout of ComfyUI"),
]

NETWORK = """
import sys
sys.path.insert(0, sys.argv[1])
import comfy.cli_args
comfy.cli_args.args.cpu = True
import comfy.ops
from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT
from safetensors.torch import save_file

context = {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128}}
sizes = {"in_channels": 16, "depth": 2, "adm_in_channels": 2048, "num_patches": 16, "pos_embed_max_size": 4}
network = MMDiT(
    input_size=None, **sizes, context_embedder_config=context,
    operations=comfy.ops.disable_weight_init,
)
save_file({f"model.diffusion_model.{key}": value for key, value in network.state_dict().items()}, sys.argv[2])
"""
"""A transformer of Stable Diffusion 3 with two layers, of ComfyUI's own class, which ComfyUI recognises."""


class ComfyUI:
    """A running ComfyUI with two small checkpoints."""

    def __init__(self, base: Path) -> None:
        self.base = base
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout=60) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as refusal:
            return json.loads(refusal.read())

    def run(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """The history of a workflow once it ended."""
        queued = self.ask("/prompt", {"prompt": prompt})
        assert "prompt_id" in queued, queued
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            if history := self.ask(f"/history/{queued['prompt_id']}"):
                return history[queued["prompt_id"]]
            time.sleep(0.1)
        raise TimeoutError("the workflow did not end")


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    server = ComfyUI(tmp_path_factory.mktemp("comfyui"))
    checkpoints = server.base / "models" / "checkpoints"
    checkpoints.mkdir(parents=True)
    made = checkpoints / "a.safetensors"
    subprocess.run([PYTHON, "-c", NETWORK, CHECKOUT, made], check=True, capture_output=True)
    generator = torch.Generator().manual_seed(0)
    shapes = {key: tensor.shape for key, tensor in load_file(made).items()}
    for name in "ab":
        tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        save_file(tensors, checkpoints / f"{name}.safetensors")
    nodes = server.base / "custom_nodes"
    nodes.mkdir()
    subprocess.run([PYTHON, "-m", "mecha_exp", "comfyui", "install", nodes], check=True, capture_output=True)
    words = ["main.py", "--cpu", "--port", str(server.port), "--base-directory", str(server.base)]
    words += ["--disable-auto-launch", "--disable-api-nodes", "--database-url", "sqlite:///:memory:"]
    with (server.base / "log").open("w") as log:
        process = subprocess.Popen([PYTHON, *words], cwd=CHECKOUT, stdout=log, stderr=log)
        try:
            _wait(server, process)
            yield server
        finally:
            process.terminate()
            process.wait(30)


def _wait(server: ComfyUI, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            server.ask("/system_stats")
        except OSError:
            time.sleep(0.3)
        else:
            return
    raise RuntimeError((server.base / "log").read_text())


def workflow(alpha: float, **outputs: Any) -> dict[str, Any]:
    """a and b, their weighted sum, and what is made of it."""
    model = {"merge_space": "weight"}
    nodes = {
        n: {"class_type": "mecha_exp:model", "inputs": {"file": f"checkpoints/{n}.safetensors", **model}}
        for n in "ab"
    }
    summed = {"a": ["a", 0], "b": ["b", 0], "alpha": alpha}
    return {**nodes, "sum": {"class_type": "mecha_exp.weighted_sum", "inputs": summed}, **outputs}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def expected(server: ComfyUI, alpha: float) -> dict[str, torch.Tensor]:
    a, b = (str(server.base / "models" / "checkpoints" / f"{n}.safetensors") for n in "ab")
    return m.merge(m.weighted_sum(a, b, alpha=alpha))


def test_every_node_is_known_with_its_widgets(comfyui: ComfyUI):
    known = comfyui.ask("/object_info")

    assert {*NODE_CLASS_MAPPINGS} <= {*known}
    kind, widget = known["mecha_exp.ties_sum"]["input"]["required"]["k"]
    assert kind == "FLOAT" and (widget["min"], widget["max"], widget["display"]) == (0, 1, "slider")
    files, _ = known["mecha_exp:model"]["input"]["required"]["file"]
    assert files == ["checkpoints/a.safetensors", "checkpoints/b.safetensors"]


def test_a_merge_to_a_file_is_that_of_the_library_and_is_not_made_twice(comfyui: ComfyUI):
    written = node("mecha_exp:merge_to_file", recipe=["sum", 0], name="merged", dtype="as the inputs")
    saved = node("mecha_exp:save_recipe", recipe=["sum", 0], name="kept")
    prompt = workflow(0.3, file=written, recipe=saved)

    first, again = comfyui.run(prompt), comfyui.run(prompt)

    assert first["status"]["status_str"] == "success", first["status"]
    path = comfyui.base / "models" / "checkpoints" / "merged.safetensors"
    assert first["outputs"]["file"]["text"] == [str(path)]
    merged, wanted = load_file(path), expected(comfyui, 0.3)
    assert merged.keys() == wanted.keys()
    assert all(torch.equal(merged[key], tensor) for key, tensor in wanted.items())
    assert (comfyui.base / "output" / "kept.mecha").is_file()
    (cached,) = (data for name, data in again["status"]["messages"] if name == "execution_cached")
    assert {"a", "b", "sum", "file"} <= {*cached["nodes"]}


def test_a_merge_in_memory_is_a_model_of_comfyui_and_equals_its_own_merge(comfyui: ComfyUI):
    loaders = {f"load {n}": node("CheckpointLoaderSimple", ckpt_name=f"{n}.safetensors") for n in "ab"}
    prompt = workflow(
        0.25,
        merged=node("mecha_exp:merge", recipe=["sum", 0], dtype="as the inputs"),
        ours=node("ModelSave", model=["merged", 0], filename_prefix="ours"),
        **loaders,
        peer=node("ModelMergeSimple", model1=["load a", 0], model2=["load b", 0], ratio=0.75),
        theirs=node("ModelSave", model=["peer", 0], filename_prefix="theirs"),
    )

    ended = comfyui.run(prompt)

    assert ended["status"]["status_str"] == "success", ended["status"]
    ours, theirs = (load_file(next((comfyui.base / "output").glob(f"{n}*"))) for n in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and len(ours) > 20
    places = (
        "model.diffusion_model.pos_embed"  # a buffer, which ComfyUI's own merge takes from the first model
    )
    wanted = expected(comfyui, 0.25)
    torch.testing.assert_close(ours.pop(places).float(), wanted[places], rtol=1e-3, atol=2e-3)
    for key, tensor in theirs.items():
        if key == places:
            continue
        torch.testing.assert_close(ours[key], tensor, rtol=1e-3, atol=2e-3)  # ComfyUI saves in half precision


def test_what_is_out_of_range_or_gone_is_told(comfyui: ComfyUI):
    written = node("mecha_exp:merge_to_file", recipe=["sum", 0], name="../outside", dtype="as the inputs")

    refused = comfyui.ask("/prompt", {"prompt": workflow(150.0, file=written)})
    failed = comfyui.run(workflow(0.5, file=written))

    assert "Value 150.0 bigger than max of 100.0" in json.dumps(refused["node_errors"])
    assert failed["status"]["status_str"] == "error"
    assert "name: expected a name below" in json.dumps(failed["status"]["messages"])
