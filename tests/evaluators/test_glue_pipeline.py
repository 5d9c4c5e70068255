"""A pipeline on a task of GLUE gives the numbers of scikit-learn on the model's own predictions."""

import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_tokenizers import SMALL, WORDS, write_tokenizer

from mecha_exp.errors import ConfigError
from mecha_exp.mergecraft import evaluate_glue_pipeline, soup

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

COLUMNS = {
    "rte": ("sentence1", "sentence2"),
    "mrpc": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
    "cola": ("sentence",),
    "mnli": ("premise", "hypothesis"),
}
OUTPUTS = {"stsb": 1, "mnli": 3}


def rows_of(task: str, count: int = 24) -> list[dict[str, object]]:
    draw, outputs = random.Random(task), OUTPUTS.get(task, 2)
    return [
        {
            **{name: " ".join(draw.choices(WORDS.split(), k=draw.randint(2, 7))) for name in COLUMNS[task]},
            "label": draw.random() * 5 if outputs == 1 else draw.randrange(outputs),
        }
        for _ in range(count)
    ]


def pipeline_of(folder: Path, task: str, **settings):
    """A classifier of random weights as a pipeline."""
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=40, max_position_embeddings=32, initializer_range=0.5,
        num_labels=OUTPUTS.get(task, 2), **SMALL, **settings,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    write_tokenizer(folder)
    return transformers.pipeline("text-classification", model=str(folder), device="cpu")


def expected(pipeline, task: str, rows) -> dict[str, float]:
    """The metrics by scikit-learn and scipy, of the model on one example at a time."""
    from sklearn import metrics

    logits = []
    for row in rows:
        tokens = pipeline.tokenizer(*(row[name] for name in COLUMNS[task]), return_tensors="pt")
        with torch.no_grad():
            logits.append(pipeline.model(**tokens).logits[0].numpy())
    labels, answers = np.array([row["label"] for row in rows]), np.stack(logits).argmax(1)
    if task == "stsb":
        scores = np.stack(logits)[:, 0]
        pearson, spearman = stats.pearsonr(labels, scores), stats.spearmanr(labels, scores)
        return {"pearson": pearson.statistic, "spearmanr": spearman.statistic}
    if task == "cola":
        return {"matthews_correlation": metrics.matthews_corrcoef(labels, answers)}
    accuracy = {"accuracy": metrics.accuracy_score(labels, answers)}
    return {**accuracy, "f1": metrics.f1_score(labels, answers)} if task == "mrpc" else accuracy


@pytest.mark.parametrize("task", COLUMNS)
def test_each_task_has_its_metrics_from_a_saved_dataset(tmp_path: Path, task: str):
    rows = rows_of(task)
    splits = {"train": rows[:3], "validation": rows}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in splits.items()})
    saved.save_to_disk(tmp_path / "data")
    pipeline = pipeline_of(tmp_path / "model", task)

    found = evaluate_glue_pipeline(pipeline, task, data=tmp_path / "data")

    assert found == pytest.approx(expected(pipeline, task, rows), rel=1e-5)


def test_outputs_with_names_of_their_own_are_counted_in_their_order(tmp_path: Path):
    """mergecraft takes every name but LABEL_0 for class 1."""
    rows = rows_of("rte")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rte.parquet")
    named = {"id2label": {0: "yes", 1: "no"}, "label2id": {"yes": 0, "no": 1}}
    pipeline = pipeline_of(tmp_path / "model", "rte", **named)

    found = evaluate_glue_pipeline(pipeline, "rte", data=tmp_path / "rte.parquet")

    assert found == pytest.approx(expected(pipeline, "rte", rows), rel=1e-5)


def test_the_data_of_the_hubs_cache_are_found_and_nothing_is_downloaded(tmp_path: Path, monkeypatch):
    """The folder is that which `datasets` writes when it fetches GLUE."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = rows_of("rte")
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "made")
    folder = tmp_path / "cache/nyu-mll___glue/rte/0.0.0/0123456789abcdef"
    folder.mkdir(parents=True)
    shutil.copy(next((tmp_path / "made").glob("*.arrow")), folder / "glue-validation.arrow")
    splits = datasets.SplitDict({"validation": datasets.SplitInfo("validation", num_examples=len(rows))})
    info = datasets.DatasetInfo(
        features=made.features, builder_name="parquet", dataset_name="glue", config_name="rte",
        version="0.0.0", splits=splits,
    )  # fmt: skip
    info.write_to_directory(str(folder))
    pipeline = pipeline_of(tmp_path / "model", "rte")

    merged = soup([pipeline, pipeline])
    found = evaluate_glue_pipeline(merged, "rte")

    assert found == pytest.approx(expected(pipeline, "rte", rows), rel=1e-5)
    with pytest.raises(
        ConfigError, match=re.escape("nyu-mll/glue, sst2, split validation, is not in the hub's")
    ):
        evaluate_glue_pipeline(pipeline, "sst2")


def test_what_cannot_be_measured_is_said(tmp_path: Path):
    pipeline = pipeline_of(tmp_path / "model", "rte")
    datasets.DatasetDict({"validation": datasets.Dataset.from_list(rows_of("mnli"))}).save_to_disk(
        tmp_path / "data"
    )

    for task, data, split, says in (
        ("rtr", "data", "validation", "'rtr' is not a task of GLUE. Did you mean 'rte'?"),
        ("rte", "nowhere", "validation", "nowhere does not exist."),
        ("rte", "data", "valid", "has no split 'valid'. Did you mean 'validation'?"),
        ("rte", "data", "validation", "has no column 'sentence1'"),
        ("mnli", "data", "validation", "the label 2 is out of range: the head of 'mnli' has 2 outputs"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            evaluate_glue_pipeline(pipeline, task, split, data=tmp_path / data)


def test_a_folder_with_files_of_several_splits_is_not_measured_as_one(tmp_path: Path):
    for split in ("train", "validation"):
        rows = datasets.Dataset.from_list(rows_of("rte"))
        rows.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")

    with pytest.raises(ConfigError, match="holds the splits train, validation: name a file of one of th"):
        evaluate_glue_pipeline(None, "rte", data=tmp_path)


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for name in ("base", "rte_a", "rte_b"):
        pipeline_of(tmp_path / name, "rte")
    datasets.Dataset.from_list(rows_of("rte")).save_to_disk(tmp_path / "glue/rte")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/mergecraft.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"^```text\n(.*?)^```", page, re.M | re.S) if "glue" in block)

    exec(compile(example, "example", "exec"), {"__name__": "example"})

    assert re.match(r"\{'accuracy': 0\.\d+\}", capsys.readouterr().out)
