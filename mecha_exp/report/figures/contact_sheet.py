"""Contact sheets: the pictures of all points over the swept keys, as an XYZ plot has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.report.results import MISSING, Results
from mecha_exp.report.table import shortened
from mecha_exp.runs.files import FILES, files_of_inputs, files_of_run
from mecha_exp.runs.record import Record, load_all
from mecha_exp.runs.values import as_text

if TYPE_CHECKING:
    from PIL.Image import Image

SHEET_FILE = "sweep-xyz.png"
_SUFFIXES = (".png", ".jpg", ".jpeg")
_WIDTH = 2400  # pixels that the tiles of a page may take in all, if they stay legible
_LEAST, _MOST = 96, 512  # pixels of a tile's longer side
_GAP, _FONT, _LINE, _LABEL = 6, 16, 24, 44  # pixels, the last in characters
_PAPER, _INK, _EMPTY = "white", "black", "#e4e8ec"

Tiles = dict[tuple[str, str], Path]


@dataclass
class Page:
    """A sheet: labels of columns and rows, and a picture for each pair of them.

    Attributes:
        heading: what all its pictures have in common.
        tiles: the files by the labels of their column and row.
    """

    heading: str
    tiles: Tiles = field(default_factory=dict)

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
    further keys make pages. Of one key, the pictures are the rows and the inputs are columns beside it.
    """
    if not any(folder.glob(f"*/{FILES}")):
        return []
    drawn = []
    for number, page in enumerate(pages_of(results, folder)):
        path = folder / (SHEET_FILE if not number else SHEET_FILE.replace(".png", f"-{number + 1}.png"))
        draw_page(page).save(path, optimize=True)
        drawn.append((path, f"Pictures: {page.heading}" if page.heading else "The pictures of each point"))
    return drawn


def pages_of(results: Results, folder: Path) -> list[Page]:
    """Arrange the pictures of the points, and of the inputs, on pages."""
    records = {path: record for path, record in load_all(folder).items() if record.finished}
    keys = _axes(results, [*records.values()])
    inputs = {name: _pictures(files) for name, files in files_of_inputs(folder).items()}
    inputs = {name: pictures for name, pictures in inputs.items() if pictures}
    pages: dict[str, Page] = {}
    if len(keys) < 2 and inputs:
        _add_inputs(pages.setdefault("", Page("")), inputs)
    for path, record in records.items():
        labels = [f"{key}={as_text(results.value(record, key)) or MISSING}" for key in keys]
        for picture, file in _pictures(files_of_run(path)).items():
            column, row, *rest = [*(labels or [record.name]), picture]
            page = pages.setdefault(", ".join(rest), Page(", ".join(rest)))
            page.tiles[column, row] = file
    if len(keys) >= 2 and inputs:
        _add_inputs(pages.setdefault("inputs", Page("the inputs")), inputs)
    return list(pages.values())


def _add_inputs(page: Page, inputs: Mapping[str, Mapping[str, Path]]) -> None:
    for name, pictures in inputs.items():
        for picture, file in pictures.items():
            page.tiles[name, picture] = file


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
    tiles = {place: _tile(path, side) for place, path in page.tiles.items()}
    width = max(tile.width for tile in tiles.values())
    heights = [max(tile.height for (_, r), tile in tiles.items() if r == row) for row in page.rows]
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
            if (tile := tiles.get((column, row))) is None:
                pen.rectangle((x, y, x + width - 1, y + height - 1), _EMPTY)
            else:
                sheet.paste(tile, (x + (width - tile.width) // 2, y))
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
