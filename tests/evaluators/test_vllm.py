"""The real vLLM measures a sweep: `make vllm` installs one that is built for CPUs, and runs this."""

import csv
import json
import multiprocessing
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_tokenizers import write_llama

from mecha_exp import Job, merge_many, weighted_sum
from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation import Context, read_scoring
from mecha_exp.evaluation.measurement import Measurement

pytest.importorskip("lm_eval")
try:
    version("vllm")
except PackageNotFoundError:
    pytest.skip("vllm is not installed: make vllm", allow_module_level=True)
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

SIZES = {"hidden_size": 64, "intermediate_size": 64}  # on a CPU vLLM refuses heads of 8
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


def by_the_evaluator(folder: Path, tasks: Path, weights: dict[str, torch.Tensor], **settings) -> Measurement:
    """The evaluator's measurement in this process."""
    asked = {"name": "lm_eval", "tasks": ["word_choice", "word_likelihood"], "include_path": str(tasks)}
    asked |= {"device": "cpu", "dtype": "float32", **settings}
    context = Context(inputs={"a": folder})
    read = read_scoring(asked, {key: tuple(t.shape) for key, t in weights.items()}, context=context)
    return read.measure_one(read.evaluations[0], weights, context)


def test_a_sweep_gives_the_numbers_of_the_command_line_and_nearly_those_of_hf(
    models, tasks, tmp_path: Path, as_a_user, beside
):
    engine = ", ".join(f"{name}: {value}" for name, value in ENGINE.items())
    words = ["recipe=weighted_sum", "models.base=a", "models.experts=[b]", "alpha=0.25,0.75", "output=none"]
    words += ["evaluator=lm_eval", "evaluator.backend=vllm", f"evaluator.model_args={{{engine}}}"]
    words += ["evaluator.tasks=[word_choice,word_likelihood]", f"evaluator.include_path={tasks}"]
    words += ["evaluator.dtype=float32", "evaluator.device=cpu", "tracking=none"]
    outcome = as_a_user(*words, "hydra.sweep.dir=sweep", "-m", cwd=tmp_path)
    assert outcome.status == 0, outcome.err
    merge_many([Job(weighted_sum(*models, alpha=0.25), tmp_path / "merged")])
    theirs = of_the_command_line(tmp_path / "merged", tasks, tmp_path / "out")
    weights = load_file(tmp_path / "merged/model.safetensors")
    of_hf = by_the_evaluator(tmp_path / "merged", tasks, weights).metrics

    assert "(EngineCore" not in outcome.out  # its log would be among the tables
    with (tmp_path / "sweep/sweep.csv").open() as file:
        (ours,) = (row for row in csv.DictReader(file) if row["alpha"] == "0.25")
    for name in NUMBERS:
        beside("lm_eval, vllm", name, float(ours[name]), theirs[name], within=0)
        assert float(ours[name]) == pytest.approx(of_hf[name], rel=1e-4), name


def test_logits_that_are_nan_are_an_error_and_no_engine_is_left(models, tasks):
    weights = load_file(models[0] / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))

    with pytest.raises(EvaluationError, match="the evaluator 'lm_eval': the logits are NaN"):
        by_the_evaluator(models[0], tasks, weights, backend="vllm", model_args=ENGINE)

    for process in multiprocessing.active_children():  # what was killed is gone a moment later
        process.join(10)
    assert not multiprocessing.active_children()
