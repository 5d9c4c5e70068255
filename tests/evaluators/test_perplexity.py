"""Bits per byte of documents: each token is predicted once, and the numbers are those of lm_eval."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_tokenizers import WORDS, write_tokenizer

from mecha_exp.errors import ConfigError, EvaluationError
from mecha_exp.evaluation import Context, read_scoring
from mecha_exp.evaluators.perplexity import windows

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours
DOCUMENTS = ["the cat sat on the mat", "blue sky", "a big dog ran in the green park " * 5, "ice is cold 雪"]
ROLLING = """
task: documents
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
"""


@given(
    ids=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    length=st.integers(1, 8),
    step=st.integers(1, 8),
)
def test_each_token_is_predicted_once_from_those_before_it(ids: list[int], length: int, step: int):
    stride = min(step, length)
    predicted: list[int] = []
    for inputs, targets in windows(ids, 0, length, stride):
        place = len(predicted) + len(targets)
        before = [0, *ids][:place]
        assert inputs == before[-len(inputs) :]
        assert len(targets) <= len(inputs) <= length
        assert len(inputs) == min(length, place)
        predicted += targets
    assert predicted == ids


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    rows = [{"text": text, "source": f"site{i % 2}"} for i, text in enumerate(DOCUMENTS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def scoring(folder: Path, data: Path, **settings):
    weights = load_file(folder / "model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    asked = {"name": "perplexity", "data": str(data), "device": "cpu", **settings}
    context = Context(inputs={"a": folder})
    return read_scoring(asked, shapes, context=context), weights, context


def measured(folder: Path, data: Path, **settings):
    read, weights, context = scoring(folder, data, **settings)
    return read.measure_one(read.evaluations[0], weights, context)


@pytest.mark.libraries
def test_disjoint_windows_give_the_numbers_of_lm_eval(llamas, documents: Path, tmp_path: Path, beside):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    (tmp_path / "documents.yaml").write_text(ROLLING.replace("DATA", str(documents)))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    arguments = {"pretrained": str(llamas[0]), "max_length": 8}
    report = lm_eval.simple_evaluate(
        "hf", arguments, ["documents"], task_manager=manager, bootstrap_iters=0, device="cpu"
    )

    ours = measured(llamas[0], documents, length=8, stride=8, batch_size=3).metrics

    theirs = report["results"]["documents"]
    for metric in ("bits_per_byte", "word_perplexity"):
        beside("perplexity", metric, ours[metric], theirs[f"{metric},none"])


@pytest.mark.libraries
@pytest.mark.parametrize("batch_size", [1, 4])
def test_strided_windows_give_what_transformers_computes(llamas, documents: Path, batch_size: int):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(llamas[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(llamas[0])
    nats = [0.0] * len(DOCUMENTS)
    for number, text in enumerate(DOCUMENTS):
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
        for place in range(1, len(ids)):  # a window of its own for each token
            end = 8 if place < 8 else 8 + math.ceil((place - 8) / 3) * 3
            inputs = torch.tensor([ids[max(0, min(end, len(ids) - 1) - 8) : place]])
            with torch.no_grad():
                nats[number] -= float(model(inputs).logits[0, -1].log_softmax(-1)[ids[place]])
    sizes = [len(text.encode()) for text in DOCUMENTS]

    ours = measured(llamas[0], documents, length=8, stride=3, batch_size=batch_size)

    assert ours.metrics["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / sum(sizes), rel=1e-5)
    bits = ours.outcomes.values["text"] * (sum(sizes) / len(sizes))
    assert bits.tolist() == pytest.approx([value / math.log(2) for value in nats], rel=1e-5)


@pytest.mark.libraries
def test_documents_of_every_kind_of_file_measure_alike(llamas, documents: Path, tmp_path: Path):
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in documents.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "documents.parquet")
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (texts / f"{number}.txt").write_text(text)
    pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(tmp_path / "saved")

    paths = (documents, tmp_path / "documents.parquet", texts, tmp_path / "saved")
    values = [measured(llamas[0], path).metrics for path in paths]

    assert all(dict(value) == dict(values[0]) for value in values)


@pytest.mark.libraries
def test_there_are_splits_where_there_is_a_second_file(llamas, documents: Path):
    assert scoring(llamas[0], documents)[0].report_split is None
    other = documents.with_name("other.txt")
    other.write_text("the dog sat in the park")
    read, *_ = scoring(llamas[0], documents, test=str(other))
    assert (read.selection_split, read.report_split) == ("validation", "test")


@pytest.mark.libraries
@pytest.mark.parametrize("share", [slice(None), slice(2)])
def test_points_are_not_reported_on_the_documents_by_which_they_are_chosen(llamas, documents: Path, share):
    copied = documents.with_name("copied.jsonl")
    copied.write_text("\n".join(documents.read_text().splitlines()[share]))

    with pytest.raises(ConfigError) as error:
        scoring(llamas[0], documents, test=str(copied))

    assert "copied.jsonl: these examples are those by which points are chosen" in str(error.value)


@pytest.mark.libraries
def test_documents_of_one_source_are_a_cluster(llamas, documents: Path):
    outcomes = measured(llamas[0], documents, cluster="source", limit=3).outcomes

    assert outcomes.clusters["text"].tolist() == ["site0", "site1", "site0"]
    assert outcomes.examples["text"].tolist() == ["0", "1", "2"]


@pytest.mark.libraries
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"column": "txt"}, "documents.jsonl has no column 'txt'. Did you mean 'text'?"),
        ({"cluster": "site"}, "documents.jsonl has no column 'site'."),
        ({"limit": 0}, "evaluator.limit: expected a number above 0, got 0"),
        ({"length": 65}, "evaluator.length=65: the model takes 64 tokens at most"),
        ({"length": 8, "stride": 9}, "evaluator.stride=9: expected at most the length of a window, 8"),
        ({"test": "gone.txt"}, "evaluator.test: gone.txt does not exist"),
        ({"data": "gone.txt"}, "evaluator.data: gone.txt does not exist"),
        ({"batch_size": "auto"}, "evaluator.batch_size: expected a whole number, got 'auto'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_merged(settings, message: str, llamas, documents: Path):
    with pytest.raises(ConfigError) as error:
        scoring(llamas[0], **{"data": documents, **settings})

    assert message in str(error.value)


@pytest.mark.libraries
def test_a_tokenizer_that_does_not_fit_is_an_error_before(llamas, documents: Path, tmp_path: Path):
    copy = shutil.copytree(llamas[0], tmp_path / "copy")
    write_tokenizer(copy, " ".join([WORDS, *(f"word{i}" for i in range(40))]))

    with pytest.raises(
        ConfigError, match=r"has 65 tokens, and model\.embed_tokens\.weight of the model has 40"
    ):
        scoring(copy, documents)


@pytest.mark.libraries
def test_logits_that_are_nan_are_an_error_for_that_model(llamas, documents: Path):
    read, weights, context = scoring(llamas[0], documents)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], math.nan)

    with pytest.raises(EvaluationError, match="the evaluator 'perplexity': the logits are NaN"):
        read.measure_one(read.evaluations[0], weights, context)
    assert measured(llamas[0], documents).metrics["perplexity"] > 1
