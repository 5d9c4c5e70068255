"""How figures look in a paper: vectors as wide as a column, in letters of the text's size, without titles."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mecha_exp.report.figures.style import NOTE
from mecha_exp.report.table import distinct

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("pdf", "svg")
_PAGE_LETTERS = 10.0  # points, of figures on the page of a sweep
_PART_OF_HEIGHT = 0.62  # of the page's figures, which a column keeps at their size of letters
_LETTER = 0.6  # the mean width of a letter, as a share of its size
_PART_OF_WIDTH = 0.4  # of a column, which names at the side may take
_BETTER = re.compile(r"^(.*?)(?:\s\[[^]]*\])?(?:\n|, )(more|less) is better$", re.DOTALL)
_SUFFIX = re.compile(r" \(\w+\)$")
_KEY = re.compile(r"(?<![^,])[\w./+-]+=")
_ARROWS = {"more": "\N{UPWARDS ARROW}", "less": "\N{DOWNWARDS ARROW}"}


@dataclass(frozen=True)
class Look:
    """The format and the measures of figures for a paper.

    Attributes:
        form: `pdf` or `svg`.
        width: of the column, in inches.
        font_size: of the text, in points.
    """

    form: str
    width: float
    font_size: float

    @property
    def settings(self) -> Any:
        """Settings of matplotlib. Conferences refuse fonts of type 3; the salt gives equal files."""
        thin = 0.8 * self.font_size / _PAGE_LETTERS
        lines = {"lines.linewidth": 1.5 * thin, "axes.linewidth": 0.8 * thin, "lines.markersize": 5 * thin}
        return {"font.size": self.font_size, **lines, "pdf.fonttype": 42, "svg.hashsalt": "mecha_exp"}

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata without the time, so that the same sweep gives the same file."""
        return {"CreationDate": None} if self.form == "pdf" else {"Date": None}

    def letters(self, part: float = 1.0) -> int:
        """How many letters fit a part of the width."""
        return max(8, int(part * self.width * 72 / (_LETTER * self.font_size)))

    def apply(self, figure: Figure) -> list[str]:
        """Fit a figure to the column; returns what its title and its notes said, for the caption."""
        said = list(_moved(figure))
        width, height = figure.get_size_inches()
        lower = max(self.width / width, _PART_OF_HEIGHT * self.font_size / _PAGE_LETTERS)
        figure.set_size_inches(self.width, height * lower)
        for axes in figure.axes:
            self._fit_labels(axes)
            said += self._fit_names(axes)
        _legend_below(figure)
        return said

    def _fit_labels(self, axes: Axes) -> None:
        """Shorten the labels of axes, with an arrow for what is better, and the numbers beside them."""
        place = axes.get_subplotspec()
        columns = place.get_gridspec().ncols if place is not None else 1
        for label, set_label in (
            (axes.get_xlabel(), axes.set_xlabel),
            (axes.get_ylabel(), axes.set_ylabel),
        ):
            lines = _with_arrow(label).splitlines()
            most = self.letters(0.6 / columns)
            set_label("\n".join(part for line in lines for part in textwrap.wrap(line, most)))
        texts = [text.get_text() for text in axes.get_xticklabels()]
        if any(_BETTER.match(text) for text in texts):
            axes.set_xticks(axes.get_xticks(), [_with_arrow(text) for text in texts])
        if columns > 1 and hasattr(axes.xaxis.get_major_locator(), "set_params"):
            with suppress(TypeError, AttributeError):  # ticks at given places stay
                axes.locator_params(axis="x", nbins=3)

    def _fit_names(self, axes: Axes) -> list[str]:
        """Shorten names beside an axis to values alone; returns what they leave to the caption."""
        names = [text.get_text() for text in axes.get_yticklabels()]
        most = self.letters(_PART_OF_WIDTH)
        if max(map(len, names), default=0) <= most:
            return []
        suffixes = Counter(match[0] for name in names if (match := _SUFFIX.search(name)))
        usual = suffixes.most_common(1)[0][0] if suffixes else ""
        values = [_KEY.sub("", name.removesuffix(usual)).replace(",", ", ") for name in names]
        axes.set_yticks(axes.get_yticks(), distinct(values, most))
        return (
            [f"on{usual.replace('(', '').rstrip(')')} where no split is named"] if len(suffixes) > 1 else []
        )


def _with_arrow(label: str) -> str:
    """The label of a metric with an arrow in place of its unit and of `more is better`."""
    match = _BETTER.match(label)
    return f"{match[1]} {_ARROWS[match[2]]}" if match else label


def _moved(figure: Figure) -> Iterator[str]:
    """Remove titles, notes and legends of one line, and give their texts, without the sweep's name."""
    titles = [axes.get_title() for axes in figure.axes] + [figure.get_suptitle()]
    for axes in figure.axes:
        axes.set_title("")
    figure.suptitle("")
    yield from dict.fromkeys(line for title in titles for line in title.splitlines()[1:])
    for axes in figure.axes:
        for text in [text for text in axes.texts if text.get_gid() == NOTE]:
            yield text.get_text()
            text.remove()
        legend = axes.get_legend()
        if legend is not None and len(legend.get_texts()) == 1:
            yield legend.get_texts()[0].get_text()
            legend.remove()


def _legend_below(figure: Figure) -> None:
    """Move a legend from the side of a figure to below it."""
    for legend in figure.legends[:]:
        handles, texts = legend.legend_handles, [text.get_text() for text in legend.get_texts()]
        heading = legend.get_title().get_text()
        legend.remove()
        figure.legend(
            handles=[handle for handle in handles if handle is not None],
            labels=texts,
            title=heading,
            fontsize="small",
            loc="outside lower center",
            ncols=2,
        )
