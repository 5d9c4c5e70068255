"""Sweeps of every shape that a verdict knows, and what is concluded from them, as JSON has it.

    python tests/verdict/verdict_cases.py    # writes tests/golden/verdicts.json anew

The other tests of this folder say why the numbers are right. These say that none has changed unnoticed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate, as_json, conclude, sentence
from mecha_exp.verdict import why as reasons
from mecha_exp.verdict.panel import Panel
from mecha_exp.verdict.why.shapley import weights

GOLDEN = Path(__file__).parents[1] / "golden" / "verdicts.json"
QUICK = {"metric": "accuracy", "resamples": 200, "flips": 999}
SIZES = {"cars": 60, "sun": 140, "digits": 20}


def one(name: str, values: np.ndarray, split: str = "validation", **more) -> Candidate:
    """A point with real values or hits on one split."""
    return Candidate(name, "r", outcomes={split: Outcomes({"t": values})}, **more)


def panel(*columns: np.ndarray, clusters: np.ndarray | None = None) -> Panel:
    groups = None if clusters is None else {"t": clusters}
    return Panel.of(
        [
            Candidate(f"p{i}", outcomes={"s": Outcomes({"t": c}, clusters=groups)})
            for i, c in enumerate(columns)
        ],
        "s",
    )


def drawn(
    seed: int, lift: float = 0.0, *, sizes: dict[str, int] = SIZES, real: bool = False, clusters: int = 0
) -> dict[str, Outcomes]:
    """Outcomes of a model on two splits; examples are as hard for every model."""
    made = {}
    for place, split in enumerate(("validation", "test")):
        values, sources = {}, {}
        for number, (task, count) in enumerate(sizes.items()):
            hard = np.random.default_rng([7, place, number]).normal(size=count)
            own = np.random.default_rng([seed, place, number]).normal(size=count)
            latent = hard + 0.5 * own - lift
            values[task] = np.exp(latent) if real else (latent < 0.6).astype(float)
            sources[task] = np.array([f"s{i % clusters if clusters else i}" for i in range(count)])
        made[split] = Outcomes(values, clusters=sources if clusters else None)
    return made


def sweep(
    lifts: Sequence[float], *, seeds: int = 1, label: str = "seed={}", recipes: int = 2, **more: Any
) -> list[Candidate]:
    """A point for each lift, in turn of each recipe, with replicates."""
    return [
        Candidate(
            f"p{place}",
            f"r{place % recipes}",
            {"alpha": lift},
            drawn(
                10 * place + seed + 1, lift + (0.1 * math.sin(place + 3 * seed) if seeds > 1 else 0), **more
            ),
            label.format(seed, place) if seeds > 1 else "",
            draws=seeds > 1,
        )
        for place, lift in enumerate(lifts)
        for seed in range(seeds)
    ]


def inputs(**more: Any) -> list[Candidate]:
    """A base and two experts."""
    lifts = {"base": -0.1, "one": 0.05, "two": 0.15}
    return [Candidate(name, outcomes=drawn(900 + i, x, **more)) for i, (name, x) in enumerate(lifts.items())]


def on(split: str, candidates: Sequence[Candidate], keep: int | None = None) -> list[Candidate]:
    """Candidates without the outcomes of other splits, but for the first `keep`."""
    cut = [
        Candidate(c.name, c.recipe, c.settings, {split: c.outcomes[split]}, c.replicate, draws=c.draws)
        for c in candidates
    ]
    return [*candidates[: keep or 0], *cut[keep or 0 :]]


LIFTS = (0.0, 0.1, 0.45, 0.2, 0.5, -0.3)
BASE = {"inputs": inputs(), "base": "base"}
LOSSES: dict[str, Any] = {"real": True, "sizes": {"texts": 40}}
EXPERT_OF = {"cars": "one", "sun": "two", "digits": "two"}
SAME = np.ones(30)


def _verdicts() -> dict[str, Callable[[], Any]]:
    """Each case, as what concludes on it."""

    def case(points: Sequence[Candidate], **words: Any) -> Callable[[], Any]:
        return lambda: conclude(points, **{**QUICK, **words})

    seeds, one = sweep(LIFTS, seeds=3), {"splits": ("validation",)}
    both = [Candidate("a", "r", outcomes={"test": Outcomes({"t": v})}) for v in (SAME, SAME)][:1]
    numbers = [Candidate(f"p{i}", "r", numbers={"validation": x, "test": x / 2}) for i, x in enumerate(LIFTS)]
    again = [Candidate("p4", "r", numbers={"validation": 0.7}), Candidate("nan", numbers={"test": math.nan})]
    return {
        "two splits": case(sweep(LIFTS), **BASE, expert_of=EXPERT_OF),
        "experts are guessed": case(sweep(LIFTS), **BASE),
        "one split": case(on("validation", sweep(LIFTS)), **BASE, **one),
        "one task": case(sweep(LIFTS, sizes={"t": 200}), inputs=inputs(sizes={"t": 200}), base="base"),
        "clusters": case(sweep(LIFTS, clusters=12), inputs=inputs(clusters=12), base="base"),
        "losses": case(sweep(LIFTS, **LOSSES), inputs=inputs(**LOSSES), base="base", direction="minimize"),
        "few losses": case(sweep(LIFTS, real=True, sizes={"t": 9}), direction="minimize", **one),
        "some on test": case(on("validation", sweep(LIFTS), keep=2), **BASE),
        "best not on test": case(on("validation", sweep(LIFTS), keep=1)[1:], **BASE),
        "seeds": case(seeds, **BASE),
        "seeds, one split": case(on("validation", seeds), **BASE, **one),
        "seeds of losses": case(sweep(LIFTS, seeds=5, **LOSSES), direction="minimize"),
        "two seeds": case(sweep(LIFTS, seeds=2), **BASE),
        "other seeds": case(sweep(LIFTS, seeds=3, label="seed={}{}"), **BASE),
        "sets of experts": case(sweep(LIFTS, seeds=6, label="seed={},experts=1"), **BASE),
        "new seeds": case(seeds, **BASE, fresh=sweep(LIFTS, seeds=7)[28:32]),
        "new seeds of another": case(seeds, **BASE, fresh=sweep(LIFTS, seeds=7)[:4]),
        "race": case(sweep(LIFTS), **BASE, dropped=14),
        "race, one split, one left": case(sweep(LIFTS[:1]), **BASE, **one, dropped=5),
        "one point": case(sweep(LIFTS[:1]), **BASE),
        "another base": case(sweep(LIFTS), inputs=inputs(), base="gone"),
        "twins": case(sweep((0.2, 0.2)) + sweep((0.2, 0.2))[:1], **one),
        "all hits": case(both, splits=("test",)),
        "all hits and not": case(
            [
                Candidate(n, n, outcomes={"test": Outcomes({"t": v})})
                for n, v in (("a", SAME), ("b", 0 * SAME))
            ],
            splits=("test",),
        ),
        "numbers": case([*numbers, *again], inputs=[Candidate("base", numbers={"test": 0.1})]),
        "nothing": case([Candidate("a", outcomes={"test": Outcomes({"t": np.full(3, math.nan)})})]),
    }


def _reasons() -> dict[str, Any]:
    """What moved the metric, of a grid, of drawn points and of coalitions."""
    random = np.random.default_rng(5)
    rows = [(a, b, c) for a in range(3) for b in range(2) for c in ("x", "y")]
    keys = {name: [row[place] for row in rows] for place, name in enumerate("abc")}
    panel = Panel.of(sweep([0.2 * a + 0.1 * b for a, b, _ in rows], seeds=2), "test")
    values = panel.scores.tolist()
    points = {"u": random.random(30).tolist(), "m": ["x", "y", "z"] * 10}
    metric = (np.array(points["u"]) ** 2 + 0.1 * random.normal(size=30)).tolist()
    many = {"u": random.random(300).tolist()}
    few, crowd = ["a", "b", "c", "d"], [f"p{i}" for i in range(11)]
    worth = {group: float(random.normal()) for group in reasons.coalitions(few)}
    sampled = {g: len(g) ** 1.5 + ("p3" in g) for g in reasons.coalitions(crowd, permutations=9, seed=2)}
    factors = {"method": [0, 0, 0, 1, 1, 1, 2, 2], "seed": [0, 1, 2, 0, 1, 2, 0, 1]}
    return {
        "anova": reasons.functional_anova(keys, values),
        "noise": reasons.effects_over_noise(keys, values, reasons.score_errors(panel, draws=200)),
        "chance": reasons.chance_of_keys(points, metric, permutations=99),
        "chance of many": reasons.chance_of_keys(many, random.random(300).tolist(), permutations=99),
        "components": reasons.variance_shares(factors, values[:8]),
        "shapley": reasons.shapley(worth, few),
        "weights": weights(few, [*worth]).tolist(),
        "sampled": reasons.shapley(sampled, crowd, permutations=9, seed=2),
    }


def concluded() -> dict[str, Any]:
    """All of it as JSON has it, numbers with ten digits."""
    found: dict[str, Any] = {}
    for name, conclude_on in _verdicts().items():
        verdict = conclude_on()
        found[name] = {"json": as_json(verdict), "whole": asdict(verdict), "sentence": sentence(verdict)}
    whole: dict[str, Any] = _plain({"verdicts": found, "why": _reasons()})
    return whole


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if hasattr(value, "__dataclass_fields__"):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {", ".join(k) if isinstance(k, tuple) else str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.10g}") if math.isfinite(value) else str(value)
    return int(value) if isinstance(value, np.integer) else value


if __name__ == "__main__":
    lines = {
        part: [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in of.items()] for part, of in concluded().items()
    }
    body = ",\n".join(f'"{part}": {{\n' + ",\n".join(of) + "\n}" for part, of in lines.items())
    GOLDEN.write_text(f"{{{body}}}\n", encoding="utf-8")
    sys.stdout.write(f"{GOLDEN}\n")
