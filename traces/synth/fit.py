"""From statistics to a process: every block has a level, plus noise of unit variance with two time scales.

score of block b at step t = level_b(t) + z_b(t). Levels: a fixed one of each sink block, one by age for recent blocks,
one drawn from the popularity curve for all others. z is white noise + a fast + a slow autoregressive part, in shares
that depend on the level (popular blocks are the steadier ones). The K best of a step are the blocks above a threshold,
and a block's scores at two steps are bivariate normal, so that every fit is a closed form.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from traces.synth.ages import age_slope, mean_octave
from traces.synth.drafts import DraftNoise, draft_noise, steadiness
from traces.synth.levels import Nodes, fit_levels
from traces.synth.normal import FloatArray, both_above_fast, threshold_of
from traces.synth.statistics import DraftState, HeadStatistics, TraceStatistics

FAST_STEPS = (2.0, 4.0, 8.0)
SLOW_STEPS = (16.0, 32.0, 64.0, 128.0)
"""Time constants tried for the two parts."""
_CORRELATIONS = np.append(1.0 - np.linspace(1.0, 0.05, 39) ** 2, [0.9996, 1.0])
_NOISE_ROUNDS, _DRAFT_ROUNDS = 3, 2


@dataclass(frozen=True, slots=True)
class Bias:
    """How much more two sets overlap in a run than the closed form says, mean over heads: what to take from the
    measured overlaps before fitting them."""

    persistence: FloatArray
    """[K, lags]."""
    drafts: Mapping[tuple[int, str, str], FloatArray]
    """[K] by distance, kind and field of DraftState; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class HeadProcess:
    """Parameters of one KV head, in units of the noise's standard deviation."""

    nodes: Nodes
    noise_levels: FloatArray
    """Ascending levels at which the next two are given."""
    fast: FloatArray
    """Variance of the fast part."""
    slow: FloatArray
    """Variance of the slow part; white noise has the rest."""
    fast_steps: float
    slow_steps: float
    level_correlation: float
    """Of the levels of neighbouring blocks."""
    drafts: tuple[dict[str, DraftNoise], ...]
    mass_follows: float
    """How much of the noise of its score a block's mass has."""
    mass_noise: float
    """Standard deviation of what else separates a block's mass from its score; fixed per block."""
    sink_mass: float
    open_mass: float
    octaves_by_rank: FloatArray
    set_sizes: FloatArray
    """Numbers of the best blocks by score at which `held` is given; empty where it was not measured."""
    held: FloatArray
    """Share of the mass between sink and open block that these hold, the sink not counted; ascending, below 1."""
    source_blocks: int
    """Blocks of the context that `held` is of."""

    age_slope: float = 0.0
    """Level per octave of age beyond the measured ones."""

    @property
    def sink_levels(self) -> FloatArray:
        return self.nodes.levels[: self.nodes.num_sinks]

    @property
    def age_spread(self) -> float:
        """Standard deviation of recent blocks' levels around the trend."""
        return float(np.std(self.nodes.ages - self.nodes.age_trend()))

    def level_at(self, age: FloatArray, popularity: FloatArray) -> FloatArray:
        """Levels of blocks beyond the recent ones. age: in blocks, whole numbers. popularity: normal score of a block's
        place among those of its octave, high where popular; between measured places linear, beyond them the tail goes
        on along its slope. Blocks older than any measured are those of the last octave, moved by the slope."""
        nodes = self.nodes
        levels, weights = (nodes.by_octave(of[nodes.middle]) for of in (nodes.levels, nodes.weight))
        octave_of = np.searchsorted([last for _, last in nodes.spans[:-1]], age, side="right")
        out = self.age_slope * np.maximum(np.log2(age + 1.0) - mean_octave(*nodes.spans[-1]), 0.0)
        out[age < nodes.spans[-1][1]] = 0.0
        for octave, (of_octave, weight) in enumerate(zip(levels, weights, strict=True)):
            here = octave_of == octave
            known = threshold_of(1.0 - (np.cumsum(weight) - weight / 2) / weight.sum())
            out[here] += _extended(-popularity[here], known, of_octave)
        return out

    def noise_shares(self, levels: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Variances of the fast and the slow part of blocks with these levels."""
        return np.interp(levels, self.noise_levels, self.fast), np.interp(levels, self.noise_levels, self.slow)

    def correlation(self, levels: FloatArray, lag: float) -> FloatArray:
        """Autocorrelation of the noise at a lag ≥ 1; at 0 that of its steady parts."""
        fast, slow = self.noise_shares(levels)
        correlation: FloatArray = fast * np.exp(-lag / self.fast_steps) + slow * np.exp(-lag / self.slow_steps)
        return correlation

    def overlap(self, sizes: FloatArray, thresholds: FloatArray, lag: float, block_size_tokens: int) -> FloatArray:
        """Expected share of the K best that are among the K best `lag` steps later, [K]."""
        levels = self.nodes.aged(lag / block_size_tokens)
        both = both_above_fast(thresholds[:, None] - levels[None, :], self.correlation(levels, lag)[None, :])
        overlap: FloatArray = (both * self.nodes.weight).sum(axis=1) / sizes
        return overlap


class HeadFit:
    """Fits one head: levels from who is in the sets, noise from how sets persist, drafts from how they overlap."""

    def __init__(self, statistics: TraceStatistics, head: HeadStatistics) -> None:
        self._statistics, self._head = statistics, head
        self.sizes = np.array(statistics.set_sizes, dtype=np.float64)
        self.lags = np.array(statistics.lags, dtype=np.float64)
        self._nodes = fit_levels(statistics, head, self.sizes)
        self._thresholds = self._nodes.thresholds(self.sizes)
        # Ageing moves slowly: one curve serves three lags, and the rounds of `process` take out the difference.
        aged = [self._nodes.aged(lag / statistics.block_size_tokens) for lag in self.lags[::3]]
        curves = [_overlap_curve(levels, self._nodes, self._thresholds) for levels in aged]
        self._curves = [curves[i // 3] for i in range(len(self.lags))]
        self._steps: tuple[tuple[float, float], ...] = tuple(itertools.product(FAST_STEPS, SLOW_STEPS))

    def process(self, bias: Bias) -> HeadProcess:
        """The fitted head."""
        statistics, head, lags = self._statistics, self._head, self.lags
        wanted = self._correlations(np.array(head.persistence) - bias.persistence)
        importance = _importance(self._curves[0], self.sizes)
        goal = wanted.copy()
        process = HeadProcess(
            nodes=self._nodes,
            noise_levels=self._thresholds[::-1] + 1e-9 * np.arange(len(self.sizes)),
            fast=np.zeros(len(self.sizes)),
            slow=np.zeros(len(self.sizes)),
            fast_steps=FAST_STEPS[0],
            slow_steps=SLOW_STEPS[0],
            level_correlation=0.0,
            drafts=(),
            mass_follows=1.0,
            mass_noise=0.0,
            sink_mass=head.sink_mass,
            open_mass=head.open_mass,
            octaves_by_rank=np.array(head.octaves_by_rank),
            age_slope=self._age_slope(),
            set_sizes=self.sizes if head.true_coverage else np.empty(0),
            held=_held_shares(head),
            source_blocks=statistics.num_blocks,
        )
        parts = np.zeros((len(self.sizes), 2))
        for _ in range(_NOISE_ROUNDS):
            steps, parts = _fit_noise(goal, importance, lags, self._steps)
            self._steps = (steps,)
            process = replace(
                process, fast=parts[::-1, 0], slow=parts[::-1, 1], fast_steps=steps[0], slow_steps=steps[1]
            )
            size = statistics.block_size_tokens
            reached = np.stack([process.overlap(self.sizes, self._thresholds, lag, size) for lag in lags], axis=1)
            goal = np.clip(goal + 0.8 * (wanted - self._correlations(reached)), -0.5, 1.0)
        _, spread = self._nodes.middle_moments()
        drafts = tuple(self._draft_rows(j, states, process, bias) for j, states in enumerate(head.drafts, start=1))
        follows, noise = _mass_of_score(statistics, head, self.sizes, spread)
        return replace(
            process,
            level_correlation=_level_correlation(head, self._nodes, spread),
            drafts=drafts,
            mass_follows=follows,
            mass_noise=noise,
        )

    def _age_slope(self) -> float:
        nodes, middle = self._nodes, self._nodes.middle
        levels, groups = nodes.by_octave(nodes.levels[middle]), nodes.by_octave(nodes.weight[middle])
        occupancy = nodes.by_octave(np.array(self._head.popularity))
        return age_slope(nodes.spans, levels, groups, occupancy, self._thresholds)

    def _correlations(self, persistence: FloatArray) -> FloatArray:
        """Autocorrelations that give these overlaps, both [K, lags]."""
        return np.stack([_inverted(persistence[:, i], curve) for i, curve in enumerate(self._curves)], axis=1)

    def _draft_rows(
        self,
        distance: int,
        states: Mapping[str, DraftState],
        process: HeadProcess,
        bias: Bias,
    ) -> dict[str, DraftNoise]:
        """All kinds of rows of one distance, right ones first."""
        real = steadiness(process.fast, process.slow, process.fast_steps, process.slow_steps)
        found: dict[str, DraftNoise] = {}
        right: dict[str, FloatArray] | None = None
        for kind in sorted(states, key=lambda kind: kind != "right"):
            corrected = {
                name: np.array(row) - bias.drafts.get((distance, kind, name), 0.0)
                for name, row in states[kind].model_dump().items()
                if row
            }
            found[kind], shared = draft_noise(corrected, lambda rows: self._by_level(rows, process), real, right)
            if kind == "right":
                right = shared
        return found

    def _by_level(self, overlaps: FloatArray, process: HeadProcess) -> FloatArray:
        """Correlations at `process.noise_levels` that give these overlaps of a step's sets, [rows, K] both."""
        levels = self._nodes.aged(1 / self._statistics.block_size_tokens)
        above_each = self._thresholds[:, None] - levels[None, :]
        at, following, between = _places(levels, process.noise_levels)
        wanted = self._inverted_rows(overlaps)
        goal = wanted.copy()
        for _ in range(_DRAFT_ROUNDS):
            by_level = goal[:, ::-1]
            correlation = by_level[:, at] * (1.0 - between) + by_level[:, following] * between
            both = both_above_fast(above_each[None], np.clip(correlation, 0.0, 1.0)[:, None, :])
            reached = (both @ self._nodes.weight) / self.sizes
            goal = np.clip(goal + 0.8 * (wanted - self._inverted_rows(reached)), -0.5, 1.0)
        return goal[:, ::-1]

    def _inverted_rows(self, overlaps: FloatArray) -> FloatArray:
        return np.stack([_inverted(row, self._curves[0]) for row in overlaps])


def _extended(at: FloatArray, known: FloatArray, values: FloatArray) -> FloatArray:
    """Falling values between known places, ascending; beyond them they go on along the slope of the last few."""
    out = np.interp(at, known, values)
    for edge, inner in ((0, min(4, len(known) - 1)), (len(known) - 1, max(0, len(known) - 5))):
        if edge != inner:
            slope = min((values[edge] - values[inner]) / (known[edge] - known[inner]), 0.0)
            beyond = at < known[0] if edge == 0 else at > known[-1]
            out = np.where(beyond, values[edge] + slope * (at - known[edge]), out)
    return out


def _overlap_curve(levels: FloatArray, nodes: Nodes, thresholds: FloatArray) -> FloatArray:
    """Overlap of two sets of size K by the correlation of the noise: [K, correlations], rising to about 1."""
    both = both_above_fast((thresholds[:, None] - levels[None, :])[..., None], _CORRELATIONS[None, None, :])
    curve = (both * nodes.weight[None, :, None]).sum(axis=1)
    rising: FloatArray = np.maximum.accumulate(curve / curve[:, -1:], axis=1) + 1e-12 * np.arange(len(_CORRELATIONS))
    return rising


def _places(levels: FloatArray, known: FloatArray) -> tuple[NDArray[np.intp], NDArray[np.intp], FloatArray]:
    """Indices of the known levels below and above each level, and how far it is on the way."""
    at = np.clip(np.searchsorted(known, levels, side="right") - 1, 0, max(0, len(known) - 2))
    following = np.minimum(at + 1, len(known) - 1)
    between = (levels - known[at]) / np.maximum(known[following] - known[at], 1e-12)
    return at, following, np.clip(between, 0.0, 1.0)


def _inverted(overlaps: FloatArray, curve: FloatArray) -> FloatArray:
    """Correlation that gives each K's overlap; below a curve's start it goes on linearly, so that no bias arises."""
    found = np.array([np.interp(o, c, _CORRELATIONS) for o, c in zip(overlaps, curve, strict=True)])
    slope = np.maximum(curve[:, 8] - curve[:, 0], 1e-3) / (_CORRELATIONS[8] - _CORRELATIONS[0])
    below = np.minimum(overlaps - curve[:, 0], 0.0) / slope
    inverted: FloatArray = np.maximum(found + below, -0.5)
    return inverted


def _importance(curve: FloatArray, sizes: FloatArray) -> FloatArray:
    """Weight of each K in a mean of correlations: blocks whose membership the correlation decides."""
    return sizes * np.maximum(curve[:, -1] - curve[:, 0], 1e-6)


def _fit_noise(
    wanted: FloatArray, importance: FloatArray, lags: FloatArray, tried: Sequence[tuple[float, float]]
) -> tuple[tuple[float, float], FloatArray]:
    """The best of the pairs of time constants for all K, and the shares (fast, slow) of each K, [K, 2]. Lag 1 counts
    most."""
    root = lags**-0.25
    root[0] *= 4.0
    best: tuple[float, tuple[float, float], FloatArray] = (np.inf, (0.0, 0.0), np.zeros((0, 2)))
    for steps in tried:
        basis = np.stack([np.exp(-lags / constant) for constant in steps])
        parts = np.array([_shares(basis * root, row * root) for row in wanted])
        loss = float((importance * (((parts @ basis - wanted) * root) ** 2).sum(axis=1)).sum())
        if loss < best[0]:
            best = (loss, steps, parts)
    return best[1], best[2]


def _shares(basis: FloatArray, target: FloatArray) -> tuple[float, float]:
    """Least squares of two shares that are ≥ 0 and sum to ≤ 1."""
    gram, moment = basis @ basis.T, basis @ target
    determinant = gram[0, 0] * gram[1, 1] - gram[0, 1] ** 2
    candidates = []
    if determinant > 1e-12:
        free = np.array(
            [gram[1, 1] * moment[0] - gram[0, 1] * moment[1], gram[0, 0] * moment[1] - gram[0, 1] * moment[0]]
        )
        candidates.append(free / determinant)
    candidates.append(np.array([np.clip(moment[0] / gram[0, 0], 0.0, 1.0), 0.0]))
    candidates.append(np.array([0.0, np.clip(moment[1] / gram[1, 1], 0.0, 1.0)]))
    difference = basis[0] - basis[1]
    mix = np.clip(difference @ (target - basis[1]) / max(difference @ difference, 1e-12), 0.0, 1.0)
    candidates.append(np.array([mix, 1.0 - mix]))
    valid = [c for c in candidates if (c >= 0).all() and c.sum() <= 1.0 + 1e-9]
    fast, slow = min(valid, key=lambda c: float(c @ gram @ c - 2 * c @ moment))
    return float(fast), float(slow)


def _mass_of_score(
    statistics: TraceStatistics, head: HeadStatistics, sizes: FloatArray, spread: float
) -> tuple[float, float]:
    """(follows, noise): log mass = level + follows · score noise + noise · N(0, 1), up to a monotone map.

    Where it was measured what the K best by score hold (`held`), that says how mass follows the score of the step; no
    other noise is needed, and `traces.synth.calibrate` finds `follows` (docs/decisions.md, synthesised traces). Else
    all of the score's noise, and what |true ∩ exact| leaves, as if levels were normal of variance `spread`:
    correlation² (1 + spread) (spread + 1 + noise²) = (spread + 1)².
    """
    if head.true_coverage:
        return 0.0, 0.0
    if not head.exact_overlap:
        return 1.0, 0.0
    share = sizes / statistics.num_blocks
    curve = both_above_fast(threshold_of(share)[:, None], _CORRELATIONS[None, :]) / share[:, None]
    shared = float(np.clip(np.average(_inverted(np.array(head.exact_overlap), curve), weights=sizes), 0.1, 0.999))
    total = ((spread + 1.0) / shared) ** 2 / (1.0 + spread)
    return 1.0, float(np.sqrt(max(0.0, total - spread - 1.0)))


def _held_shares(head: HeadStatistics) -> FloatArray:
    """Of the mass between sink and open block, what the K best by score hold, by K; empty where not measured."""
    if not head.true_coverage:
        return np.empty(0)
    sink = head.sink_mass * np.array([row[0] for row in head.sink])
    between = max(1.0 - head.sink_mass - head.open_mass, 1e-9)
    held: FloatArray = np.clip((np.array(head.true_coverage) - sink) / between, 0.0, 1.0)
    return np.maximum.accumulate(held)


def _level_correlation(head: HeadStatistics, nodes: Nodes, spread: float) -> float:
    """Correlation of neighbours' levels, from P(b + 1 in the set | b in it) as if scores were normal."""
    found = []
    base = np.array(head.popularity) @ nodes.weight[nodes.middle] / nodes.weight[nodes.middle].sum()
    for share, given in zip(base, head.adjacency, strict=True):
        if 0.02 < share < 0.98 and given > share:
            joint = both_above_fast(threshold_of(share), _CORRELATIONS) / share
            found.append(float(np.interp(given, joint, _CORRELATIONS)))
    if not found or spread <= 0:
        return 0.0
    return float(np.clip(np.mean(found) * (1.0 + spread) / spread, 0.0, 0.95))
