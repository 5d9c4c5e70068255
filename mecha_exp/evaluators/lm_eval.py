"""The evaluator `lm_eval`: any task of lm-evaluation-harness, its own and local YAML tasks."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from mecha_exp.errors import ConfigError, EvaluationError, brief, did_you_mean
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Options, Shapes
from mecha_exp.evaluation.measurement import Measurement
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import evaluator
from mecha_exp.evaluators.common import ModelFolder, calm, check_network, chosen_device, folder_of, network
from mecha_exp.evaluators.common.networks import NAN_LOGITS, refuse_nan, write_model
from mecha_exp.evaluators.harness.backends import HF, VLLM, check_backend, check_vllm, started
from mecha_exp.evaluators.harness.parts import check_parts
from mecha_exp.evaluators.harness.requests import kept_answers, shown_requests
from mecha_exp.evaluators.harness.summary import summary_of
from mecha_exp.evaluators.harness.tasks import LoadedTasks, load_tasks, local_files
from mecha_exp.numbers import is_number

__all__ = ["lm_eval"]


def _names(tasks: str | Sequence[str]) -> list[str]:
    """The names of tasks: a list, or words with commas between them.

    Raises:
        ConfigError: there is none.
    """
    listed = tasks.split(",") if isinstance(tasks, str) else tasks
    if not listed:
        raise ConfigError(f"evaluator.tasks: expected names of tasks, as in [arc_easy,piqa], got {tasks!r}.")
    return [name.strip() for name in listed]


def _check(shapes: Shapes, context: Context, parameters: Options) -> None:
    """Check numbers, tasks with their data, the tokenizer and the network, before anything is merged."""
    for name, least in (("limit", 0), ("num_fewshot", -1)):
        value = parameters[name]
        if value is not None and not (is_number(value) and value > least):
            raise ConfigError(f"evaluator.{name}: expected a number above {least}, got {brief(value)}.")
    backend = parameters["backend"]
    if backend == VLLM:
        check_vllm(parameters["device"])
    folder = folder_of(context, parameters)
    folder.check_vocabulary(shapes)
    if parameters["apply_chat_template"] and not folder.has_chat_template:
        raise ConfigError(
            f"evaluator.apply_chat_template: the tokenizer in {folder.path} has no chat template. Leave it "
            "out, or name the folder of a tokenizer that has one with evaluator.model=PATH."
        )
    with calm(offline=context.offline):
        check_backend(backend)
    kind, device, dtype = _kind(folder), parameters["device"], parameters["dtype"]
    check_network(folder, shapes, kind, device=device, dtype=dtype, context=context)
    loaded = _loaded(context, parameters)
    with calm(offline=context.offline):
        if parameters["test"]:
            loaded.check_splits("evaluator.test=true")
        elif (split := parameters["split"]) is not None:
            loaded.check_split(split, f"evaluator.split={split}")
    if (score := parameters["score"]) is not None:
        for name, task in loaded.tasks.items():
            _check_score(name, str(score).partition(",")[0], list(task.aggregation()))


def _check_examples(shapes: Shapes, context: Context, parameters: Options) -> None:
    """Check that examples of all tasks have values of their own, the same in a part as among all."""
    loaded = _loaded(context, parameters).on(parameters["split"])
    chosen = [parameters[name] for name in ("num_fewshot", "gen_kwargs", "score")]
    import_module("lm_eval.evaluator")  # which `calm` keeps from more than is asked
    with calm(offline=context.offline), shown_requests(context):
        check_parts(loaded, *chosen)


def _loaded(context: Context, parameters: Options) -> LoadedTasks:
    names, include = _names(parameters["tasks"]), parameters["include_path"]
    return load_tasks(names, include, offline=context.offline)


def _check_score(task: str, metric: str, known: Sequence[str]) -> None:
    if metric not in known:
        hint = did_you_mean(metric, known)
        raise ConfigError(f"evaluator.score={metric}: the task {task} has no such metric.{hint}")


def _depends(context: Context, parameters: Options) -> Any:
    files = local_files(_names(parameters["tasks"]), parameters["include_path"])
    engine = {VLLM: version(VLLM)} if parameters["backend"] == VLLM else {}
    return {"folder": folder_of(context, parameters).contents, "files": files, **engine}


def _kind(folder: ModelFolder) -> str:
    is_seq2seq = folder.config.get("is_encoder_decoder")
    return "AutoModelForSeq2SeqLM" if is_seq2seq else "AutoModelForCausalLM"


@evaluator(
    "lm_eval",
    metric="score",
    units={"score": "the first metric of each task, mean over tasks"},
    splits=("validation", "test"),
    libraries=("lm_eval", "transformers", "datasets"),
    extra="lm",
    check=_check,
    depends=_depends,
    fidelities=("limit",),
    takes_examples=True,
    check_examples=_check_examples,
)
def lm_eval(
    state_dict: Mapping[str, Tensor],
    *,
    context: Context,
    tasks: str | Sequence[str],
    test: bool | None = None,
    split: str | None = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
    batch_size: int | str | None = None,
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    gen_kwargs: str | Mapping[str, Any] | None = None,
    include_path: str | None = None,
    score: str | None = None,
    backend: str = HF,
    model_args: Mapping[str, Any] | None = None,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    examples: Mapping[str, list[int]] | None = None,
) -> Outcomes | Measurement:
    """Measure a language model on tasks of lm-evaluation-harness, by `lm_eval.simple_evaluate`.

    Args:
        state_dict: the weights under the names of the saved model.
        context: its inputs have the configuration and the tokenizer.
        tasks: names of tasks, groups and tags, and paths of YAML files.
        test: whether points are chosen by the validation split of each task and reported on its test split.
        split: `validation` or `test`; None is the split that the library takes: `test`, or `validation` of
            tasks that have no other.
        limit: examples for each task: a count, or a fraction below 1; None for all.
        num_fewshot: examples in the prompt; None for the task's own number.
        batch_size: examples at once: a number, or `auto`. None is 1, and `auto` for vllm.
        apply_chat_template: whether prompts are put into the tokenizer's chat template.
        system_instruction: a text before the prompts.
        gen_kwargs: settings of generation, such as `{temperature: 0}`.
        include_path: a folder with YAML files of more tasks.
        score: the metric that counts, by its name, such as `acc_norm`, or `exact_match,strict-match` with a
            filter; None for the first of each task.
        backend: `hf` measures the tensors as they are. Another model of lm_eval, such as `vllm`, loads them
            from a temporary folder.
        model_args: more arguments of the backend, such as `{max_length: 2048}`.
        model: a folder or a hub's name whose configuration and tokenizer are used in place of the inputs'.
        device: `auto`, `cpu`, `cuda:1`. vllm takes the GPUs that it sees, or the CPU if it is built for one.
        dtype: `auto` is that of the weights; vllm takes `bfloat16` or `float16` for those of `float32`.
        trust_remote_code: whether code in the model's folder may be run.
        examples: the numbers of the examples to measure, by task; None is all.

    Returns:
        For each example of each task the value of the metric that counts, `score/TASK`; named by its
        number in the task's data. Beside them the library's own numbers, such as `arc_easy/acc_norm`. A
        metric of which less is better counts with its sign turned. Without values by example (F1, perplexity
        over a corpus) there are numbers alone.

    Raises:
        ConfigError: a task, its data, a metric or the network are not what they must be.
        EvaluationError: a logit is NaN.
    """
    from lm_eval import simple_evaluate

    folder = folder_of(context, locals())
    loaded = _loaded(context, locals()).on(split)
    settings = {
        "tasks": _names(tasks),
        "limit": limit,
        "num_fewshot": num_fewshot,
        "apply_chat_template": apply_chat_template,
        "system_instruction": system_instruction,
        "gen_kwargs": gen_kwargs,
        "task_manager": loaded,
        "bootstrap_iters": 0,
    }
    if examples is not None:
        settings |= {"task_manager": loaded.among(examples), "samples": dict(examples), "limit": None}
    if batch_size is None:
        batch_size = "auto" if backend == VLLM else 1
    more = {"batch_size": batch_size, **(model_args or {})}
    with calm(offline=context.offline):
        if backend == HF:
            built = network(folder, state_dict, _kind(folder), device=device, dtype=dtype)
            if more["batch_size"] == 1:  # larger batches are other ones in a start that goes on
                settings["use_cache"] = kept_answers(context)
            with built as module, refuse_nan(module), shown_requests(context):
                report = simple_evaluate(_model(module, folder, more), **settings)
        else:
            with tempfile.TemporaryDirectory() as temporary:
                write_model(state_dict, folder, Path(temporary))
                code = {"trust_remote_code": True} if folder.runs_code else {}
                given = {"pretrained": temporary, "dtype": dtype, **code, **(model_args or {})}
                place = str(chosen_device(device))
                ours = started(backend, given, batch_size=batch_size, device=place)
                with ours as built, shown_requests(context):
                    report = simple_evaluate(built, **settings)
            if any(_is_nan(sample["resps"]) for rows in report["samples"].values() for sample in rows):
                raise EvaluationError(NAN_LOGITS)
    return summary_of(report, score)


def _model(module: Any, folder: ModelFolder, more: Mapping[str, Any]) -> Any:
    from lm_eval.models.huggingface import HFLM

    settings = {"trust_remote_code": folder.runs_code, **more}
    return HFLM(pretrained=module, tokenizer=folder.tokenizer(), **settings)


def _is_nan(answers: Any) -> bool:
    """Whether one of the answers, which the library nests by request, is NaN."""
    if isinstance(answers, list | tuple):
        return any(map(_is_nan, answers))
    return isinstance(answers, float) and math.isnan(answers)
