"""Points and sweeps whose output is an adapter of PEFT."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from outcome import Outcome
from peft_tensors import O, Q, lora
from safetensors.torch import load_file
from torch import Tensor

import mecha_exp as m

Base = dict[str, Tensor]
Run = Callable[..., Outcome]
PREFIX = "base_model.model."
GIVEN = ("models.base=base", "models.experts=[a,b]", "tracking=none", "output=adapter")
EVALUATOR = """
from mecha_exp import evaluator

@evaluator("size", metric="size", direction="minimize")
def size(state_dict):
    return {"size": float(sum(tensor.double().abs().sum() for tensor in state_dict.values()))}
"""

SPLIT_EVALUATOR = """
import shutil
from pathlib import Path
from mecha_exp import evaluator

@evaluator("size", metric="size", direction="minimize", splits=("validation", "test"))
def size(state_dict, *, split="validation"):
    return {"size": float(sum(tensor.double().abs().sum() for tensor in state_dict.values()))}

@evaluator("forget", metric="gone")
def forget(state_dict, *, context):
    shutil.rmtree(Path(context.folder) / "adapter")
    return {"gone": 1}
"""


@pytest.fixture
def run(base: Base, adapter: Callable[..., str], app: Run, tmp_path: Path) -> Run:
    """Runs words beside a base and two adapters of it."""
    adapter("a", lora(Q))
    adapter("b", lora(Q, O, seed=7))
    (tmp_path / "size.py").write_text(EVALUATOR)
    return lambda *words: app(*words, cwd=tmp_path)


def products(folder: Path) -> dict[str, Tensor]:
    """What an adapter with the scale 1 adds, by module."""
    tensors = load_file(folder / "adapter_model.safetensors")
    ends = ".lora_A.weight"
    modules = [key.removesuffix(ends) for key in tensors if key.endswith(ends)]
    return {
        name.removeprefix(PREFIX): tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}{ends}"]
        for name in modules
    }


def test_a_weighted_sum_is_the_adapter_that_the_verb_makes(run: Run, tmp_path: Path):
    ran = run("recipe=task_arithmetic", *GIVEN, "alpha=0.5", "evaluator=none", "output.path=both")
    verb = run("adapters", "a", "b", "--weights", "0.5", "-o", "sum")

    assert ran.status == verb.status == 0, ran.err + verb.err
    by_point, by_verb = products(tmp_path / "both"), products(tmp_path / "sum")
    assert by_point.keys() == by_verb.keys() == {Q, O}
    for module, product in by_verb.items():
        torch.testing.assert_close(by_point[module], product, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "both" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == config["lora_alpha"]


def test_each_point_of_a_sweep_is_measured_as_its_adapter(run: Run, base: Base, tmp_path: Path):
    words = ("recipe=ties", *GIVEN, "output.rank=1,2", "plugins=[size.py]", "evaluator.name=size")
    words += ("-m", "hydra.sweep.dir=sweep")

    first, again = run(*words), run(*words)

    assert first.status == again.status == 0, first.err + again.err
    assert "nothing to do" in again.out
    sizes = []
    for number, rank in enumerate((1, 2)):
        point = tmp_path / "sweep" / str(number)
        added = products(point / "adapter")
        sizes.append(
            sum(
                (tensor + added.get(key.removesuffix(".weight"), 0)).double().abs().sum().item()
                for key, tensor in base.items()
            )
        )
        record = json.loads((point / "run.json").read_text())
        assert record["model"] == str(point / "adapter")
        assert record["metrics"]["size"] == pytest.approx(sizes[-1], rel=1e-6)
        assert record["metrics"]["adapter/rank"] == rank
    assert sizes[0] != pytest.approx(sizes[1], rel=1e-3)  # the rank is part of what is measured


def test_a_stored_adapter_is_measured_by_another_evaluator_without_a_merge(run: Run, tmp_path: Path):
    words = ("recipe=task_arithmetic", *GIVEN, "output.path=both", "plugins=[size.py]")

    made = run(*words, "evaluator=none")
    measured = run(*words, "evaluator.name=size", "hydra.run.dir=run")

    assert made.status == measured.status == 0, made.err + measured.err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    expected = m.merge(m.model("base") + m.lora_delta("both", m.model("base")))
    size = sum(tensor.double().abs().sum().item() for tensor in expected.values())
    assert record["found"] and record["metrics"]["size"] == pytest.approx(size, rel=1e-9)


def test_another_base_makes_another_adapter(run: Run, base: Base, tmp_path: Path):
    fine = {key: tensor + 1 if key.endswith("o_proj.weight") else tensor for key, tensor in base.items()}
    (tmp_path / "fine").mkdir()
    m.merge(m.model(fine), "fine/model.safetensors")
    words = (
        "recipe=passthrough",
        "models.experts=[fine]",
        "tracking=none",
        "output=adapter",
        "evaluator=none",
    )

    same = run(*words, "models.base=fine", "output.path=none")
    apart = run(*words, "models.base=base", "output.path=ones")

    assert same.status == 1 and "no linear layer of the model differs from fine" in same.err
    assert apart.status == 0, apart.err
    torch.testing.assert_close(products(tmp_path / "ones")[O], torch.ones(6, 6))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("output.rank=0",), "output.rank: expected a whole number of at least 1, got 0"),
        (("output.save=false",), "output.save: an adapter is measured as it is written"),
        (("output.quantize=fp8_scaled",), "output.quantize: an adapter is a file of factors in float32"),
        (("output.path=base",), "base is there and is not an adapter: name another folder"),
        (("output.leave_out=3",), "output.leave_out: expected a list of names, got [3]"),
        (("output.base=null",), "output.base: an adapter is a difference to a base"),
        (("output.path=s3://bucket/a",), "output.path: s3://bucket/a lies elsewhere"),
    ],
)
def test_what_an_adapter_cannot_be_is_refused_before_the_merge(
    words: tuple[str, ...], message: str, run: Run, tmp_path: Path
):
    refused = run("recipe=task_arithmetic", *GIVEN, "evaluator=none", *words)

    assert refused.status == 1 and message in refused.err
    assert not (tmp_path / "outputs").exists()


def test_changes_that_no_product_has_are_named(run: Run, base: Base, tmp_path: Path):
    fine = {
        **base,
        "model.norm.weight": base["model.norm.weight"] + 1,
        f"{O}.weight": base[f"{O}.weight"] + 1,
    }
    (tmp_path / "fine").mkdir()
    m.merge(m.model(fine), "fine/model.safetensors")
    words = ("recipe=passthrough", "models.base=base", "models.experts=[fine]", "tracking=none")
    words += ("output=adapter", "evaluator=none")

    refused = run(*words, "output.path=whole")
    saved = run(*words, "output.path=whole", "output.modules_to_save=[norm]")

    assert refused.status == 1 and "besides linear layers 1 tensor changed: model.norm.weight" in refused.err
    assert saved.status == 0, saved.err
    whole = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    assert torch.equal(whole[f"{PREFIX}model.norm.weight"], fine["model.norm.weight"])


def test_a_plan_and_a_reproduction_say_what_an_adapter_is(run: Run):
    words = ("recipe=task_arithmetic", *GIVEN, "evaluator=none")

    planned = run("plan", *words, "output.rank=4")
    made = run(*words, "hydra.run.dir=run")
    remade = run("reproduce", "run")

    assert planned.status == made.status == 0, planned.err + made.err
    assert re.search(r"adapter +adapter, of rank 4 at most", planned.out)
    assert remade.status == 1 and "the output is an adapter, and models alone are reproduced" in remade.err


@pytest.mark.parametrize("more", [(), ("evaluator.also=[forget]",)], ids=["kept", "gone"])
def test_a_chosen_adapter_without_a_store_is_reported_at_its_rank(
    more: tuple[str, ...], run: Run, tmp_path: Path
):
    (tmp_path / "size.py").write_text(SPLIT_EVALUATOR)
    words = ("recipe=ties", *GIVEN, "output.rank=1,2", "plugins=[size.py]", "evaluator.name=size")

    swept = run(*words, *more, "-m", "hydra.sweep.dir=sweep", "store=null")

    assert swept.status == 0, swept.err
    metrics = [json.loads(file.read_text())["metrics"] for file in tmp_path.glob("sweep/*/run.json")]
    reported = [of_point for of_point in metrics if "test/size" in of_point]
    assert reported and all(each["test/size"] == each["size"] for each in reported)


def test_adapters_are_measured_for_comparison_as_their_base_with_what_they_add(run: Run, tmp_path: Path):
    words = ("models.base=base", "models.experts=[a,b]", "tracking=none", "output=none", "alpha=0.25,0.5")
    measured = run("recipe=task_arithmetic", *words, "plugins=[size.py]", "evaluator.name=size", "-m")

    assert measured.status == 0, measured.err
    assert "cannot be measured" not in measured.out + measured.err
    assert (measured.out + measured.err).count("a is an adapter: read as") == 1
    (record, *_) = sorted((tmp_path / "outputs").rglob("run.json"))
    references = json.loads(record.read_text())["references"]
    for name in ("a", "b"):
        base = m.model(str(tmp_path / "base"))
        model = m.merge(base + m.lora_delta(str(tmp_path / name), base))
        size = float(sum(tensor.double().abs().sum() for tensor in model.values()))
        assert references[name]["size"] == pytest.approx(size)
    assert references["a"]["size"] != references["base"]["size"]
