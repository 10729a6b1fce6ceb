"""Figures of a report as SVG that takes its colours from the page, so that one drawing serves light and dark.

matplotlib draws with stand-in colours; each is replaced by a CSS variable of bench/report.html.j2. The series colours
there are Okabe and Ito's, which people with colour-blindness tell apart; markers and dashes tell them apart in print.
Every figure keeps the frame it was drawn from, which becomes its CSV.
"""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, MUTED, LINE = "#a0b0d0", "#a0b0d1", "#a0b0d2"
SERIES = [f"#a0b0c{index}" for index in range(8)]
MARKERS, DASHES = "osD^vPX*", ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2))]
LABEL_LENGTH = 52
WIDTH = 9.4  # inches of every figure, so that letters are equally large
STYLE: Any = {  # by name, as in a matplotlibrc
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.parse_math": False,  # a name with dollar signs is a name
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2,
    "lines.markersize": 6,
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """name: of its CSV and anchor; svg: markup without a size of its own; frame: what was drawn; note:
    what a reader has to know of it."""

    name: str
    title: str
    svg: str
    frame: pd.DataFrame
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a panel; low and high are the ends of intervals, where measured."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    is_step: bool = False


def line_panels(
    name: str,
    title: str,
    panels: Mapping[str, Sequence[Line]],
    *,
    x_label: str,
    y_label: str,
    frame: pd.DataFrame,
    note: str = "",
    columns: int = 2,
    level: float | None = None,
    log_x: bool = False,
    y_limits: tuple[float, float] | None = None,
    share_y: bool = True,
) -> Figure:
    """Small multiples: one panel a key, lines of one label in one colour in all of them, one legend below.

    level: a dashed line at this height; log_x: ticks at the measured values, evenly spaced by factor."""
    labels = list(dict.fromkeys(line.label for lines in panels.values() for line in lines))
    styles = dict(zip(labels, itertools.cycle(range(len(SERIES))), strict=False))
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    legend_rows = -(-len(labels) // 2)
    height = 2.9 * rows + 0.27 * legend_rows + 0.5

    def draw(canvas: Canvas) -> None:
        grid = canvas.subplots(rows, columns, squeeze=False, sharey=share_y)
        for axes, (heading, lines) in zip(grid.flat, panels.items(), strict=False):
            axes.set_title(shortened(heading))
            for line in lines:
                _draw_line(axes, line, styles[line.label])
            _finish(axes, lines, x_label=x_label, level=level, log_x=log_x, y_limits=y_limits)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for row in grid:
            row[0].set_ylabel(y_label)
        if len(labels) > 1:
            _legend(canvas, grid.flat[0], labels, styles)

    svg = to_svg(name, draw, height)
    return Figure(name=name, title=title, svg=svg, frame=frame, note=note)


def stacked_bars(
    name: str,
    title: str,
    table: pd.DataFrame,
    *,
    x_label: str,
    frame: pd.DataFrame,
    note: str = "",
) -> Figure:
    """Horizontal bars: a row each, in the order of `table`, made of its columns; its index are the labels."""
    table = table.iloc[::-1]
    labels = [shortened(str(label)) for label in table.index]
    height = 0.34 * len(table) + 1.1 + 0.27 * -(-len(table.columns) // 4)

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        left = [0.0] * len(table)
        for index, part in enumerate(table.columns):
            values = table[part].fillna(0.0).tolist()
            axes.barh(range(len(table)), values, left=left, color=SERIES[index], height=0.68, label=part)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_yticks(range(len(table)), labels)
        axes.set_xlabel(x_label)
        axes.grid(axis="y", visible=False)
        axes.margins(y=0.02)
        canvas.legend(loc="outside lower left", ncols=min(4, len(table.columns)))

    svg = to_svg(name, draw, height)
    return Figure(name=name, title=title, svg=svg, frame=frame, note=note)


def to_svg(name: str, draw: Callable[[Canvas], None], height: float) -> str:
    """What `draw` puts on a canvas `height` inches high, as markup for a page: no size, no fonts, ids
    that no other figure has, colours by CSS variable."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # only for widths: the page's fonts draw it
        canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
        draw(canvas)
        stream = io.StringIO()
        canvas.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(name, stream.getvalue())


def shortened(text: str) -> str:
    """A name that fits beside an axis, and that matplotlib does not take for a hidden label."""
    text = " ".join(text.split()).lstrip("_") or "-"
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= LABEL_LENGTH else f"{text[: LABEL_LENGTH - 1]}…"


def _draw_line(axes: Axes, line: Line, style: int) -> None:
    y = [float("nan") if value is None else value for value in line.y]
    color, dash = SERIES[style], DASHES[style]
    if line.is_step:
        axes.step(line.x, y, where="post", color=color, linewidth=1.4, linestyle=DASHES[style])
        return
    marker = MARKERS[style] if len(y) <= 40 else None
    axes.plot(line.x, y, color=color, linestyle=dash, marker=marker)
    if any(value is not None for value in line.low):
        low = [a if b is None else b for a, b in zip(y, line.low, strict=True)]
        high = [a if b is None else b for a, b in zip(y, line.high, strict=True)]
        axes.fill_between(line.x, low, high, color=color, alpha=0.16, linewidth=0)


def _finish(
    axes: Axes,
    lines: Sequence[Line],
    *,
    x_label: str,
    level: float | None,
    log_x: bool,
    y_limits: tuple[float, float] | None,
) -> None:
    values = sorted({x for line in lines for x in line.x})
    if log_x and values and values[0] > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(values if len(values) <= 8 else values[:: -(-len(values) // 8)])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif all(float(x).is_integer() for x in values):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if level is not None:
        axes.axhline(level, color=MUTED, linewidth=1.2, linestyle=(0, (2, 2)))
    if y_limits is not None:
        axes.set_ylim(*y_limits)
    axes.set_xlabel(x_label)


def _legend(canvas: Canvas, axes: Axes, labels: Sequence[str], styles: Mapping[str, int]) -> None:
    handles = [
        axes.plot([], [], color=SERIES[index], linestyle=DASHES[index], marker=MARKERS[index])[0]
        for index in (styles[label] for label in labels)
    ]
    canvas.legend(handles, [shortened(label) for label in labels], loc="outside lower left", ncols=2)


def _for_page(name: str, svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    view = re.search(r'viewBox="([^"]*)"', head)
    assert view is not None
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)  # the page's
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)  # it would hold for the whole page
    variables = {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)"}
    variables |= {color: f"var(--series-{index})" for index, color in enumerate(SERIES)}
    for color, variable in variables.items():
        body = body.replace(color, variable)
    return f'<svg viewBox="{view[1]}" xmlns:xlink="http://www.w3.org/1999/xlink" aria-hidden="true">{body}'
