"""Draws every plot of a results folder and joins them with the findings in one self-contained HTML page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from analysis import page, serving_page, serving_plots, style
from analysis.breakdown import draw_breakdown
from analysis.comparison import draw_comparison
from analysis.heatmap import draw_heatmap, grid_systems
from analysis.load import Run, load_run
from analysis.pareto import draw_pareto
from analysis.response import draw_response
from analysis.roofline import draw_roofline
from analysis.selection import CASE_COLUMNS, CONTEXT_COLUMNS, Case, NotDrawn, split_cases
from traces.errors import InputError, refuse_file, writing

PLOTS: dict[str, Callable[[Case], Figure]] = {
    "comparison": draw_comparison,
    "roofline": draw_roofline,
    "breakdown": draw_breakdown,
    "heatmap": draw_heatmap,
    "response": draw_response,
    "pareto": draw_pareto,
}
FORMATS = ("png", "svg", "pdf")
MAX_HEATMAPS = 3
"""Systems that get a heat map of their own, best first."""
MAX_CASES = 12
"""Models x GPUs x contexts that are drawn; a page with more is not read."""


def plot_run(folder: Path, out: Path | None = None, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Write the plots of a results folder and its report; the paths written, the report last.

    Pictures go to `folder/plots` and the page to `folder/report.html`; with `out`, both go there. Plots that these
    results cannot fill are named in the report with the reason. Serving runs have pictures of their own. Raises
    `InputError` for a folder that is no finished run, an unknown format, or an output that cannot be written.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise InputError(f"plot format {unknown[0] if unknown else 'list'!r} is not one of {', '.join(FORMATS)}")
    if out is not None:
        refuse_file(out)
    run = load_run(folder)
    pictures_folder = folder / "plots" if out is None else out
    if serving_plots.is_serving(run):
        pictures, skipped = _draw_serving(run, formats)
        html = serving_page.render(run, pictures, skipped)
    else:
        sections = [_draw_case(run, index, case, formats) for index, case in enumerate(_drawn_cases(run))]
        dropped = len(split_cases(run.results, run.objective)) - MAX_CASES
        pictures = [picture for section in sections for picture in section.pictures]
        html = page.render(run, sections, max(0, dropped))
    report_path = (folder if out is None else out) / "report.html"
    written: list[Path] = []
    for picture in pictures:
        for suffix in formats:
            path = pictures_folder / f"{picture.name}.{suffix}"
            written.append(_write(path, picture.renderings[suffix]))
    _write(report_path, html.encode())
    return [*written, report_path]


def _draw_serving(run: Run, formats: Sequence[str]) -> tuple[list[page.Picture], list[tuple[str, str]]]:
    """Pictures of a serving run, and those that it cannot fill with the reason of each."""
    pictures, skipped = [], []
    for name, draw in serving_plots.drawings(run).items():
        try:
            figure = draw()
        except NotDrawn as reason:
            skipped.append((name, str(reason)))
            continue
        renderings = {suffix: _rendered(figure, suffix) for suffix in dict.fromkeys(("png", *formats))}
        pictures.append(page.Picture(name, renderings))
    return pictures, skipped


def plot_one(folder: Path, name: str) -> list[Path]:
    """Write one plot (a key of `PLOTS`) of a results folder to `folder/plots`; cases that cannot fill it have none.

    Raises `InputError` as `plot_run`.
    """
    run = load_run(folder)
    written = []
    for case in _drawn_cases(run):
        with suppress(NotDrawn):
            label = _case_label(run, case)
            path = folder / "plots" / (f"{name}--{_slug(label)}.png" if label else f"{name}.png")
            written.append(_write(path, _rendered(PLOTS[name](case), "png")))
    return written


def _drawn_cases(run: Run) -> list[Case]:
    return split_cases(run.results, run.objective)[:MAX_CASES]


def _draw_case(run: Run, index: int, case: Case, formats: Sequence[str]) -> page.Section:
    pictures, skipped = [], []
    label = _case_label(run, case)
    wide = _over_contexts(run, case)
    already = [_over_contexts(run, earlier).rows.index for earlier in _drawn_cases(run)[:index]]
    for name, draw in _drawings(case):
        if name == "response" and any(rows.equals(wide.rows.index) for rows in already):
            continue
        try:
            figure = draw(wide if name == "response" else case)
        except NotDrawn as reason:
            skipped.append((name, str(reason)))
            continue
        stem = name if not label else f"{name}--{_slug(label)}"
        # Each rendering lays the axes out anew and may move them by a pixel: one per format serves file and page.
        renderings = {suffix: _rendered(figure, suffix) for suffix in dict.fromkeys(("png", *formats))}
        pictures.append(page.Picture(stem, renderings))
    return page.Section(label, case, pictures, skipped)


def _drawings(case: Case) -> list[tuple[str, Callable[[Case], Figure]]]:
    """Name and function of each plot; after the best system's heat map those of the next ones."""
    drawings: list[tuple[str, Callable[[Case], Figure]]] = []
    for name, draw in PLOTS.items():
        drawings.append((name, draw))
        if name == "heatmap":
            with suppress(NotDrawn):
                further = grid_systems(case)[1:MAX_HEATMAPS]
                drawings += [(f"{name}-{_slug(system)}", partial(draw_heatmap, system=system)) for system in further]
    return drawings


def _over_contexts(run: Run, case: Case) -> Case:
    """The case with the other contexts that were run: context is an axis of the response lines."""
    columns = [c for c in CASE_COLUMNS if c not in CONTEXT_COLUMNS]
    for wide in split_cases(run.results, run.objective, columns):
        if case.rows.index[0] in wide.rows.index:
            return wide
    return case


def _case_label(run: Run, case: Case) -> str:
    """What sets a case apart from the run's others; empty where it is the only one."""
    varied = [c for c in CASE_COLUMNS if run.results[c].nunique(dropna=False) > 1]
    return ", ".join(str(case.rows[c].iloc[0]) for c in varied)


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")


def _rendered(figure: Figure, suffix: str) -> bytes:
    """The picture's bytes, without the date and software that a backend would add (PNG: the same for the same run)."""
    metadata: dict[str, dict[str, None]] = {
        "png": {"Software": None},
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
    }
    buffer = io.BytesIO()
    with style.applied():
        figure.savefig(buffer, format=suffix, metadata=metadata[suffix])
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> Path:
    """Write a file, whole or not at all, into a folder that is made for it. Raises WriteError."""
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    return path
