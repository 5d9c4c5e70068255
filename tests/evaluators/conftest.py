"""Tiny models of transformers with their tokenizers, in folders as the library saves them."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from outcome import Outcome
from tiny_tokenizers import TASK, WORDS, write_llama


@pytest.fixture(scope="session")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two Llamas of random weights, large enough that they answer differently."""
    root = tmp_path_factory.mktemp("llamas")
    return [write_llama(root / f"llama{seed}", seed) for seed in (1, 2)]


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two pipelines of diffusers, what is merged of them, and a CLIP."""
    from tiny_vision import save_clip, save_pipeline

    from mecha_exp import Job, merge_many, weighted_sum

    root = tmp_path_factory.mktemp("images")
    inputs = [save_pipeline(root / name, seed) for seed, name in enumerate("ab")]
    merge_many([Job(weighted_sum(*inputs, alpha=0.25), root / "merged")])
    save_clip(root / "clip", 9)  # of which some cosines are above 0
    return root


@pytest.fixture(scope="session")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classifiers, two CLIPs, what is merged of each, and pictures of two tasks."""
    import shutil

    from pictures import write_folders
    from tiny_vision import CLASSES, save_clip, save_vit

    from mecha_exp import Job, merge_many, weighted_sum

    root = tmp_path_factory.mktemp("vision")
    for name, save in (("vit", save_vit), ("clip", save_clip)):
        inputs = [save(root / f"{name}_{seed}", seed) for seed in (1, 2)]
        merge_many([Job(weighted_sum(*inputs, alpha=0.25), root / name)])
        (file,) = {"preprocessor_config.json"}
        shutil.copy(inputs[0] / file, root / name / file)
    for task in ("pets", "toys"):
        write_folders(root / "data" / task, CLASSES, 8, splits=("validation", "test"))
    return root


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], None]:
    """Puts a folder into a cache of the hub as a model of a name."""
    import shutil

    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(name: str, folder: Path) -> None:
        root = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        shutil.copytree(folder, root / "snapshots" / ("0" * 40))
        (root / "refs").mkdir()
        (root / "refs/main").write_text("0" * 40)

    return put


@pytest.fixture
def word_task(tmp_path: Path) -> Callable[..., Path]:
    """Writes a local task of lm_eval with its data; returns its folder."""

    def write(replace: dict[str, str] | None = None, *, count: int = 20, **changes: object) -> Path:
        draw = random.Random(0)
        documents = [
            {
                "question": " ".join(draw.choices(WORDS.split(), k=5)),
                "choices": draw.sample(WORDS.split(), 3),
                "gold": i % 3,
            }
            for i in range(count)
        ]
        folder = tmp_path / "tasks"
        folder.mkdir(exist_ok=True)
        lines = [json.dumps({**document, **changes}) for document in documents]
        (folder / "words.jsonl").write_text("\n".join(lines))
        text = TASK.replace("DATA", str(folder / "words.jsonl"))
        for old, new in (replace or {}).items():
            assert old in text
            text = text.replace(old, new)
        (folder / "word_choice.yaml").write_text(text)
        return folder

    return write


@pytest.fixture
def line_of_models(tmp_path: Path, app: Callable[..., Outcome]) -> Callable[..., dict[str, dict[str, str]]]:
    """Runs a sweep between two models in this process; returns the rows of its table by alpha."""
    from mecha_exp.report.export import CSV_FILE

    def run(first: Path, second: Path, *words: str, to: str) -> dict[str, dict[str, str]]:
        sweep = ["recipe=weighted_sum", f"models.base={first}", f"models.experts=[{second}]", "output=none"]
        more = ["evaluator.device=cpu", "evaluator.weight_stats=false", "tracking=none", "-m"]
        outcome = app(*sweep, *words, *more, f"hydra.sweep.dir={to}", cwd=tmp_path)
        assert outcome.status == 0, outcome.err
        with (tmp_path / to / CSV_FILE).open() as file:
            return {row["alpha"]: row for row in csv.DictReader(file) if row["alpha"]}

    return run


@pytest.fixture
def beside(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Asserts that a number is that of the library itself; `python -m bench.evaluator_numbers` lists both."""

    def compare(evaluator: str, number: str, ours: float, theirs: float, *, within: float = 1e-5) -> None:
        assert ours == pytest.approx(theirs, rel=within), number
        record_property("beside", json.dumps([evaluator, number, float(ours), float(theirs)]))

    return compare
