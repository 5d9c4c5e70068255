"""Classifiers of texts on GLUE-like tasks give the numbers of scikit-learn on transformers' predictions."""

import csv
import json
import random
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from tiny_tokenizers import SMALL, WORDS, write_tokenizer

from mecha_exp import Context, EvaluationError, Job, merge_many, weighted_sum
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import read_scoring

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

HEADS = {"rte": 2, "mrpc": 2, "cola": 2, "stsb": 1, "mnli": 3}
PAIRS = {"rte", "mrpc", "stsb", "mnli"}


def write_rows(path: Path, task: str, seed: int) -> list[dict[str, object]]:
    draw, outputs, rows = random.Random(seed), HEADS[task], []
    for _ in range(24):
        texts = [" ".join(draw.choices(WORDS.split(), k=draw.randint(2, 7))) for _ in range(2)]
        label = draw.random() * 5 if outputs == 1 else draw.randrange(outputs)
        names = {"mnli": ("premise", "hypothesis"), "cola": ("sentence",)}.get(
            task, ("sentence1", "sentence2")
        )
        rows.append({**dict(zip(names, texts, strict=False)), "label": label})
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return rows


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classifiers, their merge, frozen heads, and rows of five tasks on two splits."""
    folder = tmp_path_factory.mktemp("glue")
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        config = transformers.BertConfig(
            vocab_size=40, max_position_embeddings=32, initializer_range=0.5, num_labels=2, **SMALL
        )
        transformers.BertForSequenceClassification(config).save_pretrained(folder / name)
        write_tokenizer(folder / name)
    merge_many([Job(weighted_sum(folder / "a", folder / "b", alpha=0.3), folder / "merged")])
    (folder / "heads").mkdir()
    for split in ("validation", "test"):
        (folder / split).mkdir()
    for seed, (task, outputs) in enumerate(HEADS.items()):
        torch.manual_seed(50 + seed)
        head = {"classifier.weight": torch.randn(outputs, 16), "classifier.bias": torch.zeros(outputs)}
        save_file(head, folder / f"heads/{task}.safetensors")
        suffix = "csv" if seed % 2 else "jsonl"
        for part, split in enumerate(("validation", "test")):
            write_rows(folder / split / f"{task}.{suffix}", task, seed + 10 * part)
    return folder


def scoring_of(root: Path, context: Context | None = None, weights=None, **settings):
    weights = weights or load_file(root / "merged/model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    context = context or Context(inputs={"a": root / "a", "b": root / "b"})
    asked = {"name": "text_classification", "device": "cpu", **settings}
    return read_scoring(asked, shapes, context=context), weights, context


def measured(root: Path, split: str = "validation", **settings):
    scoring, weights, context = scoring_of(root, **settings)
    scoring = scoring.on(split) if split == "test" else scoring
    return scoring.measure_one(scoring.evaluations[0], weights, context)


def predictions(root: Path, task: str, split: str, *, own_head: bool = False):
    """The logits of transformers on the saved merge, one example at a time, and the labels."""
    model = transformers.BertForSequenceClassification.from_pretrained(
        root / "merged", num_labels=2 if own_head else HEADS[task], ignore_mismatched_sizes=True
    ).eval()
    if not own_head:
        model.load_state_dict(load_file(root / f"heads/{task}.safetensors"), strict=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "a")
    (path,) = (root / split).glob(f"{task}.*")
    if path.suffix == ".csv":
        rows = list(csv.DictReader(path.open()))
    else:
        rows = list(map(json.loads, path.read_text().splitlines()))
    logits = []
    for row in rows:
        texts = [value for name, value in row.items() if name != "label"]
        with torch.no_grad():
            logits.append(model(**tokenizer(*texts, return_tensors="pt")).logits[0].numpy())
    return np.stack(logits), np.array([float(row["label"]) for row in rows])


@pytest.mark.parametrize("split", ["validation", "test"])
def test_each_task_has_the_metrics_of_glue_as_its_libraries_compute_them(root: Path, split: str, beside):
    folders = {"data": str(root / "validation"), "test": str(root / "test"), "heads": str(root / "heads")}

    from sklearn import metrics

    numbers = measured(root, split, **folders, tasks=list(HEADS), batch_size=5).metrics

    expected = {}
    for task in HEADS:
        logits, labels = predictions(root, task, split)
        answers = logits.argmax(1)
        if task == "stsb":
            expected["stsb/pearson"] = stats.pearsonr(labels, logits[:, 0]).statistic
            expected["stsb/spearman"] = stats.spearmanr(labels, logits[:, 0]).statistic
        elif task == "cola":
            expected["cola/mcc"] = metrics.matthews_corrcoef(labels, answers)
        else:
            expected[f"{task}/accuracy"] = metrics.accuracy_score(labels, answers)
        if task == "mrpc":
            expected["mrpc/f1"] = metrics.f1_score(labels, answers)
    for name, value in expected.items():
        beside("text_classification", f"{split}: {name}", numbers[name], value)
    scores = {task: np.mean([v for n, v in expected.items() if n.startswith(f"{task}/")]) for task in HEADS}
    assert {name: numbers[f"score/{name}"] for name in scores} == pytest.approx(scores, rel=1e-5)
    assert numbers["score"] == pytest.approx(np.mean(list(scores.values())), rel=1e-5)


def test_accuracy_has_a_hit_or_a_miss_for_each_row(root: Path):
    tasks = {task: {"data": str(next((root / "validation").glob(f"{task}.*")))} for task in ("rte", "mnli")}
    for task in tasks:
        tasks[task]["head"] = str(root / f"heads/{task}.safetensors")

    result = measured(root, tasks=tasks)

    for task in tasks:
        logits, labels = predictions(root, task, "validation")
        assert result.outcomes.values[task].tolist() == (logits.argmax(1) == labels).tolist()
    assert 0 < result.metrics["score"] < 1


def test_tasks_with_accuracy_alone_have_hits_beside_tasks_without(root: Path):
    settings = {"data": str(root / "validation"), "heads": str(root / "heads")}

    alone = measured(root, **settings, tasks=["rte", "mnli"])
    mixed = measured(root, **settings, tasks=["rte", "cola", "mnli", "mrpc"])

    assert mixed.outcomes is None
    assert list(mixed.further) == ["score/rte", "score/mnli"]
    for task in ("rte", "mnli"):
        assert mixed.further[f"score/{task}"].equals(alone.outcomes.of_task(task))
        assert mixed.metrics[f"score/{task}"] == alone.metrics[f"score/{task}"]


def test_some_rows_are_classified_as_among_all(root: Path):
    settings = {"data": str(root / "validation"), "heads": str(root / "heads"), "tasks": ["rte", "mnli"]}
    scoring, weights, context = scoring_of(root, **settings)
    (evaluation, *_), places = scoring.evaluations, [0, 7, 23]

    everything = evaluation.score(weights, context).outcomes
    some = evaluation.among({"mnli": places}).score(weights, context).outcomes

    assert list(some.values) == ["mnli"]
    assert some.values["mnli"].tolist() == everything.values["mnli"][places].tolist()
    assert some.examples["mnli"].tolist() == everything.examples["mnli"][places].tolist() == ["0", "7", "23"]


def test_points_race_by_the_rows_that_they_classify(root: Path, line_of_models):
    models = (root / "a", root / "b", "alpha=0.0,0.3,0.6,0.9,1.2,1.5")
    data = (f"evaluator.data={root / 'validation'}", f"evaluator.heads={root / 'heads'}")
    tasks = ("evaluator=text_classification", *data, "evaluator.tasks=[rte,mnli]")

    whole = line_of_models(*models, *tasks, "store=null", to="whole")
    race = line_of_models(*models, *tasks, "evaluator.race=halving", to="race")

    (left,) = (alpha for alpha, row in race.items() if row["status"] == "FINISHED")
    assert sorted(row["race/examples"] for row in race.values()) == ["12.0", *["4.0"] * 4, "48.0"]
    assert race[left]["score"] == whole[left]["score"] != ""


def test_tasks_that_are_measured_of_all_rows_together_do_not_race(root: Path):
    settings = {"data": str(root / "validation"), "heads": str(root / "heads"), "race": True}

    with pytest.raises(ConfigError) as refused:
        scoring_of(root, **settings, tasks=["rte", "mrpc"])

    assert str(refused.value) == (
        "evaluator.race=true: the task 'mrpc' is measured by f1, which is computed of all rows together: "
        "points race by the mean of a value for each row. Choose accuracy with evaluator.metrics, or leave "
        "evaluator.race out."
    )
    assert scoring_of(root, **settings, tasks=["rte", "mrpc"], metrics=["accuracy"])[0].race is not None


def test_points_are_not_reported_on_the_rows_by_which_they_are_chosen(root: Path):
    data = str(root / "validation")

    with pytest.raises(ConfigError) as refused:
        scoring_of(root, data=data, test=data, heads=str(root / "heads"), tasks=["rte"])

    assert "rte.jsonl: these examples are those by which points are chosen" in str(refused.value)


def test_the_own_head_of_a_model_and_labels_that_are_words(root: Path, tmp_path: Path):
    rows = list(map(json.loads, (root / "validation/rte.jsonl").read_text().splitlines()))
    words = [{**row, "label": f"LABEL_{row['label']}"} for row in rows]
    turned = [{**row, "label": "no" if row["label"] else "yes"} for row in rows]
    for name, listed in (("numbers", rows), ("words", words), ("turned", turned)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, listed)))
    columns = {"text": "sentence1", "text_pair": "sentence2"}

    by_numbers, by_words = (
        measured(root, data=str(tmp_path / f"{name}.jsonl"), **columns) for name in ("numbers", "words")
    )
    by_names = measured(root, data=str(tmp_path / "turned.jsonl"), **columns, labels=["yes", "no"], limit=10)

    logits, labels = predictions(root, "rte", "validation", own_head=True)
    assert by_numbers.outcomes.values["text"].tolist() == (logits.argmax(1) == labels).tolist()
    assert by_words.outcomes.equals(by_numbers.outcomes)
    assert by_names.outcomes.values["text"].tolist() == by_numbers.outcomes.values["text"][:10].tolist()


def test_a_head_of_two_layers_and_texts_that_are_too_long(tmp_path: Path):
    """RoBERTa's head has a dense layer, and its positions begin after that of the padding."""
    torch.manual_seed(3)
    config = transformers.RobertaConfig(
        vocab_size=40,
        max_position_embeddings=12,
        initializer_range=0.5,
        num_labels=2,
        pad_token_id=1,
        **SMALL,
    )
    whole = transformers.RobertaForSequenceClassification(config).eval()
    whole.save_pretrained(tmp_path / "a")
    write_tokenizer(tmp_path / "a")
    shapes = {
        "dense.weight": (16, 16),
        "dense.bias": (16,),
        "out_proj.weight": (3, 16),
        "out_proj.bias": (3,),
    }
    frozen = {f"classifier.{name}": torch.randn(shape) for name, shape in shapes.items()}
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS.split(), k=draw.randint(3, 20))) for _ in range(12)]
    listed = [json.dumps({"text": text, "label": place % 3}) for place, text in enumerate(texts)]
    (tmp_path / "mine.jsonl").write_text("\n".join(listed))
    weights = load_file(tmp_path / "a/model.safetensors")
    config.num_labels = 3
    model = transformers.RobertaForSequenceClassification(config).eval()
    model.load_state_dict({**weights, **frozen})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    logits = []
    for text in texts:
        with torch.no_grad():
            tokens = tokenizer(text, truncation=True, max_length=10, return_tensors="pt")
            logits.append(model(**tokens).logits[0])
    middle = torch.stack(logits).mean(0)  # moved by the bias, so that each class is an answer
    frozen["classifier.out_proj.bias"] -= middle
    save_file(frozen, tmp_path / "mine.safetensors")
    more = {"data": str(tmp_path / "mine.jsonl"), "tasks": ["mine"], "heads": str(tmp_path)}

    result = measured(tmp_path, context=Context(inputs={"a": tmp_path / "a"}), weights=weights, **more)

    answers = [int((one - middle).argmax()) for one in logits]
    assert result.outcomes.values["mine"].tolist() == [a == n % 3 for n, a in enumerate(answers)]
    assert len(set(answers)) > 1


def test_logits_that_are_nan_are_an_error_of_that_point(root: Path):
    weights = load_file(root / "merged/model.safetensors")
    weights["classifier.bias"] = torch.tensor([0.0, torch.nan])

    with pytest.raises(EvaluationError, match="the logits are NaN"):
        measured(root, weights=weights, data=str(root / "validation/rte.jsonl"), tasks=["rte"])


def test_a_head_that_changes_measures_anew(root: Path, tmp_path: Path):
    def key() -> str:
        tasks = {
            "rte": {"data": str(root / "validation/rte.jsonl"), "head": str(tmp_path / "head.safetensors")}
        }
        return scoring_of(root, tasks=tasks)[0].evaluations[0].key

    keys = []
    for value in (0.0, 1.0):
        head = {"classifier.weight": torch.full((2, 16), value), "classifier.bias": torch.zeros(2)}
        save_file(head, tmp_path / "head.safetensors")
        keys.append(key())
    assert keys[0] != keys[1]


def head(tmp_path: Path, tensors: dict[str, tuple[int, ...]]) -> dict[str, object]:
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "rte.safetensors")
    return {"heads": str(tmp_path)}


def rows(tmp_path: Path, **changes: object) -> dict[str, object]:
    row = {"sentence1": "the cat", "sentence2": "a dog", "label": 1, **changes}
    (tmp_path / "rte.jsonl").write_text(json.dumps(row))
    return {"data": str(tmp_path / "rte.jsonl")}


def large_tokenizer(root: Path, tmp_path: Path) -> dict[str, object]:
    (tmp_path / "config.json").write_text((root / "a/config.json").read_text())
    write_tokenizer(tmp_path, " ".join(f"word{n}" for n in range(50)))
    return {"model": str(tmp_path)}


BAD = [
    (lambda r, t: {"text": "sentence"}, "rte.jsonl has no column 'sentence'. Did you mean 'sentence2'"),
    (lambda r, t: {"label": "labels"}, "rte.jsonl has no column 'labels'. Did you mean 'label'?"),
    (
        lambda r, t: rows(t, label=2),
        "row 0: the label 2 is out of range: the head of 'rte' has 2 outputs, 0 to 1",
    ),
    (lambda r, t: rows(t, label=-1), "row 0: the label -1 is out of range"),
    (lambda r, t: rows(t, label=0.5), "row 0: the label 0.5 is out of range"),
    (lambda r, t: rows(t, label="maybe"), "is neither a number nor the name of an output (LABEL_0, LABEL_1)"),
    (lambda r, t: rows(t, sentence1=3), "the column 'sentence1' holds no text in row 0, but int"),
    (lambda r, t: head(t, {"classifier.weight": (2, 8), "classifier.bias": (2,)}), "the head of 'rte' in"),
    (
        lambda r, t: head(t, {"classifier.weight": (2, 8), "classifier.bias": (2,)}),
        "classifier.weight has shape [2, 8] instead of [2, 16]",
    ),
    (lambda r, t: head(t, {"head.weight": (2, 16)}), "head.weight has no place in the network"),
    (
        lambda r, t: head(t, {"classifier.weight": (2, 16), "bert.pooler.dense.weight": (16, 16)}),
        "has bert.pooler.dense.weight, which is part of the encoder",
    ),
    (
        lambda r, t: head(t, {"classifier.bias": (2,)}),
        "holds no head: expected tensors such as classifier.weight",
    ),
    (lambda r, t: {"heads": str(r)}, "evaluator.tasks.rte: its head"),
    (
        lambda r, t: {"metrics": ["acuracy"]},
        "evaluator.metrics: unknown metric 'acuracy'. Did you mean 'accuracy'",
    ),
    (
        lambda r, t: {"metrics": ["pearson"]},
        "is measured by pearson, and its head has 2 outputs: choose of accuracy",
    ),
    (lambda r, t: {"labels": ["a"]}, "evaluator.labels: 1 names for the 2 outputs of the head of 'rte'"),
    (
        lambda r, t: {"tasks": {"rte": {"dta": "x"}}},
        "evaluator.tasks.rte.dta: a task has no such setting. Did you",
    ),
    (
        lambda r, t: {"tasks": {"rte": {"data": "gone.csv"}}},
        "evaluator.tasks.rte.data: gone.csv does not exist",
    ),
    (
        lambda r, t: {"tasks": ["sst2"], "data": str(r / "test")},
        "has no folder 'sst2', and no file sst2.jsonl",
    ),
    (lambda r, t: {"data": None}, "evaluator.tasks.rte.data: name a file with the rows of 'rte'"),
    (lambda r, t: {"tasks": ["rte", "wnli"]}, "evaluator.tasks: rte and wnli have the same rows, "),
    (lambda r, t: {"tasks": []}, "evaluator.tasks: name at least one task"),
    (lambda r, t: {"length": 33}, "evaluator.length=33: the model takes 32 tokens at most"),
    (lambda r, t: {"limit": 0}, "evaluator.limit: expected a number above 0, got 0"),
    (large_tokenizer, "has 53 tokens, and bert.embeddings.word_embeddings.weight of the model has 40 rows"),
    (
        lambda r, t: {
            **head(t, {"classifier.weight": (2, 16), "classifier.bias": (2,)}),
            **rows(t, label="LABEL_1"),
        },
        "nor the name of an output (none is known)",
    ),
]


@pytest.mark.parametrize(("more", "message"), BAD)
def test_what_does_not_fit_is_said_before_anything_is_merged(root: Path, tmp_path: Path, more, message: str):
    settings = {"data": str(root / "validation/rte.jsonl"), "tasks": ["rte"], **more(root, tmp_path)}

    with pytest.raises(ConfigError) as error:
        scoring_of(root, **settings)

    assert message in str(error.value)


@pytest.mark.heavy
def test_the_command_of_the_page_runs(root: Path, tmp_path: Path, as_a_user):
    page = (Path(__file__).parents[2] / "docs/evaluators-language.md").read_text()
    (command,) = re.findall(r"^python -m mecha_exp (experiment=glue .*)$", page, re.MULTILINE)
    for name, source in (("bert", "a"), ("rte", "b"), ("mrpc", "merged")):
        shutil.copytree(root / source, tmp_path / name)
    for part in ("validation", "test", "heads"):
        shutil.copytree(root / part, tmp_path / "glue" / part)
    fewer = ["recipe=task_arithmetic", "alpha=0.5,1.0", "tracking=none", "evaluator.device=cpu"]

    outcome = as_a_user(*shlex.split(command), *fewer, cwd=tmp_path)

    assert outcome.status == 0, outcome.err
    paths = (tmp_path / "outputs/multiruns").glob("*/*/run.json")
    numbers = [json.loads(path.read_text())["metrics"] for path in paths]
    assert len(numbers) == 2
    assert all({"score", "score/rte", "score/mrpc", "mrpc/f1"} <= set(one) for one in numbers)
    assert sum("test/score" in one for one in numbers) == 1
