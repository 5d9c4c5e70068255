"""From a command to a report: an alpha line between two language models, measured by the library."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tiny_tokenizers import WORDS

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours


@pytest.fixture
def command(llamas, word_task, tmp_path: Path) -> list[str]:
    for name, folder in zip("ab", llamas, strict=True):
        shutil.copytree(folder, tmp_path / name)
    word_task()
    models = ["models.base=a", "models.experts=[b]", "tracking=none"]
    tasks = ["evaluator.tasks=[word_choice]", "evaluator.include_path=tasks", "evaluator.limit=null"]
    return ["experiment=llm_alpha", *models, *tasks, "evaluator.device=cpu"]


def test_three_alphas_from_command_to_report(command: list[str], llamas, tmp_path: Path, as_a_user):
    import pandas
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    sweep = ["alpha=0.0,0.5,1.0", "hydra.sweep.dir=sweep", "name=mine", "-m"]
    outcome = as_a_user(*command, *sweep, cwd=tmp_path)

    assert outcome.status == 0, outcome.err
    assert "Generating" not in outcome.err  # the libraries' own bars
    assert "score" in outcome.out
    page = (tmp_path / "sweep/report.html").read_text()
    assert "word_choice/acc_norm" in page
    outcomes = pandas.read_parquet(tmp_path / "sweep/outcomes.parquet")
    for alpha, folder in (("0.0", llamas[0]), ("1.0", llamas[1])):
        manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
        arguments = {"pretrained": str(folder)}
        report = simple_evaluate(
            "hf", arguments, ["word_choice"], task_manager=manager, bootstrap_iters=0, device="cpu"
        )
        theirs = [sample["acc"] for sample in report["samples"]["word_choice"]]
        point = outcomes[(outcomes["role"] == "point") & (outcomes["name"].str.contains(alpha))]
        assert point["value"].tolist() == theirs

    again = as_a_user(*command, *sweep, cwd=tmp_path)
    assert again.status == 0, again.err


def test_a_plan_says_what_is_wrong_with_the_evaluator(command: list[str], tmp_path: Path, as_a_user):
    single = [word for word in command if not word.startswith("experiment=")]
    chosen = ["recipe=weighted_sum", "evaluator=lm_eval", "evaluator.score=f1"]

    outcome = as_a_user("plan", *single, *chosen, cwd=tmp_path)

    assert outcome.status == 1
    assert "evaluator.score=f1: the task word_choice has no such metric. Known: acc, acc_norm." in outcome.err
    assert "Traceback" not in outcome.err


def test_the_commands_of_the_documentation_run(llamas, tmp_path: Path, as_a_user):
    page = (Path(__file__).parents[2] / "docs/evaluators-language.md").read_text()
    (task,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^```bash\npython -m mecha_exp (.*?)^```", page, re.MULTILINE | re.DOTALL)
    for name, folder in zip(("model_a", "model_b"), llamas, strict=True):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/colours.yaml").write_text(task)
    rows = [{"question": "sky is", "choices": ["blue", "green"], "answer": 0}] * 3
    (tmp_path / "tasks/colours.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "documents.jsonl").write_text("\n".join([json.dumps({"text": WORDS})] * 3))

    of_models = [command for command in commands if "model_a" in command]
    assert len(of_models) == 2
    for command in of_models:
        outcome = as_a_user(*shlex.split(command), "tracking=none", cwd=tmp_path)
        assert outcome.status == 0, outcome.err
