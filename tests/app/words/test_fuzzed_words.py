"""Random edits of valid commands: each is understood or refused, with a short message and no traceback."""

import contextlib
import io
import random
import string
import sys
import traceback
from collections.abc import Iterator, Sequence

import pytest

from mecha_exp.cli import main
from mecha_exp.errors import MAX_MESSAGE
from mecha_exp.terminal import console

COMMANDS = [
    "recipe=ties alpha=0.3 k=0.1 output=none",
    "recipe=ties,slerp alpha=0.3,0.5 output=none -m",
    "recipe=weighted_sum blocks=GRAD_V blocks.fc2=0.7 output=none",
    "recipe=weighted_sum blocks.conv*=0.3 alpha=[0.0,0.5,1.0]",
    "recipe=weighted_sum alpha={conv1: 0.2, *.bias: 0, default: 0.7}",
    "recipe=linear weights=[1,1,1] weights.0=0.5,1 -m",
    "+models.experts=pkg://mecha_exp.examples.digits/base.safetensors evaluator=none",
    "models.dir=pkg://mecha_exp.examples.digits models.base=base models.experts=[expert_0_3,expert_4_6]",
    "recipe=dare_ties density=0.5 seed=1 sweep.replicates=2 -m",
    "alpha=interval(0,1) k=range(0.1,0.4,0.1) sweep=latin sweep.n=3 -m",
    "engine.workers=1 engine.compute_dtype=float64 output.dtype=float16 output.path=out/merged.safetensors",
    "evaluator.name=digits evaluator.timeout=3 tracking=none name=mine",
    "experiment=alpha_curve output=none -m",
    "sweep=leave_one_block_out recipe=weighted_sum -m",
    "recipe=task_arithmetic blocks.*=interval(0,1) weights.*=0.5,1 sweep=random sweep.n=2 -m",
    "recipe=task_arithmetic alpha=[0.1,0.5,0.9] alpha.*=interval(0,1) sweep=random sweep.n=2 -m",
    "recipe=weighted_sum output.quantize=fp8_scaled output.prune=true",
]
CHARACTERS = string.ascii_letters + string.digits + "=,.:;[]{}()'\"~+-*/\\ $@#%&!?|<>_\té\n"
WORDS = [
    "-m",
    "help",
    "=",
    "alpha",
    "0.3",
    "--alpha",
    "null",
    "[",
    "{a: 1",
    "blocks=",
    "models.experts.3=x",
    "~alpha",
    "~output",
    "~engine",
    "~sweep.mode",
    "evaluator.timeout.0=3",
]


def edited(words: Sequence[str], rng: random.Random) -> list[str]:
    """A command with one to three random edits."""
    words = list(words)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(words)) if words else 0
        word = words[at] if words else ""
        place = rng.randrange(len(word) + 1)
        edits = (
            lambda w=word, p=place: w[:p] + rng.choice(CHARACTERS) + w[p:],
            lambda w=word, p=place: w[:p] + w[p + 1 :],
            lambda w=word, p=place: w[:p] + rng.choice(CHARACTERS) + w[p + 1 :],
            lambda w=word, p=place: w[:p] + w[p : p + 3].swapcase() + w[p + 3 :],
            lambda w=word: w.replace("=", rng.choice(("==", " = ", "", "+=", ".0=", "=[", "='"))),
            lambda w=word: f'"{w}"' if rng.random() < 0.5 else f"'{w}'",
            lambda w=word: w * rng.choice((2, 40)),
        )
        choice = rng.randrange(len(edits) + 4)
        if choice < len(edits) and words:
            words[at] = edits[choice]()
        elif choice == len(edits) and words:
            del words[at]
        elif choice == len(edits) + 1 and words:
            words.insert(at, word)
        elif choice == len(edits) + 2:
            words.insert(at, rng.choice(WORDS))
        elif words:
            other = rng.randrange(len(words))
            words[at], words[other] = words[other], words[at]
    return words


def fuzzed(seed: int, count: int) -> Iterator[tuple[list[str], object, str]]:
    """Random commands with their status, or the traceback that they left, and what they printed."""
    rng = random.Random(seed)
    for _ in range(count):
        words = [*edited(rng.choice(COMMANDS).split(" "), rng), "debug=plan"]
        printed = io.StringIO()
        status: object
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                sys.argv = ["mecha_exp", *words]
                status = main()
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            status = traceback.format_exc()
        yield words, status, printed.getvalue()


@pytest.fixture
def quiet(folder, monkeypatch):
    """The terminal writes where the test redirects it, and the folder is empty."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(console.stdout, "_file", None)
    monkeypatch.setattr(console.stderr, "_file", None)
    return folder


MANY = [pytest.param(seed, 500, marks=pytest.mark.heavy) for seed in range(1, 5)]


@pytest.mark.parametrize(("seed", "count"), [(0, 30), *MANY])
def test_no_edit_of_a_command_ends_in_a_traceback(quiet, seed, count):
    refused = 0
    for words, status, printed in fuzzed(seed, count):
        assert status in (0, 1, 2), f"{words}\n{status}"
        assert "Traceback" not in printed, f"{words}\n{printed}"
        assert status != 2 or "usage:" in printed, words
        messages = [text for text in printed.split("error: ")[1:] if status == 1]
        assert all(len(text) <= MAX_MESSAGE + 100 for text in messages), words
        assert messages or status != 1, f"{words}: refused without a message\n{printed}"
        refused += bool(messages)

    assert refused > count // 4
    assert list(quiet.iterdir()) == []
