"""The words that people type into the search of the documentation lead to the page that answers them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import ROOT

pytestmark = pytest.mark.heavy
SEARCHED = {
    "adamerging": "learned-weights.html",
    "automatic1111": "supermerger.html",
    "bibtex": "results.html",
    "block weights": "blocks.html",
    "comfyui": "comfyui.html",
    "confidence intervals": "verdict.html",
    "cuda": "troubleshooting.html",
    "dare": "methods.html",
    "docker": "troubleshooting.html",
    "fisher": "data.html",
    "fp8": "formats.html",
    "fusionbench": "vision.html",
    "gguf": "formats.html",
    "gpu": "gpu.html",
    "hf://": "remote.html",
    "holm": "verdict.html",
    "latex": "results.html",
    "lm-evaluation-harness": "evaluators-language.html",
    "lora": "lora.html",
    "mbw": "blocks.html",
    "mergekit": "mergekit.html",
    "mixtures of experts": "different-models.html",
    "mlflow": "results.html",
    "model cards": "publishing.html",
    "nan": "troubleshooting.html",
    "optuna": "search.html",
    "out of memory": "troubleshooting.html",
    "perplexity": "evaluators-language.html",
    "pickscore": "images.html",
    "plugin": "writing-a-merge-method.html",
    "resume": "sweeps.html",
    "s3://": "remote.html",
    "sd-mecha": "migrating-from-sd-mecha.html",
    "seeds": "sweeps.html",
    "slerp": "methods.html",
    "slurm": "clusters.html",
    "supermerger": "supermerger.html",
    "task arithmetic": "methods.html",
    "tokenizers": "different-models.html",
    "vae": "formats.html",
    "xyz": "images.html",
}
"""What is searched, and the page on which a heading has all of its words: headings count most."""


@pytest.fixture(scope="module")
def headings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The headings of each page, in the index that the search of the built site uses."""
    pytest.importorskip("mkdocs")
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    index = json.loads((Path(site) / "search" / "search_index.json").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for section in index["docs"]:
        found.setdefault(section["location"].partition("#")[0], []).append(section["title"].lower())
    return found


@pytest.mark.parametrize(("words", "page"), SEARCHED.items())
def test_a_search_finds_the_page(words, page, headings):
    assert any(all(word in heading for word in words.split()) for heading in headings[page])
