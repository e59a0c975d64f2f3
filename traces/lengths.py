"""How long prompts and outputs are: distributions to draw from, and reasoning workloads put together from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from traces.errors import InputError
from traces.workload import FloatArray, IntArray, Workload


def _phi(z: float) -> float:
    """Distribution function of the standard normal."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _check_range(kind: str, min_tokens: int, max_tokens: int) -> None:
    if not 1 <= min_tokens <= max_tokens:
        raise InputError(f"{kind}: expected 1 <= min_tokens <= max_tokens, got {min_tokens} and {max_tokens}")


class LengthDistribution(Protocol):
    """A distribution of token counts >= 1."""

    @property
    def mean_tokens(self) -> float: ...

    def sample(self, num_requests: int, rng: np.random.Generator) -> IntArray:
        """int64 [num_requests]; equal generators give equal samples."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def __post_init__(self) -> None:
        _check_range("Fixed", self.tokens, self.tokens)

    @property
    def mean_tokens(self) -> float:
        return float(self.tokens)

    def sample(self, num_requests: int, rng: np.random.Generator) -> IntArray:
        return np.full(num_requests, self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers from min_tokens to max_tokens, both included."""

    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        _check_range("Uniform", self.min_tokens, self.max_tokens)

    @property
    def mean_tokens(self) -> float:
        return (self.min_tokens + self.max_tokens) / 2

    def sample(self, num_requests: int, rng: np.random.Generator) -> IntArray:
        return rng.integers(self.min_tokens, self.max_tokens, num_requests, np.int64, endpoint=True)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lognormal lengths, rounded, with both tails put on the bounds.

    An output that would be longer than `max_tokens` is cut there, as generation is: the share above the bound becomes
    outputs of exactly that length.
    """

    median_tokens: float
    """Of the distribution before it is bounded."""
    sigma: float
    """Standard deviation of ln(tokens)."""
    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        _check_range("LogNormal", self.min_tokens, self.max_tokens)
        if not (math.isfinite(self.median_tokens) and self.median_tokens > 0):
            raise InputError(f"LogNormal: median_tokens must be finite and > 0, got {self.median_tokens}")
        if not 0 < self.sigma <= 10:
            raise InputError(f"LogNormal: sigma must be > 0 and <= 10, got {self.sigma}")

    @classmethod
    def with_mean(cls, mean_tokens: float, sigma: float, min_tokens: int, max_tokens: int) -> LogNormal:
        """The one whose mean *after* bounding is `mean_tokens`: what a benchmark reports, cut outputs included.

        Raises InputError when the mean is not strictly between the bounds.
        """
        if not min_tokens < mean_tokens < max_tokens:
            raise InputError(
                f"LogNormal: mean_tokens = {mean_tokens} must lie between min_tokens = {min_tokens} and "
                f"max_tokens = {max_tokens}"
            )
        low, high = math.log(min_tokens) - 40 * sigma, math.log(max_tokens) + 40 * sigma
        for _ in range(200):
            middle = (low + high) / 2
            if cls(math.exp(middle), sigma, min_tokens, max_tokens).mean_tokens < mean_tokens:
                low = middle
            else:
                high = middle
        return cls(math.exp((low + high) / 2), sigma, min_tokens, max_tokens)

    @property
    def mean_tokens(self) -> float:
        """Closed form of E[min(max(X, a), b)] before rounding: a F(a) + b (1 - F(b)) + the part between."""
        mu, a, b = math.log(self.median_tokens), self.min_tokens, self.max_tokens
        below, above = (math.log(a) - mu) / self.sigma, (math.log(b) - mu) / self.sigma
        between = math.exp(mu + self.sigma**2 / 2) * (_phi(above - self.sigma) - _phi(below - self.sigma))
        return a * _phi(below) + b * _phi(-above) + between

    def sample(self, num_requests: int, rng: np.random.Generator) -> IntArray:
        tokens = rng.lognormal(math.log(self.median_tokens), self.sigma, num_requests)
        return np.rint(np.clip(tokens, self.min_tokens, self.max_tokens)).astype(np.int64)


class Empirical:
    """Draws with replacement from lengths that were observed, e.g. `Empirical(workload.output_tokens)`."""

    def __init__(self, tokens: IntArray) -> None:
        if len(tokens) == 0 or int(np.min(tokens)) < 1:
            raise InputError("Empirical: needs at least one length, each >= 1 token")
        self._tokens = np.array(tokens, np.int64)

    @property
    def mean_tokens(self) -> float:
        return float(self._tokens.mean())

    def sample(self, num_requests: int, rng: np.random.Generator) -> IntArray:
        return rng.choice(self._tokens, num_requests)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths of a kind of request, drawn independently."""

    prompt: LengthDistribution
    output: LengthDistribution
    source: str
    """Where the figures come from."""
    assumptions: str
    """What of it nobody published."""


_MATH_PROMPT = LogNormal(median_tokens=76.4, sigma=0.573, min_tokens=27, max_tokens=931)
_MATH_PROMPT_SOURCE = (
    "prompts: the 500 problems of MATH-500 in SmolLM2's tokenizer (measured: mean of ln 4.336, standard deviation "
    "0.573, 27 to 931 tokens, mean 94)"
)

LENGTHS = {
    "reasoning": Lengths(
        _MATH_PROMPT,
        LogNormal.with_mean(12_000, sigma=0.6, min_tokens=1, max_tokens=32_768),
        f"{_MATH_PROMPT_SOURCE}; outputs: mean 12K tokens per AIME 2025 question for DeepSeek-R1 (model card of "
        "DeepSeek-R1-0528); limit 32,768, the output length that Qwen3's model cards recommend for most queries",
        "lognormal shape, sigma 0.6, prompt and output independent, no chat template, R1's mean under Qwen3's limit",
    ),
    "reasoning-long": Lengths(
        _MATH_PROMPT,
        LogNormal.with_mean(23_000, sigma=0.6, min_tokens=1, max_tokens=65_536),
        f"{_MATH_PROMPT_SOURCE}; outputs: mean 23K tokens per AIME 2025 question and limit 64K for DeepSeek-R1-0528 "
        "(its model card)",
        "lognormal shape, sigma 0.6, prompt and output independent, no chat template",
    ),
}
"""Reasoning: short prompts, outputs of thousands of tokens. No Mooncake or Azure request stands for it."""


def draw_workload(name: str, arrival_s: FloatArray, lengths: Lengths, rng: np.random.Generator) -> Workload:
    """One request for each arrival [N], its lengths drawn (all prompts first, then all outputs)."""
    num_requests = len(arrival_s)
    prompt_tokens = lengths.prompt.sample(num_requests, rng)
    return Workload(name, arrival_s, prompt_tokens, lengths.output.sample(num_requests, rng))
