"""Agreement with the inputs and divergence from them, on batches of one's own."""

import json
import math
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from scipy.stats import entropy

from mecha_exp import Context, EvaluationError, Job, merge_many, weighted_sum
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import read_scoring
from mecha_exp.evaluators.common.logits import compare

MODULES = """
import torch

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x, shift=None):
        logits = self.layer(x) * self.scale
        return {"logits": logits if shift is None else logits + shift, "sum": logits.sum()}

def make():
    return Tiny()

def wide():
    return torch.nn.Linear(5, 4)

def sequence():
    return torch.nn.Sequential(torch.nn.Linear(3, 4))

def broken():
    raise KeyError("size")

def number():
    return 3

class Pair(Tiny):
    def forward(self, x):
        logits = super().forward(x)["logits"]
        return x, logits
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two inputs of a small module, its factory, and a batch."""
    (tmp_path / "net.py").write_text(MODULES)
    for seed, name in enumerate("ab"):
        draw = torch.Generator().manual_seed(seed)
        tensors = {"layer.weight": torch.randn(4, 3, generator=draw), "layer.bias": torch.zeros(4)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    torch.save({"x": torch.randn(10, 5, 3, generator=torch.Generator().manual_seed(7))}, tmp_path / "x.pt")
    return tmp_path


def context_of(folder: Path) -> Context:
    return Context(inputs={name: folder / f"{name}.safetensors" for name in "ab"})


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """A merge of the two inputs."""
    from safetensors.torch import load_file

    a, b = (load_file(folder / f"{name}.safetensors") for name in "ab")
    return {key: a[key] * 0.7 + b[key] * 0.3 for key in a}


def measured(folder: Path, weights=None, context: Context | None = None, **settings):
    weights = weights_of(folder) if weights is None else weights
    context = context or context_of(folder)
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    asked = {
        "name": "forward", "data": str(folder / "x.pt"), "module": f"{folder / 'net.py'}:make",
        "device": "cpu", **settings,
    }  # fmt: skip
    scoring = read_scoring(asked, shapes, context=context)
    return scoring.measure_one(scoring.evaluations[0], weights, context)


@given(rows=st.integers(1, 4), places=st.integers(1, 3), classes=st.integers(2, 5), seed=st.integers(0, 99))
def test_numbers_are_those_of_scipy(rows: int, places: int, classes: int, seed: int):
    draw = torch.Generator().manual_seed(seed)
    theirs, ours = (3 * torch.randn(rows, places, classes, generator=draw) for _ in range(2))
    theirs[0, 0, 0] = -math.inf
    counts = torch.rand(rows, places, generator=draw) < 0.7
    counts[:, 0] = True

    shares, nats = compare(theirs, ours, counts)

    p, q = (logits.double().softmax(-1).numpy() for logits in (theirs, ours))
    for row in range(rows):
        shown = counts[row].numpy()
        assert float(nats[row]) == pytest.approx(entropy(p[row], q[row], axis=-1)[shown].mean())
        assert float(shares[row]) == (p[row].argmax(-1) == q[row].argmax(-1))[shown].mean()


def test_a_module_of_a_factory_is_compared_with_each_input(folder: Path):
    result = measured(folder, batch_size=4)

    x = torch.load(folder / "x.pt")["x"]
    from safetensors.torch import load_file

    def logits(weights):
        return 2 * (x @ weights["layer.weight"].T + weights["layer.bias"])

    ours = logits(weights_of(folder))
    for name in "ab":
        theirs = logits(load_file(folder / f"{name}.safetensors"))
        share = (theirs.argmax(-1) == ours.argmax(-1)).double()
        nats = entropy(theirs.double().softmax(-1), ours.double().softmax(-1), axis=-1)
        np.testing.assert_allclose(result.outcomes.values[name], share.mean(1))
        assert result.metrics[f"agreement/{name}"] == pytest.approx(float(share.mean()))
        assert result.metrics[f"kl/{name}"] == pytest.approx(nats.mean(), rel=1e-5)
    assert 0 < result.metrics["agreement"] < 1
    assert result.metrics["agreement"] == pytest.approx(
        (result.metrics["agreement/a"] + result.metrics["agreement/b"]) / 2
    )
    assert result.metrics["kl"] == pytest.approx((result.metrics["kl/a"] + result.metrics["kl/b"]) / 2)


def test_some_rows_are_compared_as_among_all(folder: Path):
    weights, places = weights_of(folder), [0, 3, 4, 9]
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    asked = {"name": "forward", "data": str(folder / "x.pt"), "module": f"{folder / 'net.py'}:make"}
    scoring = read_scoring({**asked, "device": "cpu", "batch_size": 3}, shapes, context=context_of(folder))
    (whole,) = scoring.evaluations

    everything = whole.score(weights, context_of(folder))
    some = whole.among(dict.fromkeys("ab", places)).score(weights, context_of(folder))

    pairs = ((everything.outcomes, some.outcomes), (everything.further["kl"], some.further["kl"]))
    for name in "ab":
        for of_all, of_some in pairs:
            np.testing.assert_allclose(of_some.values[name], of_all.values[name][places], rtol=1e-6)
            assert of_some.examples[name].tolist() == ["0", "3", "4", "9"]
            assert of_some.clusters[name].tolist() == ["row 0", "row 3", "row 4", "row 9"]
        assert everything.metrics[f"kl/{name}"] == everything.further["kl"].values[name].mean()


def test_an_input_agrees_with_itself(folder: Path):
    from safetensors.torch import load_file

    context = Context(inputs={name: folder / f"{name}.safetensors" for name in "ba"})

    result = measured(folder, load_file(folder / "b.safetensors"), context)

    assert result.metrics["agreement/b"] == 1.0
    assert result.metrics["kl/b"] == 0.0
    assert result.metrics["kl/a"] > 0


def test_inputs_are_computed_once_until_they_change(folder: Path, monkeypatch):
    import mecha_exp.evaluators.forward as module

    loaded = []
    load = module.load_state_dict
    monkeypatch.setattr(module, "load_state_dict", lambda path: loaded.append(path.name) or load(path))
    first = measured(folder)
    assert measured(folder).outcomes.equals(first.outcomes)
    assert loaded == ["a.safetensors", "b.safetensors"]

    save_file({"layer.weight": torch.ones(4, 3), "layer.bias": torch.zeros(4)}, folder / "b.safetensors")
    measured(folder)
    assert loaded[2:] == ["b.safetensors"]


def test_a_factory_that_changes_is_run_again(folder: Path):
    file = folder / "net.py"
    before = measured(folder)
    file.write_text(MODULES.replace("full((4,), 2.0)", "full((4,), 40.0)"))

    assert measured(folder).metrics["kl/a"] > 2 * before.metrics["kl/a"]


@pytest.mark.parametrize("kind", ["npz", "safetensors", "tensor"])
def test_batches_of_each_type_are_the_same(folder: Path, kind: str):
    x = torch.load(folder / "x.pt")["x"]
    path = folder / f"batch.{'pt' if kind == 'tensor' else kind}"
    if kind == "npz":
        np.savez(path, x=x.double().numpy())  # cast to the dtype of the network
    elif kind == "safetensors":
        save_file({"x": x}, path)
    else:
        torch.save(x, path)

    assert measured(folder, data=str(path)).outcomes.equals(measured(folder).outcomes)


def test_references_choose_inputs_and_other_arguments_are_passed(folder: Path):
    x = torch.load(folder / "x.pt")["x"]
    shift = torch.zeros(10, 5, 4)
    shift[..., 0] = 1000.0  # every answer is the first class
    torch.save({"x": x, "shift": shift}, folder / "shifted.pt")

    result = measured(folder, data=str(folder / "shifted.pt"), references=["b"])

    assert list(result.outcomes.values) == ["b"]
    assert result.metrics["agreement/b"] == 1.0


def test_an_output_is_named_by_its_place(folder: Path):
    pair = {"module": f"{folder / 'net.py'}:Pair", "output": 1}

    assert measured(folder, **pair).outcomes.equals(measured(folder).outcomes)


def test_logits_that_are_nan_are_an_error_of_that_point_alone(folder: Path):
    weights = weights_of(folder)
    weights["layer.bias"] = torch.tensor([0.0, math.nan, 0.0, 0.0])

    with pytest.raises(EvaluationError, match="the logits are NaN or infinite"):
        measured(folder, weights)

    assert measured(folder).metrics["kl"] > 0


def batch(folder: Path, content: object, name: str = "bad.pt") -> dict[str, str]:
    torch.save(content, folder / name)
    return {"data": str(folder / name)}


def text(folder: Path, name: str) -> dict[str, str]:
    (folder / name).write_text("words")
    return {"data": str(folder / name)}


def wrong_file(folder: Path) -> str:
    (folder / "wrong.py").write_text("make = torch.nn.Linear")
    return f"{folder / 'wrong.py'}:make"


def factory(name: str):
    return lambda folder: {"module": f"{folder / 'net.py'}:{name}"}


BAD = [
    (lambda f: batch(f, {"y": torch.ones(2, 3)}), "the forward of Tiny takes no 'y', which is in"),
    (lambda f: batch(f, {"x": torch.ones(2, 3), "shif": torch.ones(2, 4)}), "'shif', which is in"),
    (lambda f: batch(f, {"x": torch.ones(2, 3), "shif": torch.ones(2, 4)}), "Did you mean 'shift'?"),
    (lambda f: batch(f, {"shift": torch.ones(2, 4)}), "the forward of Tiny needs 'x', which is not in"),
    (lambda f: batch(f, {"x": torch.ones(2, 7)}), "Tiny cannot compute"),
    (lambda f: batch(f, {"x": torch.ones(2, 7)}), "(x [2, 7] float32): RuntimeError: mat1 and mat2 shapes"),
    (lambda f: batch(f, {"x": torch.ones(2, 3), "shift": torch.ones(3, 4)}), "numbers of rows: x 2, shift 3"),
    (lambda f: batch(f, {"x": torch.tensor(1.0)}), "has shape []: its first axis must be the examples"),
    (lambda f: batch(f, {"x": [1, 2]}), "'x' in"),
    (lambda f: batch(f, {}), "bad.pt holds no tensor"),
    (lambda f: batch(f, 3), "bad.pt holds a int: expected a tensor, or a dict of tensors by name"),
    (lambda f: batch(f, {"x": Path("a")}), "cannot be read as tensors alone: it would run code"),
    (lambda f: text(f, "x.csv"), "x.csv: expected a .pt, .npz or .safetensors file"),
    (lambda f: text(f, "x.npz"), "x.npz cannot be read as tensors alone"),
    (lambda f: {"data": "gone.pt"}, "evaluator.data: gone.pt does not exist"),
    (lambda f: {"module": "lost.py:make"}, "expected FILE.py:function, and there is no file 'lost.py'"),
    (factory("maek"), "has no function 'maek'. Did you mean 'make'?"),
    (lambda f: {"module": f"{f / 'x.pt'}:make"}, "x.pt is not a Python file"),
    (lambda f: {"module": wrong_file(f)}, "wrong.py cannot be imported: NameError: name 'torch'"),
    (factory("broken"), "net.py:broken cannot make a module: KeyError: 'size'"),
    (factory("number"), "net.py:number returns a int: expected a torch.nn.Module"),
    (factory("wide"), "net.py:wide: it lacks weight, bias; layer."),
    (lambda f: {"output": "sum"}, "Tiny gives logits of shape [] for 8 rows: expected [rows, ..., classes]"),
    (lambda f: {"output": "scores"}, "Tiny gives no tensor 'scores', only logits, sum"),
    (lambda f: {"references": ["c"]}, "evaluator.references: there is no input 'c'"),
    (lambda f: {"references": "a"}, "evaluator.references=a: expected a list of inputs, as in [a]"),
    (lambda f: {"context": Context()}, "evaluator=forward compares with inputs, and there is none"),
    (lambda f: {"batch_size": 0}, "evaluator.batch_size: expected a number above 0, got 0"),
    (lambda f: {"batched": True}, "eight transformers took 1.5 to 2 times as long as one by one. Use"),
    (lambda f: {"dtype": "float31"}, "evaluator.dtype=float31: unknown dtype"),
    (lambda f: {"device": "gpu"}, "evaluator.device=gpu: unknown device"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "message"), BAD)
def test_what_does_not_fit_is_an_error_with_its_cure(folder: Path, more, message: str):
    with pytest.raises(ConfigError) as error:
        measured(folder, **more(folder))

    assert message in str(error.value)


@pytest.mark.parametrize(("dtype", "bytes_needed"), [("auto", 64), ("float16", 32)])
def test_a_gpu_that_is_too_small_is_an_error_with_both_sizes(folder: Path, dtype, bytes_needed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (31, 80_000_000_000))

    with pytest.raises(ConfigError) as error:
        measured(folder, device="cuda:0", dtype=dtype)

    assert f"evaluator.device=cuda:0: the weights need {bytes_needed} bytes, and 31 are free" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 2}, "evaluator.device=cuda:0: the weights of 2 workers need 128 bytes, and 100 are"),
        ({"devices": ["cuda", "cuda:1"]}, "evaluator.devices=cuda:1: the weights need 64 bytes, and 63 are"),
        ({"devices": ["cuda", "cuda:0"]}, "cuda:0: the weights of 2 workers need 128 bytes, and 100 are"),
        ({"workers": 1}, None),
        ({"devices": ["cuda:0", "cpu"]}, None),
    ],
)  # fmt: skip
def test_each_gpu_must_have_room_for_all_of_its_workers(folder: Path, settings, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((100, 63)[device.index or 0], 80_000))
    shapes = {key: tuple(tensor.shape) for key, tensor in weights_of(folder).items()}
    asked = {"name": "forward", "data": str(folder / "x.pt"), "module": f"{folder / 'net.py'}:make"}

    def read():
        place = {} if "devices" in settings else {"device": "cuda:0"}
        return read_scoring({**asked, **place, **settings}, shapes, context=context_of(folder))

    if message is None:
        assert read().workers == len(settings.get("devices", [0]))
        return
    with pytest.raises(ConfigError) as error:
        read()
    assert message in str(error.value)
    assert "fewer workers" in str(error.value) or "workers" not in settings


def test_an_input_of_another_shape_is_named_before_a_merge(folder: Path):
    save_file({"layer.weight": torch.ones(4, 9), "layer.bias": torch.zeros(4)}, folder / "b.safetensors")
    shapes = {"layer.weight": (4, 3), "layer.bias": (4,)}
    asked = {
        "name": "forward", "data": str(folder / "x.pt"), "module": f"{folder / 'net.py'}:make",
    }  # fmt: skip

    with pytest.raises(ConfigError) as error:
        read_scoring(asked, shapes, context=context_of(folder))

    assert "the input 'b' cannot be compared with: the model does not fit" in str(error.value)
    assert "layer.weight has shape [4, 9] instead of [4, 3]" in str(error.value)


def test_a_start_that_goes_on_may_name_the_inputs_in_another_order(folder: Path):
    whole = measured(folder, batch_size=4)

    def interrupt(work: str, done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    contexts = [
        Context(inputs={n: folder / f"{n}.safetensors" for n in names}, kept=folder / "evaluation.partial")
        for names in ("ab", "ba")
    ]
    with pytest.raises(KeyboardInterrupt):
        measured(folder, context=replace(contexts[0], report=interrupt), batch_size=4)
    gone_on = measured(folder, context=contexts[1], batch_size=4)

    assert gone_on.metrics == pytest.approx(whole.metrics)
    for name in "ab":
        np.testing.assert_array_equal(gone_on.outcomes.values[name], whole.outcomes.values[name])


def test_inputs_count_by_content_in_any_order(folder: Path):
    shapes = {key: tuple(tensor.shape) for key, tensor in weights_of(folder).items()}

    def key(names: str) -> str:
        context = Context(inputs={name: folder / f"{name}.safetensors" for name in names})
        asked = {"name": "forward", "data": str(folder / "x.pt"), "module": f"{folder / 'net.py'}:make"}
        return read_scoring(asked, shapes, context=context).evaluations[0].key

    first = key("ab")
    assert key("ba") == first
    (folder / "net.py").write_text(MODULES + "\n# a comment\n")
    assert key("ab") == first
    (folder / "net.py").write_text(MODULES.replace("return Tiny()", "return Tiny().eval()"))
    second = key("ab")
    save_file({"layer.weight": torch.ones(4, 3), "layer.bias": torch.ones(4)}, folder / "b.safetensors")
    assert len({first, second, key("ab")}) == 3


def test_what_the_file_of_a_module_imports_counts(folder: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    shapes = {key: tuple(tensor.shape) for key, tensor in weights_of(folder).items()}
    keys = []
    for number, width in enumerate(("4", "4", "2 + 2")):
        (folder / "sizes_of_net.py").write_text(f"# version {number}\ndef width():\n    return {width}\n")
        own = MODULES.replace("Linear(3, 4)", "Linear(3, width())")
        (folder / "net.py").write_text(f"from sizes_of_net import width\n{own}")
        os.utime(folder / "net.py", (number + 1, number + 1))
        sys.modules.pop("sizes_of_net", None)
        asked = {"name": "forward", "data": str(folder / "x.pt"), "module": f"{folder / 'net.py'}:make"}
        keys.append(read_scoring(asked, shapes, context=context_of(folder)).evaluations[0].key)

    assert keys[0] == keys[1] != keys[2]


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
def test_a_saved_merge_of_language_models_agrees_as_transformers_says(llamas, tmp_path: Path, beside):
    import transformers
    from safetensors.torch import load_file

    merge_many([Job(weighted_sum(*llamas, alpha=0.2), tmp_path / "merged")])
    ids = torch.randint(3, 24, (6, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    mask[5, 1:] = 0
    torch.save({"input_ids": ids, "attention_mask": mask}, tmp_path / "ids.pt")
    context = Context(inputs=dict(zip("ab", llamas, strict=True)))
    weights = load_file(tmp_path / "merged/model.safetensors")
    settings = {"module": None, "data": str(tmp_path / "ids.pt"), "batch_size": 4}

    result = measured(tmp_path, weights, context, **settings)

    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        ours, *theirs = (
            load(path)(input_ids=ids, attention_mask=mask).logits.double()
            for path in (tmp_path / "merged", *llamas)
        )
    for name, logits in zip("ab", theirs, strict=True):
        nats = entropy(logits.softmax(-1), ours.softmax(-1), axis=-1)
        by_row = [nats[row][mask[row] == 1].mean() for row in range(6)]
        same = (logits.argmax(-1) == ours.argmax(-1)).numpy()
        shares = [same[row][mask[row] == 1].mean() for row in range(6)]
        np.testing.assert_allclose(result.outcomes.values[name], shares)
        beside("forward", f"kl/{name}", result.metrics[f"kl/{name}"], np.mean(by_row), within=1e-4)
        agreement = result.outcomes.values[name].mean()
        beside("forward", f"agreement/{name}", agreement, np.mean(shares))

    for content, message in (
        ({"input_id": ids}, "the forward of LlamaForCausalLM takes no 'input_id', which is in"),
        ({"input_ids": ids + 90}, "LlamaForCausalLM cannot compute"),
        ({"input_ids": ids, "attention_mask": 0 * mask}, "'attention_mask' hides all positions of row 0"),
    ):
        with pytest.raises(ConfigError) as error:
            measured(tmp_path, weights, context, **{**settings, **batch(tmp_path, content)})
        assert message in str(error.value)
    for more, message in (
        ({"kind": "LlamaForCausalLN"}, "transformers has no such class. Did you mean 'LlamaForCausalLM'"),
        ({"kind": "LlamaModel"}, "lm_head.weight has no place in the network"),
    ):
        with pytest.raises(ConfigError) as error:
            measured(tmp_path, weights, context, **{**settings, **more})
        assert message in str(error.value)


@pytest.mark.heavy
def test_the_command_of_the_page_runs(tmp_path: Path, as_a_user):
    page = (Path(__file__).parents[2] / "docs/evaluators.md").read_text()
    blocks = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (program,) = (block for block in blocks if "def make" in block)
    (command,) = re.findall(r"^```bash\npython -m mecha_exp (.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "net.py").write_text(program)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        save_file(layers.state_dict(), tmp_path / f"{name}.safetensors")
    np.savez(tmp_path / "batch.npz", input=np.random.default_rng(0).normal(size=(20, 3)))

    outcome = as_a_user(*shlex.split(command), "tracking=none", cwd=tmp_path)

    assert outcome.status == 0, outcome.err
    records = [json.loads(path.read_text()) for path in (tmp_path / "outputs/multiruns").glob("*/*/run.json")]
    (first,) = (r["metrics"] for r in records if r["parameters"]["alpha"] == 0.0)
    assert first["agreement/a"] == 1.0
    assert first["kl/a"] == 0.0 < first["kl/b"]
