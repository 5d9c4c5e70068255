"""The numbers of each evaluator beside those of the library itself, on tiny models of random weights.

    python -m bench.evaluator_numbers --save      into bench/RESULTS.md

The tests that compare the two make models and data and note what they saw (`beside` in tests/evaluators).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from bench.report import as_for_users, machine, make_parser, publish, table

REPOSITORY = Path(__file__).parents[1]
TESTS = {
    "test_lm_eval.py::test_the_numbers_are_those_of_the_command_line": "`lm_eval --model hf`",
    "test_perplexity.py::test_disjoint_windows_give_the_numbers_of_lm_eval": "lm_eval, rolling task",
    "test_text_classification.py::test_each_task_has_the_metrics_of_glue_as_its_libraries_compute_them": (
        "transformers, scikit-learn, scipy"
    ),
    "test_vision.py::test_a_merged_classifier_scores_as_the_pipeline_of_transformers": (
        "transformers, image-classification"
    ),
    "test_vision.py::test_a_merged_clip_scores_as_the_zero_shot_pipeline": (
        "transformers, zero-shot-image-classification"
    ),
    "test_images.py::test_pictures_are_those_of_the_saved_pipeline_and_distances_follow": "diffusers, pixels",
    "test_image_scores.py::test_clip_scores_are_cosines_and_a_scorer_comes_first": "transformers",
    "test_image_scores.py::test_a_preference_is_the_cosine_times_the_scale_of_the_model": "transformers",
    "test_image_scores.py::test_aesthetic_scores_are_those_of_layers_over_normalised_features": (
        "transformers, torch"
    ),
    "test_forward.py::test_a_saved_merge_of_language_models_agrees_as_transformers_says": (
        "transformers, scipy"
    ),
}
"""The tests, each with the library that it compares with."""


def main() -> None:
    """Run the tests, and print what they saw."""
    options = make_parser(__doc__).parse_args()
    head = ["evaluator", "number", "measured", "by the library", "library"]
    text = f"{table([head, *rows()])}\n\n{machine()}."
    publish("Evaluators beside their libraries", text, save=options.save)


def rows() -> list[list[str]]:
    """What the tests saw, a row for each number."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        chosen = [f"tests/evaluators/{name}" for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-m", "", f"--junitxml={report}", *chosen]
        subprocess.run(command, check=True, cwd=REPOSITORY, env=as_for_users(), stdout=sys.stderr)
        cases = list(ElementTree.parse(report).iter("testcase"))
    listed = []
    for case in cases:
        name = case.attrib["name"].partition("[")[0]
        library = next(library for test, library in TESTS.items() if test.endswith(f"::{name}"))
        for noted in case.iter("property"):
            evaluator, number, ours, theirs = json.loads(noted.attrib["value"])
            listed.append([f"`{evaluator}`", number, f"{ours:.7g}", f"{theirs:.7g}", library])
    return listed


if __name__ == "__main__":
    main()
