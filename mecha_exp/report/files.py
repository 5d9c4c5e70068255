"""All files of a sweep: its data, its figures and its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mecha_exp.report.export import CSV_FILE, PARQUET_FILE, write_csv, write_parquet
from mecha_exp.report.figures import Picture, draw_figures
from mecha_exp.report.figures.contact_sheet import draw_contact_sheets
from mecha_exp.report.page import REPORT_FILE, write_report
from mecha_exp.report.results import Results
from mecha_exp.report.verdict import VERDICT_FILE, write_verdict


def write_all(results: Results, command: Sequence[str], folder: Path) -> list[Path]:
    """Write the data, the figures and the page of a sweep into its folder.

    Args:
        results: of the sweep.
        command: the words of the command line.
        folder: of the sweep.

    Returns:
        the paths of the written files.
    """
    for stale in folder.glob("sweep*.png"):  # from an earlier start with fewer points
        stale.unlink()
    write_csv(results, folder / CSV_FILE)
    write_parquet(results, folder / PARQUET_FILE)
    pictures = draw_figures(results, folder)
    pictures += [Picture(*sheet) for sheet in draw_contact_sheets(results, folder)]
    write_report(results, command, pictures, folder / REPORT_FILE)
    paths = [folder / CSV_FILE, folder / PARQUET_FILE, *(picture.path for picture in pictures)]
    if write_verdict(results, folder / VERDICT_FILE):
        paths.append(folder / VERDICT_FILE)
    return [*paths, folder / REPORT_FILE]
