"""The real vLLM measures a sweep: `make vllm` installs one that is built for CPUs, and runs this."""

import csv
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_tokenizers import write_llama

from mecha_exp import Job, merge_many, weighted_sum
from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation import Context, read_scoring

pytest.importorskip("lm_eval")
try:
    version("vllm")
except PackageNotFoundError:
    pytest.skip("vllm is not installed: make vllm", allow_module_level=True)
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

SIZES = {"hidden_size": 64, "intermediate_size": 64}  # on a CPU vLLM takes heads of 32 and more
ENGINE = {"gpu_memory_utilization": 0.05, "enforce_eager": True}
LIKELIHOOD = {
    "task: word_choice": "task: word_likelihood",
    "output_type: multiple_choice": "output_type: loglikelihood",
    'doc_to_choice: "{{choices}}"\n': "",
    'doc_to_target: "{{gold}}"': 'doc_to_target: " {{choices[gold]}}"',
    "  - {metric: acc_norm, aggregation: mean, higher_is_better: true}\n": "",
    "metric: acc, aggregation: mean, higher_is_better: true": "metric: perplexity, higher_is_better: false",
}
NUMBERS = ("word_choice/acc", "word_choice/acc_norm", "word_likelihood/perplexity")


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [write_llama(tmp_path / name, seed, spread=0.2, **SIZES) for seed, name in enumerate("ab")]


@pytest.fixture
def tasks(word_task) -> Path:
    """A folder with a task of choices, and one whose number tells any difference of the logits."""
    folder = word_task(LIKELIHOOD)
    (folder / "word_choice.yaml").rename(folder / "word_likelihood.yaml")
    return word_task()


def of_the_command_line(model: Path, tasks: Path, output: Path) -> dict[str, float]:
    """The numbers of `lm_eval --model vllm` on a saved model."""
    given = {"pretrained": model, "dtype": "float32", **ENGINE}
    words = ",".join(f"{name}={value}" for name, value in given.items())
    arguments = ["--model", "vllm", "--model_args", words, "--tasks", "word_choice,word_likelihood"]
    arguments += ["--include_path", str(tasks), "--batch_size", "auto", "--output_path", str(output)]
    command = [sys.executable, "-m", "lm_eval", *arguments]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    (report,) = output.rglob("results*.json")
    results = json.loads(report.read_text())["results"]
    return {name: results[name.partition("/")[0]][f"{name.partition('/')[2]},none"] for name in NUMBERS}


@pytest.fixture
def quarter(models, tasks, tmp_path: Path, as_a_user) -> Callable[..., dict[str, float]]:
    """Runs a sweep of two alphas as a user does; returns the numbers of alpha=0.25."""
    of_the_sweep = ["recipe=weighted_sum", "models.base=a", "models.experts=[b]", "alpha=0.25,0.75"]
    of_the_sweep += ["output=none", "tracking=none", "hydra.sweep.dir=sweep", "-m"]
    of_the_tasks = ["evaluator=lm_eval", "evaluator.tasks=[word_choice,word_likelihood]"]
    of_the_tasks += [f"evaluator.include_path={tasks}", "evaluator.dtype=float32", "evaluator.device=cpu"]

    def run(*words: str) -> dict[str, float]:
        outcome = as_a_user(*of_the_sweep, *of_the_tasks, *words, cwd=tmp_path)
        assert outcome.status == 0, outcome.err
        assert "(EngineCore" not in outcome.out  # its log would be among the tables
        with (tmp_path / "sweep/sweep.csv").open() as file:
            (row,) = (row for row in csv.DictReader(file) if row["alpha"] == "0.25")
        return {name: float(row[name]) for name in NUMBERS}

    return run


def test_a_sweep_gives_the_numbers_of_the_command_line_and_nearly_those_of_hf(
    models, tasks, quarter, tmp_path: Path, beside
):
    settings = ", ".join(f"{name}: {value}" for name, value in ENGINE.items())
    ours = quarter("evaluator.backend=vllm", f"evaluator.model_args={{{settings}}}")
    of_hf = quarter("evaluator.backend=hf")
    merge_many([Job(weighted_sum(*models, alpha=0.25), tmp_path / "merged")])
    theirs = of_the_command_line(tmp_path / "merged", tasks, tmp_path / "out")

    for name in NUMBERS:
        beside("lm_eval, vllm", name, ours[name], theirs[name], within=0)
        assert ours[name] == pytest.approx(of_hf[name], rel=1e-4), name


def test_logits_that_are_nan_are_an_error_and_no_engine_is_left(models, tasks):
    weights = load_file(models[0] / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    asked = {"name": "lm_eval", "tasks": ["word_choice"], "include_path": str(tasks), "backend": "vllm"}
    asked |= {"device": "cpu", "dtype": "float32", "model_args": ENGINE}
    context = Context(inputs={"a": models[0]})
    read = read_scoring(asked, {key: tuple(t.shape) for key, t in weights.items()}, context=context)

    with pytest.raises(EvaluationError, match="the evaluator 'lm_eval': the logits are NaN"):
        read.measure_one(read.evaluations[0], weights, context)

    for process in multiprocessing.active_children():  # what was killed is gone a moment later
        process.join(10)
    assert not multiprocessing.active_children()
