"""What `oasis-sim reproduce` prints: per experiment its rows, its inputs, what each input does, and the misses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from oasis_sim.output import console, number
from simulator.catalog import distinct_figures, load_hardware
from simulator.reproduce.report import TARGET, Need, Result, RowResult, predicted_met
from simulator.reproduce.table import Experiment

Document = Mapping[str, Any]
_STYLES = {"met": "green", "missed": "bold red", "not simulated": "dim"}


def print_tables(results: Sequence[Result], steps: Sequence[Document], overrides: Mapping[str, Any]) -> None:
    """Everything, then how many predicted rows are within the target and how many inputs are free."""
    out = console()
    if overrides:
        setting = ", ".join(f"{key} {value}" for key, value in overrides.items())
        out.print(f"Another setting than the published one ({setting}): no published figure to compare with.\n")
    for result in results:
        _print_experiment(out, result, overrides)
    if steps:
        _print_steps(out, steps)
    if not overrides and results:
        met, predicted = map(sum, zip(*(predicted_met(result.rows) for result in results), strict=True))
        free = sum(result.experiment.num_free_inputs for result in results)
        derived = sum(row.row.derives is not None for result in results for row in result.rows)
        out.print(
            f"[bold]{met} of {predicted} predicted rows[/bold] of the publication within {TARGET:.0%}; {free} free "
            f"inputs, {derived} of them derived from fitted rows."
        )


def _print_experiment(out: Console, result: Result, overrides: Mapping[str, Any]) -> None:
    experiment = result.experiment
    out.print(f"[bold]{experiment.title}[/bold]  ({experiment.name}; {experiment.source})")
    out.print(Padding(_rows_table(result.rows, bool(overrides)), (0, 0, 0, 2), expand=False))
    if result.batches:
        sizes = ", ".join(f"{name} {size}" for name, size in result.batches.items())
        out.print(Padding(f"requests in flight: {sizes}", (0, 0, 0, 2), expand=False), style="dim")
    if experiment.inputs:
        out.print()
        out.print(Padding(_inputs_table(experiment, overrides), (0, 0, 0, 2), expand=False))
        for line in catalog_lines(experiment, overrides):
            out.print(Padding(line, (0, 0, 0, 2), expand=False), style="dim")
    if result.effects:
        out.print()
        out.print(Padding(_effects_table(result), (0, 0, 0, 2), expand=False))
        for line in dict.fromkeys(f"×: {effect.problem}" for effect in result.effects if effect.problem):
            out.print(Padding(line, (0, 0, 0, 2), expand=False), style="dim")
    for need in result.needs:
        out.print(Padding(_need_line(experiment, need), (0, 0, 0, 2), expand=False))
    out.print()


def _table(title: str | None = None) -> Table:
    return Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left",
        title_style="bold",
    )  # fmt: skip


def _rows_table(rows: Sequence[RowResult], other: bool) -> Table:
    table = _table()
    table.add_column("", justify="right")
    table.add_column("setting", overflow="fold")
    for title in ("published", "simulated", "error"):
        if not (other and title != "simulated"):
            table.add_column(title, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("", overflow="fold")
    for place, result in enumerate(rows, start=1):
        figures = [number(result.row.published), number(result.simulated), _percent(result.error)]
        shown = figures[1:2] if other else figures
        verdict = _verdict(result)
        style = _STYLES.get(result.status, "")
        table.add_row(str(place), result.row.setting, *shown, result.row.unit, verdict, style=style)
    return table


def _verdict(result: RowResult) -> str:
    row = result.row
    if result.status == "not simulated":
        return f"not simulated: {result.problem}"
    if result.status == "other setting":
        return ""
    if result.status == "fitted":
        return f"fitted: {row.derives} comes from it" if row.derives else f"fitted: {row.made_from}"
    return "predicted" if result.status == "met" else f"predicted, missed by more than {TARGET:.0%}"


def _inputs_table(experiment: Experiment, overrides: Mapping[str, Any]) -> Table:
    table = _table("Inputs, the same for all rows")
    table.add_column("input", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("says who", no_wrap=True)
    table.add_column("", overflow="fold")
    for key in experiment.published_keys:
        if key in overrides:
            table.add_row(_short(key), _value(overrides[key]), "given", "")
        else:
            table.add_row(_short(key), _value(experiment.settings[key]), "published", "")
    for name, given in experiment.inputs.items():
        if given.key in overrides:
            table.add_row(name, _value(overrides[given.key]), "given", "")
        else:
            table.add_row(name, _value(given.value), given.origin, given.reason)
    return table


def catalog_lines(experiment: Experiment, overrides: Mapping[str, Any]) -> list[str]:
    """How much of the hardware profile nobody measured."""
    name = overrides.get("hardware", experiment.settings.get("hardware"))
    if name is None:
        return []
    figures = distinct_figures(load_hardware(name))
    assumed = sum(figure.assumption for figure in figures)
    return [f"profile {name}: {assumed} of its {len(figures)} figures are assumptions with a reason, none fitted here"]


def _effects_table(result: Result) -> Table:
    """One line per varied value, one column per simulated row (by its number): relative change."""
    settings = list(dict.fromkeys(effect.setting for effect in result.effects))
    table = _table("What each input does to a row, all else as above")
    table.add_column("input", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for place, row in enumerate(result.experiment.rows, start=1):
        if row.setting in settings:
            table.add_column(f"row {place}", justify="right", no_wrap=True)
    by_variation: dict[tuple[str, Any], dict[str, str]] = {}
    for effect in result.effects:
        cells = by_variation.setdefault((effect.input, effect.value), {})
        cells[effect.setting] = "×" if effect.change is None else _percent(effect.change)
    for (name, value), cells in by_variation.items():
        table.add_row(name, _value(value), *(cells[setting] for setting in settings))
    return table


def _need_line(experiment: Experiment, need: Need) -> str:
    if need.value is None:
        return f"[bold]{need.setting}[/bold] cannot be met by any {need.input} within a factor of eight."
    line = (
        f"[bold]{need.setting}[/bold] would need {need.input} {_value(need.value)} instead of "
        f"{_value(experiment.inputs[need.input].value)}"
    )
    moved = [f"{setting} {_percent(error)}" for setting, error in need.others.items() if abs(error) > TARGET]
    return f"{line}; then missed: {', '.join(moved)}." if moved else f"{line}."


def _print_steps(out: Console, steps: Sequence[Document]) -> None:
    table = _table()
    table.add_column("setting")
    for title in ("measured", "simulated", "error"):
        table.add_column(title, justify="right")
    table.add_column("unit")
    table.add_column("")
    for row in steps:
        verdict = "predicted" if row["status"] == "met" else f"predicted, missed by more than {TARGET:.0%}"
        figures = (number(row["published"]), number(row["simulated"]), _percent(row["error"]))
        table.add_row(row["setting"], *figures, row["unit"], verdict, style=_STYLES[row["status"]])
    out.print("[bold]Decode step of Qwen3-8B's geometry, measured on an H200[/bold]  (decode-step-h200)")
    out.print(Padding(table, (0, 0, 0, 2), expand=False))
    note = "kernel times alone are inputs (profile h200-sxm); what they do beside each other is predicted"
    out.print(Padding(note, (0, 0, 0, 2), expand=False), style="dim")
    out.print()


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:+.1f} %"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e4 else f"{value:,.4g}" if value < 1e6 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _short(key: str) -> str:
    return key.rpartition(".")[2].replace("_", " ")
