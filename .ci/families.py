"""Checks every architecture of transformers: what is seen in its keys, and merges with two more tokens.

    python .ci/families.py            # print what was checked; fail where something is wrong
    python .ci/families.py --sample   # store the keys of some classes for the tests without the library

It is part of `make hf`, and fails too where a class is no case that was one when the sample was stored.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from library_families import (
    EXCEPTIONS,
    SAMPLE,
    SAMPLED,
    NotACase,
    classes,
    described,
    diffusion_classes,
    mistakes,
    resized,
    sample,
)

WITH_TOKENS = ("causal", "sequence to sequence", "masked", "vision-language", "speech")
"""The purposes whose classes are merged with more tokens, one for each type of configuration."""

Case = tuple[str, str, str]


class Result(NamedTuple):
    """What was found of a class: why it is no case, or what is wrong with it."""

    purpose: str
    name: str
    not_a_case: str = ""
    wrong: Sequence[str] = ()


def main(arguments: list[str]) -> int:
    """Check all classes; store the sample if that is asked for."""
    cases = list(classes())
    first = {kind: (purpose, kind, name) for purpose, kind, name in reversed(cases) if purpose in WITH_TOKENS}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        seen = pool.map(_seen, cases, chunksize=8)
        drawn = pool.map(_seen, diffusion_classes(), chunksize=2)
        merged = pool.map(_merged, first.values(), chunksize=4)
    lost = {f"resized {r.name}" for r in merged if r.not_a_case} | {
        r.name for r in (*seen, *drawn) if r.not_a_case
    }
    if arguments == ["--sample"]:
        _write_sample(cases, lost)
    new = sorted(lost - sample()[1])
    lines = [
        *_lines("blocks, layers, tables of tokens and ties", seen),
        *_lines("blocks and layers", drawn, "diffusers"),
        *_lines("merges with two more tokens, loaded again", merged),
        *(f"NEW {name} was a case before" for name in new),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if new or any(result.wrong for result in (*seen, *drawn, *merged)) else 0


def _lines(what: str, results: Sequence[Result], library: str = "transformers") -> list[str]:
    checked = Counter(result.purpose for result in results if not result.not_a_case)
    counts = ", ".join(f"{count} {purpose}" for purpose, count in checked.items())
    return [
        f"{what}: {sum(checked.values())} of {len(results)} classes of {library} ({counts})",
        *(f"  no case: {r.name}: {r.not_a_case}" for r in results if r.not_a_case),
        *(f"WRONG {r.name}: {'; '.join(r.wrong[:3])}" for r in results if r.wrong),
    ]


def _seen(case: Case) -> Result:
    _be_quiet()
    purpose, _, name = case
    try:
        family = described(*case)
    except Exception as error:
        return Result(purpose, name, " ".join(str(error).split())[:100] or repr(error))
    return Result(purpose, name, wrong=[] if name in EXCEPTIONS else list(mistakes(family)))


def _merged(case: Case) -> Result:
    _be_quiet()
    purpose, kind, name = case
    with tempfile.TemporaryDirectory() as folder:
        try:
            wrong = resized(kind, name, Path(folder))
        except NotACase as error:
            return Result(purpose, name, str(error))
    return Result(purpose, name, wrong=[wrong] if wrong and name not in EXCEPTIONS else [])


def _be_quiet() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _write_sample(cases: list[Case], lost: Iterable[str]) -> None:
    families = [described(*case) for case in cases if case[2] in SAMPLED]
    lines = ",\n".join(json.dumps(asdict(family), separators=(",", ":")) for family in families)
    SAMPLE.write_text(f'{{"families": [\n{lines}\n],\n"no cases": {json.dumps(sorted(lost))}}}\n', "utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
