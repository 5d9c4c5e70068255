"""How large the report of a sweep is, how long writing it takes, and how soon Chromium has opened it.

    python -m bench.page                # 1,000 points with outcomes of 400 examples
    python -m bench.page --points 100

Seconds of the browser are those of its clock since the page was asked for; "processor" is the time of the
page's own process, to which other programs on the machine add little. No graphics card helps to draw.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import machine, make_parser, publish, table
from mecha_exp.report import REPORT_FILE, write_all
from tests.support.browser import Browser
from tests.support.large_sweep import sweep

REPEATS = 5


def opened(page: Path) -> dict[str, float]:
    """Seconds until the page is painted and loaded, and until its first chart and all charts are drawn."""
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        browser.open(page)
        loaded = _processor_seconds(browser)
        browser.wait_for("charts.forest.redraw")
        times = browser.run(_TIMES) | {"processor when loaded": loaded}
        times["processor when the forest plot is drawn"] = _processor_seconds(browser)
        browser.run("document.querySelectorAll('figure[data-chart]').forEach(show)")
        browser.wait_for("Object.values(charts).every(chart => chart.redraw)")
        times["processor when all charts are drawn"] = _processor_seconds(browser)
        return dict(times)


_TIMES = """(() => {
  const load = performance.getEntriesByType("navigation")[0].loadEventEnd;
  const paint = performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? NaN;
  return {"painted": paint / 1000, "loaded": load / 1000, "forest plot drawn": charts.forest.drawnAt / 1000};
})()"""


def _processor_seconds(browser: Browser) -> float:
    """What the page's process has used; the only one that has done much."""
    processes: list[dict[str, Any]] = browser.call_browser("SystemInfo.getProcessInfo")["processInfo"]
    return float(max(p["cpuTime"] for p in processes if p["type"] == "renderer"))


def main() -> None:
    """Measure, print a table and keep it in RESULTS.md."""
    parser = make_parser(__doc__)
    parser.add_argument("--points", type=int, default=1000)
    options = parser.parse_args()
    results = sweep(options.points)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.process_time()
        write_all(results, ["python", "-m", "mecha_exp"], folder)
        written = time.process_time() - started
        page = folder / REPORT_FILE
        runs = [opened(page) for _ in range(REPEATS)]
        megabytes = page.stat().st_size / 1e6
    rows = [["what", "measured"], ["size", f"{megabytes:.2f} MB"]]
    rows.append(["tables, figures and page written (processor)", f"{written:.1f} s"])
    for what in runs[0]:
        values = [run[what] for run in runs]
        rows.append([what, f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"])
    text = (
        f"{machine()}. {options.points:,} points; median of {REPEATS} (smallest to largest).\n\n{table(rows)}"
    )
    publish("The report in a browser", text, save=options.save)


if __name__ == "__main__":
    main()
