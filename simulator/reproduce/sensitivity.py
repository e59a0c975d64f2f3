"""How far a row depends on an input, and which value of it would make the row true."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simulator.reproduce.evaluate import Evaluation
from simulator.reproduce.table import Experiment, Row
from traces.errors import InputError

MAX_SOLVE_STEPS, MAX_REFUSED = 24, 4
SOLVED_WITHIN = 0.005
"""Relative difference at which a row counts as met."""
SOLVE_RANGE = 8.0
"""An input is sought between an eighth and eight times its value."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What one input's value does to one row, all else as declared."""

    input: str
    value: int | float | str
    setting: str
    simulated: float | None
    """None where the point cannot be simulated with this value; `problem` says why."""
    change: float | None
    """Relative to the row as declared; None also where that is 0."""
    problem: str | None = None


def effects(experiment: Experiment, base: Mapping[str, float], overrides: Mapping[str, Any]) -> Iterator[Effect]:
    """Effect of every variation of every input on every simulated row; `base` by setting."""
    for name, given in experiment.inputs.items():
        for value in given.variations:
            evaluation = Evaluation(experiment, {name: value}, overrides)
            for row in experiment.rows:
                if row.setting not in base:
                    continue
                try:
                    simulated = evaluation.value(row)
                except InputError as error:
                    yield Effect(name, value, row.setting, None, None, str(error))
                    continue
                assert simulated is not None
                declared = base[row.setting]
                change = simulated / declared - 1.0 if declared else None
                yield Effect(name, value, row.setting, simulated, change)


def solve(experiment: Experiment, row: Row, name: str) -> float | None:
    """Value of a numeric input at which the row comes to its published figure, all else as declared; None if none.

    Bisection between the declared value and the first of its multiples by √2 that lies beyond the figure: the row is
    taken to be monotone in the input. Whole-number inputs are rounded.
    """
    given = experiment.inputs[name]
    whole = isinstance(given.value, int)

    def excess(value: float) -> float | None:
        try:
            simulated = Evaluation(experiment, {name: round(value) if whole else value}).value(row)
        except InputError:
            return None
        return None if simulated is None else simulated / row.published - 1.0

    start = float(given.value)
    here = excess(start)
    if here is None:
        return None
    if abs(here) <= SOLVED_WITHIN:
        return start
    for factor in (2.0**0.5, 0.5**0.5):
        inside, beyond = start, start * factor
        num_refused = 0
        while 1.0 / SOLVE_RANGE <= beyond / start <= SOLVE_RANGE and num_refused < MAX_REFUSED:
            there = excess(beyond)
            if there is None:  # nothing can be simulated there: half as far
                num_refused += 1
                beyond = (inside + beyond) / 2
            elif (there > 0) != (here > 0):
                return _bisect(excess, inside, beyond, here, whole)
            else:
                inside, beyond = beyond, beyond + (beyond - inside) if num_refused else beyond * factor
    return None


def _bisect(excess: Callable[[float], float | None], inside: float, beyond: float, here: float, whole: bool) -> float:
    for _ in range(MAX_SOLVE_STEPS):
        middle = (inside + beyond) / 2
        value = excess(middle)
        if value is None or (whole and abs(beyond - inside) <= 1):
            break
        if abs(value) <= SOLVED_WITHIN:
            return float(round(middle)) if whole else middle
        inside, beyond = (middle, beyond) if (value > 0) == (here > 0) else (inside, middle)
    middle = (inside + beyond) / 2
    return float(round(middle)) if whole else middle


def derive(experiment: Experiment) -> list[dict[str, Any]]:
    """Each derived input solved from its row again, in the order of the rows: name, value in the table, solved value.

    A later input is solved with the earlier ones as the table holds them.
    """
    return [
        {
            "experiment": experiment.name,
            "input": row.derives,
            "from": row.setting,
            "declared": experiment.inputs[row.derives].value,
            "derived": solve(experiment, row, row.derives),
        }
        for row in experiment.rows
        if row.derives is not None
    ]
