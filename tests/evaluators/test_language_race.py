"""Language models that race: what is measured in parts is what is measured as a whole, or is refused."""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_tokenizers import WORDS

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import Context, Outcomes, read_scoring
from mecha_exp.evaluation.racing import Order
from mecha_exp.evaluators.harness.tasks import LoadedTasks, load_tasks

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

ALPHAS = ("0.0", "0.1", "0.5", "3.0", "6.0")


@pytest.fixture
def command(llamas: list[Path], line_of_models) -> Callable[..., dict[str, dict[str, str]]]:
    """Runs a sweep between two Llamas in this process; returns the rows of its table by alpha."""
    return partial(line_of_models, *llamas, f"alpha={','.join(ALPHAS)}")


def measured(folder: Path, name: str, examples: Mapping[str, list[int]] | None = None, **settings):
    """What an evaluator measures of a saved model, or of some examples."""
    weights = load_file(folder / "model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    context = Context(inputs={"a": folder})
    read = read_scoring({"name": name, "device": "cpu", **settings}, shapes, context=context)
    evaluation = read.evaluations[0] if examples is None else read.evaluations[0].among(examples)
    return read.measure_one(evaluation, weights, context)


def some(outcomes: Outcomes, part: Mapping[str, list[int]]) -> Outcomes:
    """The outcomes of a part of the examples."""
    return Outcomes.checked_before(
        {task: outcomes.values[task][places] for task, places in part.items()},
        {task: outcomes.examples[task][places] for task, places in part.items()},
        {task: outcomes.clusters[task][places] for task, places in part.items()},
    )


NUMBERS = {
    "bits_per_byte",
    "perplexity",
    "word_perplexity",
    "score",
    "word_choice/acc",
    "word_choice/acc_norm",
}


def numbers(rows: Mapping[str, Mapping[str, str]], alpha: str) -> dict[str, str]:
    """What was measured of a point, with all digits."""
    return {name: value for name, value in rows[alpha].items() if name in NUMBERS}


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Documents of one to thirty words."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS.split(), k=draw.randint(1, 30))) for _ in range(128)]
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "source": i // 2}) for i, text in enumerate(texts)))
    return path


@pytest.mark.parametrize("settings", [{}, {"cluster": "source", "limit": 101, "length": 8, "stride": 3}])
def test_documents_in_a_part_have_the_bits_that_they_have_among_all(llamas, documents: Path, settings):
    asked = {"data": str(documents), **settings}
    whole = measured(llamas[0], "perplexity", **asked).outcomes
    order = Order.of(whole, 0)
    part = order.part(3, 20)

    assert measured(llamas[0], "perplexity", part, **asked).outcomes.equals(some(whole, part))


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many windows go through a model."""
    from mecha_exp.evaluators import perplexity

    counted: Counter[str] = Counter()
    nats = perplexity._nats

    def counting(module, batch):
        counted["windows"] += len(batch)
        return nats(module, batch)

    monkeypatch.setattr(perplexity, "_nats", counting)
    return counted


def test_models_race_by_the_bits_of_documents(command, documents: Path, windows: Counter[str]):
    evaluator = ("evaluator=perplexity", f"evaluator.data={documents}")
    whole = command(*evaluator, "store=null", to="whole")
    of_all = windows.pop("windows")

    race = command(*evaluator, "evaluator.race=true", to="race")

    left = [alpha for alpha, row in race.items() if row["status"] == "FINISHED"]
    assert "0.5" in left and {race[alpha]["status"] for alpha in ("3.0", "6.0")} == {"DROPPED"}
    assert race["0.5"]["race/examples"] == "128.0" and float(race["6.0"]["race/examples"]) < 64
    for alpha in left:
        assert numbers(race, alpha) == numbers(whole, alpha) and len(numbers(race, alpha)) == 3
    examples = sum(float(row["race/examples"]) for row in race.values())
    assert windows["windows"] == examples + 2 * 128  # of each document once, and of the two inputs
    assert windows["windows"] < of_all


def test_without_a_store_the_leader_is_measured_once_all_the_same(command, documents: Path, windows):
    evaluator = ("evaluator=perplexity", f"evaluator.data={documents}", "evaluator.race=true")

    with_store = command(*evaluator, to="one")
    of_one = windows.pop("windows")
    without = command(*evaluator, "store=null", to="other")

    assert {alpha: numbers(with_store, alpha) for alpha in ALPHAS} == {
        alpha: numbers(without, alpha) for alpha in ALPHAS
    }
    assert windows["windows"] - of_one == 8  # the first look at the leader, which nothing keeps


def test_a_race_that_was_interrupted_goes_on_with_what_is_kept(command, documents: Path, monkeypatch):
    from mecha_exp.evaluators import perplexity

    evaluator = ("evaluator=perplexity", f"evaluator.data={documents}", "evaluator.race=true")
    nats, asked = perplexity._nats, []

    def interrupted(module, batch):
        asked.append(batch)
        if len(asked) == 2 * 128 + 70:  # in the race, after the inputs
            raise KeyboardInterrupt
        return nats(module, batch)

    monkeypatch.setattr(perplexity, "_nats", interrupted)
    with pytest.raises((KeyboardInterrupt, AssertionError)):  # the status of an interrupt is not 0
        command(*evaluator, to="race")

    rows = command(*evaluator, to="race")

    assert len(asked) - 1 == 2 * 128 + sum(float(row["race/examples"]) for row in rows.values())


def expected_answers(folder: Path, word_task: Callable[..., Path]) -> list[int]:
    """The choice that a model makes in each example of the task."""
    hits = [
        measured(folder, "lm_eval", tasks=["word_choice"], include_path=str(word_task(gold=gold)))
        for gold in range(3)
    ]
    return np.stack([hit.outcomes.values["word_choice"] for hit in hits]).argmax(axis=0).tolist()


@pytest.fixture
def easy_task(llamas, word_task) -> Path:
    """A task of 160 examples in which the first model is always right."""
    folder = word_task(count=160)
    answers = expected_answers(llamas[0], lambda gold: word_task(count=160, gold=gold))
    lines = [json.loads(line) for line in (folder / "words.jsonl").read_text().splitlines()]
    changed = [{**line, "gold": answer} for line, answer in zip(lines, answers, strict=True)]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, changed)))
    return folder


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many requests of the harness go through a model."""
    from lm_eval.models.huggingface import HFLM

    counted: Counter[str] = Counter()
    asked = HFLM._loglikelihood_tokens

    def counting(self, requests, *more, **settings):
        counted["requests"] += len(requests)
        return asked(self, requests, *more, **settings)

    monkeypatch.setattr(HFLM, "_loglikelihood_tokens", counting)
    return counted


def test_models_race_by_the_examples_of_tasks(command, easy_task: Path, requests: Counter[str]):
    evaluator = ("evaluator=lm_eval", "evaluator.tasks=[word_choice]", f"evaluator.include_path={easy_task}")
    whole = command(*evaluator, "store=null", to="whole")
    of_all = requests.pop("requests")

    race = command(*evaluator, "evaluator.race=true", to="race")

    assert race["0.0"]["status"] == "FINISHED" and race["6.0"]["status"] == "DROPPED"
    assert float(race["6.0"]["race/examples"]) < 80 and race["0.0"]["race/examples"] == "160.0"
    assert numbers(race, "0.0") == numbers(whole, "0.0") and len(numbers(race, "0.0")) == 3
    examples = [float(row["race/examples"]) for row in race.values()]
    assert requests["requests"] == 3 * (sum(examples) + 2 * 160)  # each once, and the two inputs
    assert requests["requests"] < of_all


FEWSHOT = {"test_split: test": "test_split: test\nfewshot_split: test"}
GENERATE = {
    "output_type: multiple_choice": "output_type: generate_until",
    'doc_to_choice: "{{choices}}"\n': "generation_kwargs: {until: [park], max_gen_toks: 4}\n",
    'doc_to_target: "{{gold}}"': "doc_to_target: 'yes'",
    "  - {metric: acc, aggregation: mean, higher_is_better: true}\n": "",
    "metric: acc_norm": "metric: exact_match",
}


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ({}, {}),
        ({}, {"limit": 13, "batch_size": 4, "score": "acc_norm"}),
        ({}, {"num_fewshot": 2}),
        (FEWSHOT, {"num_fewshot": 2}),
        (GENERATE, {}),
        ({}, {"backend": "hf-auto"}),
    ],
    ids=["all", "batches", "few-shot", "few-shot of other examples", "generation", "another backend"],
)
def test_examples_of_a_task_have_the_values_in_a_part_that_they_have_among_all(
    llamas, word_task, task: dict[str, str], settings: dict[str, object]
):
    asked = {"tasks": ["word_choice"], "include_path": str(word_task(task)), "race": True, **settings}
    whole = measured(llamas[0], "lm_eval", **asked).outcomes
    part = {"word_choice": [1, 2, 5, 11]}

    assert measured(llamas[0], "lm_eval", part, **asked).outcomes.equals(some(whole, part))


def test_a_part_has_the_tasks_of_its_examples_alone(llamas, word_task, requests: Counter[str]):
    folder = word_task()
    again = (folder / "word_choice.yaml").read_text().replace("task: word_choice", "task: again")
    (folder / "again.yaml").write_text(again)
    (folder / "both.yaml").write_text(
        "group: both\ntask: [word_choice, again]\naggregate_metric_list: [{metric: acc}]"
    )
    asked = {"tasks": ["both"], "include_path": str(folder), "race": True}
    whole = measured(llamas[0], "lm_eval", **asked)
    requests.clear()
    part = {"again": [3, 18]}

    assert measured(llamas[0], "lm_eval", part, **asked).outcomes.equals(some(whole.outcomes, part))
    assert requests["requests"] == 2 * 3  # choices
    assert "both/acc" in whole.metrics and list(whole.outcomes.values) == ["word_choice", "again"]


def prompts(tasks: LoadedTasks, **settings: object) -> dict[int, object]:
    """The requests of each example of the task with two few-shot examples."""
    from lm_eval import simple_evaluate
    from lm_eval.models.dummy import DummyLM

    model = DummyLM()
    model.tokenizer = None  # which it would fetch
    report = simple_evaluate(
        model, tasks=["word_choice"], task_manager=tasks, num_fewshot=2, bootstrap_iters=0, **settings
    )
    return {sample["doc_id"]: sample["arguments"] for sample in report["samples"]["word_choice"]}


@pytest.mark.parametrize("task", [{}, FEWSHOT], ids=["any examples", "other examples"])
@pytest.mark.parametrize("kinds", [20, 3], ids=["different", "with copies, of which more are drawn"])
def test_few_shot_examples_are_those_that_are_drawn_among_all(word_task, task: dict[str, str], kinds: int):
    folder = word_task(task)
    lines = (folder / "words.jsonl").read_text().splitlines()
    (folder / "words.jsonl").write_text("\n".join((lines[:kinds] * 7)[:20]))
    loaded = load_tasks(["word_choice"], str(folder), offline=True)
    part = {"word_choice": [3, 4, 9, 17]}

    whole = prompts(loaded)

    assert prompts(loaded.among(part), samples=part) == {place: whole[place] for place in part["word_choice"]}
    assert prompts(loaded, samples=part) != {place: whole[place] for place in part["word_choice"]}


@pytest.mark.parametrize("num_fewshot", [None, 2])  # None was kept as 0, which no later number changes
def test_a_setting_of_one_measurement_does_not_stay_for_the_next(llamas, word_task, num_fewshot):
    asked = {"tasks": ["word_choice"], "include_path": str(word_task(GENERATE))}
    loaded = load_tasks(["word_choice"], asked["include_path"], offline=True)
    before = dict(loaded.tasks["word_choice"].config.generation_kwargs)

    measured(llamas[0], "lm_eval", num_fewshot=num_fewshot, gen_kwargs={"max_gen_toks": 1}, **asked)

    assert load_tasks(["word_choice"], asked["include_path"], offline=True) is loaded
    assert loaded.tasks["word_choice"].config.num_fewshot is None
    assert loaded.tasks["word_choice"].config.generation_kwargs == before


ACC = "{metric: acc, aggregation: mean, higher_is_better: true}"
F1 = {
    ACC: "{metric: f1, aggregation: f1, higher_is_better: true}",
    "{{choices}}": "{{choices[:2]}}",
    "{{gold}}": "{{gold % 2}}",
}
ROLLING = {
    "output_type: multiple_choice": "output_type: loglikelihood_rolling",
    'doc_to_text: "{{question}}"': 'doc_to_text: ""',
    'doc_to_choice: "{{choices}}"\n': "",
    'doc_to_target: "{{gold}}"': 'doc_to_target: "{{question}}"',
    ACC: "{metric: word_perplexity}",
    "  - {metric: acc_norm, aggregation: mean, higher_is_better: true}\n": "",
}


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (
            F1,
            {},
            "the task 'word_choice' counts f1, which is computed of all examples together (f1_score): points "
            "race by the mean of a value for each example. Choose acc_norm with evaluator.score, or leave "
            "evaluator.race out.",
        ),
        (
            {**GENERATE, "metric: exact_match, aggregation: mean": "metric: bleu, aggregation: bleu"},
            {},
            "the task 'word_choice' counts bleu, which is computed of all examples together (bleu): points "
            "race by the mean of a value for each example. Leave out the task, or leave evaluator.race out.",
        ),
        (
            ROLLING,
            {},
            "the task 'word_choice' counts word_perplexity, which is computed of all examples together "
            "(weighted_perplexity): points race",
        ),
        (
            GENERATE,
            {"gen_kwargs": {"do_sample": True, "temperature": 0.7}},
            "the task 'word_choice' draws its answers at random, which differ when fewer examples are asked. "
            "Use 'evaluator.gen_kwargs={do_sample: false, temperature: 0}', or leave evaluator.race out.",
        ),
        (
            {'doc_to_text: "{{question}}"': 'doc_to_text: "{{question}} {{range(999)|random}}"'},
            {},
            "the task 'word_choice' asks for its example 1 in other words when others are left out: its "
            "prompts depend on the examples before. Leave out the task, or leave evaluator.race out.",
        ),
        (
            {'doc_to_text: "{{question}}"': 'doc_to_text: "{{question if gold != 2 else 1 // 0}}"'},
            {},
            "the task 'word_choice' cannot be tried without a model: ZeroDivisionError: ",
        ),
    ],
    ids=["f1", "bleu", "pooled perplexity", "sampling", "random prompts", "an error"],
)
def test_a_task_that_cannot_race_is_refused_before_anything_is_merged(
    llamas, word_task, task: dict[str, str], settings: dict[str, object], message: str
):
    asked = {"tasks": ["word_choice"], "include_path": str(word_task(task)), **settings}

    with pytest.raises(ConfigError) as refused:
        measured(llamas[0], "lm_eval", race=True, **asked)

    assert f"evaluator.race=true: {message}" in str(refused.value)


def test_of_a_task_with_f1_the_other_metric_can_race(llamas, word_task):
    asked = {"tasks": ["word_choice"], "include_path": str(word_task(F1)), "score": "acc_norm", "race": True}

    assert measured(llamas[0], "lm_eval", {"word_choice": [2]}, **asked).outcomes is not None
