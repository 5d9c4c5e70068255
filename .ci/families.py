"""Checks that blocks, layers, tables of tokens and ties of every architecture of transformers are seen right.

    python .ci/families.py            # print what was checked; fail where something is seen otherwise
    python .ci/families.py --sample   # store the keys of some classes for the tests without the library

It is part of `make hf`, and fails too where a class cannot be built that could be when the sample was stored.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from library_families import EXCEPTIONS, SAMPLE, SAMPLED, classes, described, mistakes, sample


def _write_sample(cases: list[tuple[str, str, str]], lost: Iterable[str]) -> None:
    families = [described(*case) for case in cases if case[2] in SAMPLED]
    lines = [json.dumps(asdict(family), separators=(",", ":")) for family in families]
    text = ",\n".join(lines)
    SAMPLE.write_text(f'{{"families": [\n{text}\n],\n"not built": {json.dumps(sorted(lost))}}}\n', "utf-8")


def _examined(case: tuple[str, str, str]) -> tuple[str, str, str, list[str]]:
    """The purpose, the name, why it cannot be built, and what is wrong."""
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    purpose, kind, name = case
    try:
        family = described(purpose, kind, name)
    except Exception as error:
        return purpose, name, " ".join(str(error).split())[:100] or repr(error), []
    return purpose, name, "", list(mistakes(family))


def main(arguments: list[str]) -> int:
    """Check all classes; store the sample if that is asked for."""
    cases = list(classes())
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        results = pool.map(_examined, cases, chunksize=8)
    lost = {name: why for _, name, why, _ in results if why}
    wrong = {name: found for _, name, _, found in results if found and name not in EXCEPTIONS}
    if arguments == ["--sample"]:
        _write_sample(cases, lost)
    new = sorted(set(lost) - set(sample()[1]))
    counts = Counter(purpose for purpose, _, why, _ in results if not why)
    lines = [
        f"{sum(counts.values())} of {len(results)} classes of transformers were built and checked: "
        + ", ".join(f"{count} {purpose}" for purpose, count in counts.items()),
        f"{len(lost)} could not be built from a default configuration:",
        *(f"  {name}: {why}" for name, why in sorted(lost.items())),
        *(f"WRONG {name}: {'; '.join(found[:3])}" for name, found in wrong.items()),
        *(f"NEW {name} could be built before" for name in new),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if wrong or new else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
