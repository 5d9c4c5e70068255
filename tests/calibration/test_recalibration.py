"""Running statistics of a merge: those of its own activations, whatever the batch, or a refusal."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import update_bn

from mecha_exp import merge, weighted_sum
from mecha_exp.calibration import Subject, recalibrate
from mecha_exp.calibration.seams import recalibrate as verb
from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import ConfigError, EvaluationError

MODULE = """
import torch
from torch import nn
from mecha_exp.calibration import Subject


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.late = nn.BatchNorm1d(3)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(16, 3)

    def forward(self, images):
        return self.late(self.head(self.norm(self.conv(images)).relu().flatten(1)))


def network(state_dict):
    net = Net().eval()
    net.load_state_dict(state_dict)
    return net


def subject(state_dict, data):
    net = network(state_dict)
    images = torch.load(data, weights_only=True)
    return Subject(net, images, lambda image: net(image[None]))
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `net.py`, a merge of two models with batch norms, and images."""
    (tmp_path / "net.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        net = net_class()()
        net(torch.randn(50, 2, 4, 4))  # in training mode: it has statistics of its own
        save_file(net.state_dict(), f"{name}.safetensors")
    torch.save(torch.randn(40, 2, 4, 4) * 3 + 1, "images.pt")
    merge(weighted_sum("a.safetensors", "b.safetensors", alpha=0.5), "merged.safetensors")
    return tmp_path


def net_class() -> type[nn.Module]:
    scope: dict[str, type[nn.Module]] = {}
    exec(MODULE, scope)
    return scope["Net"]


def mended(*words: str) -> dict[str, torch.Tensor]:
    given = [
        "merged.safetensors",
        "module=net.py:subject",
        "data=images.pt",
        "output=out.safetensors",
        *words,
    ]
    assert verb.main(given) == 0
    return load_file("out.safetensors")


def test_the_statistics_are_those_of_each_layers_inputs_in_evaluation(bench, capsys):
    found = mended()
    net = net_class()().eval()
    net.load_state_dict(found)
    seen = {}
    for name in ("norm", "late"):

        def look(_, inputs, name=name):
            seen[name] = inputs[0].transpose(0, 1).flatten(1)

        net.get_submodule(name).register_forward_pre_hook(look)
    net(torch.load("images.pt"))

    for key, tensor in load_file("merged.safetensors").items():
        name, _, buffer = key.rpartition(".")
        if "running" in buffer:
            expected = seen[name].mean(1) if "mean" in buffer else seen[name].var(1)
            torch.testing.assert_close(found[key], expected, rtol=1e-5, atol=1e-6)
            assert not torch.equal(found[key], tensor)
        else:
            assert torch.equal(found[key], tensor), key
    assert "2 batch norms have the statistics of 40 examples" in capsys.readouterr().out


def test_torch_finds_the_same_in_one_batch_up_to_its_biased_variances(bench):
    found = mended()
    net = net_class()()
    net.load_state_dict(load_file("merged.safetensors"))
    update_bn([torch.load("images.pt")], net)
    for key in ("norm.running_mean", "norm.running_var"):  # which nothing comes before
        torch.testing.assert_close(found[key], net.state_dict()[key], rtol=1e-5, atol=1e-6)
    for key in ("late.running_mean", "late.running_var"):
        torch.testing.assert_close(found[key], net.state_dict()[key], rtol=0.02, atol=1e-3)


def test_the_header_names_model_and_data_and_no_recipe(bench):
    mended("count=30")
    with safe_open("out.safetensors", framework="pt") as file:
        header = file.metadata()
    told = json.loads(header["mecha_exp.recalibrated"])
    assert (told["model"], told["data"], told["count"]) == ("merged.safetensors", "images.pt", 30)
    assert told["layers"] == ["norm", "late"]
    assert (told["module"], len(told["code"])) == ("net.py:subject", 16)
    assert len(told["model_sha256"]) == len(told["data_sha256"]) == 64
    assert "mecha_recipe" not in header


def test_the_same_bytes_twice(bench):
    mended()
    first = Path("out.safetensors").read_bytes()
    mended()
    assert Path("out.safetensors").read_bytes() == first


def test_a_layer_of_two_names_has_its_statistics_under_both(tmp_path):
    net = nn.Sequential(nn.BatchNorm1d(2)).eval()
    net.alias = net[0]
    save_file({key: tensor.clone() for key, tensor in net.state_dict().items()}, tmp_path / "m.safetensors")
    subject = Subject(net, torch.randn(20, 2) + 5, lambda x: net[0](x[None]))
    with open_stored(tmp_path / "m.safetensors") as stored:
        assert recalibrate(subject, stored, tmp_path / "out.safetensors", {}) == ["0"]
    found = load_file(tmp_path / "out.safetensors")
    for buffer in ("running_mean", "running_var"):
        assert torch.equal(found[f"alias.{buffer}"], found[f"0.{buffer}"])
    assert float(found["0.running_mean"].min()) > 4


class Odd(nn.Module):
    """A network whose batch norm is applied as often as its input says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self.norm(x)
        return x


@pytest.mark.parametrize(
    ("times", "examples", "error"),
    [
        (2, torch.ones(3, 2), r"'norm' is applied 2 times in one example"),
        (0, torch.ones(3, 2), r"'norm' is never applied in the first example"),
        (1, torch.ones(1, 2), r"'norm' sees 1 value for each channel .* Give more examples"),
        (1, torch.full((3, 2), torch.nan), r"the inputs of 'norm' are NaN or infinite"),
        (1, torch.ones(3, 5), r"example 0 fails: RuntimeError"),
        (1, torch.tensor([[1e6, 0], [-1e6, 0]]), r"'norm.running_var' is up to 2e\+12, which F16 does not"),
        (1, torch.tensor([[-1e6, 0], [-1e6, 0]]), r"'norm.running_mean' is up to 1e\+06, which F16 does not"),
    ],
)
def test_what_has_no_statistics_is_refused(tmp_path, times, examples, error):
    net = Odd().eval()
    save_file({k: v.half() if v.is_floating_point() else v for k, v in net.state_dict().items()},
              tmp_path / "m.safetensors")  # fmt: skip
    subject = Subject(net, examples, lambda x: net(x[None], times))
    with open_stored(tmp_path / "m.safetensors") as stored, pytest.raises(EvaluationError, match=error):
        recalibrate(subject, stored, tmp_path / "out.safetensors", {})
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_networks_and_words_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    linear = nn.Sequential(nn.Linear(2, 2)).eval()
    save_file(linear.state_dict(), "m.safetensors")
    subject = Subject(linear, torch.ones(3, 2), linear)
    with open_stored(Path("m.safetensors")) as stored:
        with pytest.raises(ConfigError, match="Sequential has no batch norm with running statistics"):
            recalibrate(subject, stored, Path("out.safetensors"), {})
        norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)).eval()
        norm.load_state_dict(linear.state_dict(), strict=False)
        foreign = Subject(norm, torch.ones(3, 2), norm)
        with pytest.raises(ConfigError, match=r"'1.running_mean' is not a key of .*keys=\{buffer: key\}"):
            recalibrate(foreign, stored, Path("out.safetensors"), {})
        with pytest.raises(ConfigError, match="is an input, which would be destroyed"):
            recalibrate(subject, stored, Path("m.safetensors"), {})
    with pytest.raises(ConfigError, match=r"output=x\.safetensors is an input, which would be destroyed"):
        verb.main(["m.safetensors", "module=digits", "data=x.safetensors", "output=x.safetensors"])
    with pytest.raises(ConfigError, match=r"module=\.\.\. is missing: FILE\.py:function"):
        verb.main(["m.safetensors", "data=x", "output=out.safetensors"])
    with pytest.raises(ConfigError, match=r"(?s)'labels=true' is not a setting.*output=\.\.\. is missing"):
        verb.main(["m.safetensors", "data=x", "labels=true"])
