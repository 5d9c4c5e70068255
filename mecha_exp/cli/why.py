"""`python -m mecha_exp why SWEEP`: what moved the metric of a sweep."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from mecha_exp.cli.arguments import make_parser
from mecha_exp.paths import OUTPUTS
from mecha_exp.report.sweep_results import results_from
from mecha_exp.report.why.effects import Reasons, reasons_of
from mecha_exp.report.why.shapley import Attribution
from mecha_exp.runs.outcomes import outcomes_so_far
from mecha_exp.runs.query import find_sweep
from mecha_exp.terminal.console import make_table, print_json, print_line, print_table

if TYPE_CHECKING:
    from mecha_exp.verdict.why import Effects, EffectsOverNoise

EXAMPLE = """\
examples:
    python -m mecha_exp why                                       the newest sweep
    python -m mecha_exp why outputs/multiruns/2026-01-31_12-00-00 --json

Shares are of the variance over the points of this sweep: other ranges of its keys give others.
"""


def main(arguments: list[str]) -> int:
    """Print what moved the metric of a sweep."""
    options = _parser().parse_args(arguments)
    folder, sweep = find_sweep(options.sweep, [options.folder])
    records = sweep.all_records(folder)
    reasons = reasons_of(results_from(sweep, records), outcomes_so_far(sweep, folder, records))
    if options.json:
        print_json({"title": sweep.title, "folder": str(folder), **_data(reasons)})
    else:
        _show(reasons)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "why",
        "Say what moved the metric of a sweep: the effect of each swept key and of each pair, and how much "
        "of the variance comes from methods, hyperparameters, tasks and examples.",
        EXAMPLE,
    )
    parser.add_argument("sweep", nargs="?", help="its folder or its title (default: the newest)")
    parser.add_argument("--in", dest="folder", type=Path, default=OUTPUTS, help="where sweeps are looked for")
    parser.add_argument("--json", action="store_true", help="all of it for other programs")
    return parser


def _data(reasons: Reasons) -> dict[str, Any]:
    """The content of `--json`."""
    effects = reasons.effects
    return {
        "metric": reasons.metric,
        "split": reasons.split,
        "points": reasons.points,
        "effects": effects
        and {
            "mean": effects.mean,
            "variance": effects.variance,
            "main": dict(effects.main),
            "pairs": [{"keys": list(pair), "share": share} for pair, share in effects.pairs.items()],
            "rest": effects.rest,
            "curves": {key: {str(v): d for v, d in curve.items()} for key, curve in effects.curves.items()},
        },
        "effects_over_noise": reasons.over_noise and _over_noise_data(reasons.over_noise),
        "importances": reasons.importances,
        "p_of_chance": dict(reasons.chance),
        "variance_shares": reasons.shares,
        "shapley": [_attribution_data(attribution) for attribution in reasons.shapley],
        "notes": list(reasons.notes),
    }


def _over_noise_data(effects: EffectsOverNoise) -> dict[str, Any]:
    """The effects less what noise gives as JSON."""
    return {
        "noise_variance": effects.noise,
        "shares": [
            {
                "keys": list(part),
                "share": share.value,
                "ci95": list(share.ci95),
                "p_holm": effects.p_values[part],
            }
            for part, share in effects.shares.items()
        ],
        "curves": {
            key: {str(v): {"difference": e.value, "ci95": list(e.ci95)} for v, e in curve.items()}
            for key, curve in effects.curves.items()
        },
    }


def _attribution_data(attribution: Attribution) -> dict[str, Any]:
    """Shapley values as JSON; null for the interval of a value without one."""
    return {
        "setting": attribution.setting,
        "players": attribution.kind,
        "none": attribution.none,
        "full": attribution.full,
        "intervals_cover": attribution.covers or None,
        "values": {
            player: {"value": v.value, "ci95": None if math.isnan(v.low) else list(v.ci95)}
            for player, v in attribution.values.items()
        },
    }


def _show(reasons: Reasons) -> None:
    if reasons.effects:
        _show_effects(reasons, reasons.effects)
    if reasons.importances:
        table = make_table(
            f"{reasons.metric}, {reasons.points} settings", "relative importance", "p, if by chance"
        )
        for name, share in reasons.importances.items():
            table.add_row(Text(name), f"{share:.2f}", f"{reasons.chance[name]:.2g}")
        print_table(table)
    for attribution in reasons.shapley:
        _print_attribution(reasons.metric, attribution)
    if reasons.shares:
        _print_shares(f"each outcome on '{reasons.split}'", reasons.shares)
    for note in reasons.notes:
        print_line(note)


def _show_effects(reasons: Reasons, effects: Effects) -> None:
    """Print the effects on a grid: less what noise gives them where that is known."""
    what = f"{reasons.metric} over {reasons.points} settings on '{reasons.split}'"
    more = f"{reasons.metric}, more than the mean {effects.mean:.4g}"
    noise = reasons.over_noise
    if noise is None:
        rest = {"three keys and more": effects.rest} if len(effects.main) > 2 else {}
        pairs = {" and ".join(pair): share for pair, share in effects.pairs.items()}
        _print_shares(what, {**effects.main, **pairs, **rest})
    else:
        table = make_table(what, "share of the variance beyond noise", "95 % interval", "p after Holm")
        for part, share in noise.shares.items():
            interval = f"{100 * share.low:.0f} to {100 * share.high:.0f} %"
            table.add_row(
                Text(" and ".join(part)),
                f"{100 * share.value:.1f} %",
                interval,
                f"{noise.p_values[part]:.2g}",
            )
        print_table(table)
        print_line(_of_noise(noise.noise, effects.variance))
    for key, curve in effects.curves.items():
        table = make_table(key, more, *(["95 % interval"] if noise else []))
        for value, difference in curve.items():
            ends = [f"{e.low:+.4f} to {e.high:+.4f}" for e in ([noise.curves[key][value]] if noise else [])]
            table.add_row(Text(str(value)), f"{difference:+.4f}", *ends)
        print_table(table)


def _of_noise(noise: float, variance: float) -> str:
    """How much of the variance noise alone gives."""
    share = min(noise / variance, 1.0) if variance else 1.0
    return (
        f"Noise of examples and replicates alone gives {100 * share:.0f} % of the variance of these settings."
    )


def _print_attribution(metric: str, attribution: Attribution) -> None:
    """Print Shapley values, and what they add up to."""
    of = f" ({attribution.setting})" if attribution.setting else ""
    table = make_table(attribution.kind, f"Shapley value of {metric}{of}", "95 % interval")
    for player, value in attribution.values.items():
        interval = "" if math.isnan(value.low) else f"{value.low:+.4f} to {value.high:+.4f}"
        table.add_row(Text(player), f"{value.value:+.4f}", interval)
    print_table(table)
    none, full = attribution.none, attribution.full
    covers = f" Intervals are over {attribution.covers}." if attribution.covers else ""
    print_line(f"Together {full - none:+.4f}, from {none:.4f} without any to {full:.4f} with all.{covers}")


def _print_shares(what: str, shares: Mapping[str, float]) -> None:
    table = make_table(what, "share of the variance")
    for name, share in shares.items():
        table.add_row(Text(name), f"{100 * share:.1f} %")
    print_table(table)
