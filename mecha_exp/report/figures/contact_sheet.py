"""Contact sheets: the pictures of all points over the swept keys, as an XYZ plot has them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.errors import ConfigError, did_you_mean
from mecha_exp.report.results import MISSING, Results
from mecha_exp.report.table import shortened
from mecha_exp.runs.files import FILES, files_of_inputs, files_of_run
from mecha_exp.runs.outcomes import OUTCOMES_FILE, models_in, read_outcomes
from mecha_exp.runs.record import Record, load_all
from mecha_exp.runs.values import as_text
from mecha_exp.system.atomic_write import atomic_write

if TYPE_CHECKING:
    from PIL.Image import Image

SHEET_FILE = "sweep-xyz.png"
PICTURE = "picture"
"""What stands among the keys of a sheet for the pictures of one point."""
_SUFFIXES = (".png", ".jpg", ".jpeg")
_WIDTH = 2400  # pixels that the tiles of a page may take in all, if they stay legible
_LEAST, _MOST = 96, 512  # pixels of a tile's longer side
_GAP, _FONT, _LINE, _LABEL = 6, 16, 24, 44  # pixels, the last in characters
_INPUTS = "the inputs"
_PAPER, _INK, _EMPTY = "white", "black", "#e4e8ec"

_NOT_DRAWN = "not drawn"

Tiles = dict[tuple[str, str], Path | None]
Scores = dict[str, str]
"""The words below the pictures of a model, by their names."""


@dataclass
class Page:
    """A sheet: labels of columns and rows, and a picture for each pair of them.

    Attributes:
        heading: what all its pictures have in common.
        tiles: the files by the labels of their column and row; None of a picture that a race left out.
        captions: the words below a picture, by the same; in place of one that was left out.
    """

    heading: str
    tiles: Tiles = field(default_factory=dict)
    captions: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The labels of the columns, in the order of the pictures."""
        return list(dict.fromkeys(column for column, _ in self.tiles))

    @property
    def rows(self) -> list[str]:
        """The labels of the rows, in the order of the pictures."""
        return list(dict.fromkeys(row for _, row in self.tiles))


def draw_contact_sheets(results: Results, folder: Path) -> list[tuple[Path, str]]:
    """Draw the pictures that the points of a sweep left; returns the files and their captions.

    The swept key with the most values makes the columns, the next one the rows; the pictures of a point and
    further keys make pages, unless the sweep's `sheet` says otherwise. Where the pictures of a point are on
    an axis and there are no pages, the inputs stand beside the points. A picture's score is below it. Of a
    point that a race dropped there are the pictures that it had until then.
    """
    if not any(folder.glob(f"*/{FILES}")):
        return []
    drawn = []
    for number, page in enumerate(pages_of(results, folder)):
        path = folder / (SHEET_FILE if not number else SHEET_FILE.replace(".png", f"-{number + 1}.png"))
        with atomic_write(path) as temporary:
            draw_page(page).save(temporary, "PNG", optimize=True)
        drawn.append((path, f"Pictures: {page.heading}" if page.heading else "The pictures of each point"))
    return drawn


def pages_of(results: Results, folder: Path) -> list[Page]:
    """Arrange the pictures of the points, and of the inputs, on pages."""
    records = {path: record for path, record in load_all(folder).items() if record.finished}
    keys = _order(results, [*records.values()])
    scores = {path: _scores_of(path) for path in records}
    pictures = {path: _pictures(files_of_run(path)) for path in records}
    known = dict.fromkeys(itertools.chain(*sorted(pictures.values(), key=len, reverse=True)))
    pages: dict[str, Page] = {}
    _add_inputs(pages, keys, folder, [*scores.values()])
    for path, record in records.items():
        labels = {key: f"{key}={as_text(results.value(record, key)) or MISSING}" for key in keys}
        for picture in known if record.dropped is not None else pictures[path]:
            places = {**labels, PICTURE: picture}
            column, row, *rest = [places[key] for key in keys] if len(keys) > 1 else [record.name, picture]
            page = pages.setdefault(", ".join(rest), Page(", ".join(rest)))
            page.tiles[column, row] = pictures[path].get(picture)
            page.captions[column, row] = _caption(record, picture, pictures[path], scores[path])
    if (last := pages.pop(_INPUTS, None)) is not None:
        pages[_INPUTS] = last
    return list(pages.values())


def _caption(record: Record, picture: str, drawn: Mapping[str, Path], scores: Mapping[str, Scores]) -> str:
    """The words below a picture: its score, or that its point was dropped."""
    if record.dropped is None:
        return scores.get("", {}).get(picture, "")
    return "dropped" if picture in drawn else _NOT_DRAWN


def _add_inputs(
    pages: dict[str, Page], keys: Sequence[str], folder: Path, scores: Sequence[Mapping[str, Scores]]
) -> None:
    """Put the inputs beside the points where a picture has one place there; else on a page of their own."""
    words = {name: of_name for of_point in scores for name, of_name in of_point.items()}
    are_beside = len(keys) < 3 and PICTURE in keys
    are_rows = keys[0] == PICTURE and len(keys) == 2
    for name, files in files_of_inputs(folder).items():
        for picture, file in _pictures(files).items():
            page = pages.setdefault("" if are_beside else _INPUTS, Page("" if are_beside else _INPUTS))
            place = (picture, name) if are_rows else (name, picture)
            page.tiles[place] = file
            page.captions[place] = words.get(name, {}).get(picture, "")


def _scores_of(run: Path) -> dict[str, Scores]:
    """The scores of the pictures of a point, by "", and of each input, as words."""
    path = run / OUTCOMES_FILE
    scores: dict[str, Scores] = {}
    for model in models_in(read_outcomes(path)) if path.is_file() else ():
        words = scores.setdefault(model.name if model.role == "input" else "", {})
        for metric, by_split in model.by_metric.items():
            for outcomes in by_split.values():
                for task, values in outcomes.values.items():
                    for example, value in zip(outcomes.examples[task], values, strict=True):
                        words.setdefault(str(example), f"{metric} {value:.4g}")
    return scores


def checked_sheet(value: object, swept: Sequence[str]) -> list[str]:
    """The keys that a configuration chooses for the columns, the rows and the pages of a sheet, in order.

    Args:
        value: of the setting; None leaves the choice.
        swept: the keys that differ between points.

    Raises:
        ConfigError: they are not different keys that are swept.
    """
    if value is None:
        return []
    known = [*swept, PICTURE]
    keys = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not keys or not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
        raise ConfigError(
            f"evaluator.sheet={value}: expected the keys of columns, rows and pages, as in "
            f"[{','.join(known[:2])}]."
        )
    for key in keys:
        if key not in known:
            raise ConfigError(
                f"evaluator.sheet: '{key}' is not swept.{did_you_mean(key, known)} '{PICTURE}' stands for "
                "the pictures of a point."
            )
    return keys


def _order(results: Results, records: Sequence[Record]) -> list[str]:
    """What makes columns, rows and pages, in this order."""
    axes = _axes(results, records)
    return [*results.sheet, *(key for key in (*axes, PICTURE) if key not in results.sheet)]


def _axes(results: Results, records: Sequence[Record]) -> list[str]:
    """The swept keys that differ between points, the one with the most values first."""
    counts = {key: len({results.text(record, key) for record in records}) for key in results.swept}
    return sorted((key for key, count in counts.items() if count > 1), key=lambda key: -counts[key])


def _pictures(files: Mapping[str, Path]) -> dict[str, Path]:
    """The pictures among files, by their names without suffix."""
    return {
        name[: -len(path.suffix)]: path for name, path in files.items() if path.suffix.lower() in _SUFFIXES
    }


def draw_page(page: Page) -> Image:
    """Draw a page: its heading, labels above the columns and left of the rows, the pictures between them."""
    from PIL import Image, ImageDraw, ImageFont

    font: Any = ImageFont.load_default(_FONT)
    side = min(_MOST, max(_LEAST, _WIDTH // len(page.columns)))
    tiles = {place: _tile(path, side) for place, path in page.tiles.items() if path is not None}
    width = max((tile.width for tile in tiles.values()), default=side)
    width = max(width, *(int(font.getlength(text)) + 1 for text in page.captions.values()), 0)
    below = _LINE if any(page.captions.values()) else 0
    largest = max((tile.height for tile in tiles.values()), default=side)
    heights = [
        max((tile.height for (_, r), tile in tiles.items() if r == row), default=largest) + below
        for row in page.rows
    ]
    names = [shortened(row, _LABEL) for row in page.rows]
    labels = [_lines(column, font, width) for column in page.columns]
    left = int(max(font.getlength(name) for name in names)) + 2 * _GAP
    top = _GAP + _LINE * (bool(page.heading) + max(len(lines) for lines in labels))
    xs = [left + number * (width + _GAP) for number in range(len(labels) + 1)]
    ys = [top + sum(heights[:number]) + number * _GAP for number in range(len(names) + 1)]
    sheet = Image.new("RGB", (xs[-1], ys[-1]), _PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((_GAP, _GAP), page.heading, _INK, font)
    for x, lines in zip(xs, labels, strict=False):
        for line, text in enumerate(reversed(lines)):
            pen.text((x + width // 2, top - _LINE * (line + 1)), text, _INK, font, anchor="ma")
    for y, height, row, name in zip(ys, heights, page.rows, names, strict=False):
        pen.text((_GAP, y + height // 2), name, _INK, font, anchor="lm")
        for x, column in zip(xs, page.columns, strict=False):
            caption = page.captions.get((column, row), "")
            if (tile := tiles.get((column, row))) is None:
                pen.rectangle((x, y, x + width - 1, y + height - 1), _EMPTY)
                pen.text((x + width // 2, y + height // 2), caption, _INK, font, anchor="mm")
            else:
                sheet.paste(tile, (x + (width - tile.width) // 2, y))
                pen.text((x + width // 2, y + tile.height), caption, _INK, font, anchor="ma")
    return sheet


def _lines(text: str, font: Any, width: int) -> list[str]:
    """The lines of a label, each as wide as a column at most, broken where they must be."""
    lines, rest = [], text
    while rest:
        length = len(rest)
        while length > 1 and font.getlength(rest[:length]) > width:
            length -= 1
        lines.append(rest[:length])
        rest = rest[length:]
    return lines or [""]


def _tile(path: Path, side: int) -> Image:
    """A picture whose longer side has that many pixels at most; a small one is enlarged by whole numbers."""
    from PIL import Image

    with Image.open(path) as opened:
        picture: Image.Image = opened.convert("RGB")
    longer = max(picture.size)
    if longer <= side:
        factor = max(1, _LEAST // longer)
        return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    width, height = (max(1, round(length * side / longer)) for length in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)
