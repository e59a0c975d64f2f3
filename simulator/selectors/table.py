"""The selectors: what each ranks blocks by, and what it must read for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True)
class Selector:
    """One way to rank a step's blocks."""

    ranking: str | None
    """The recorded ranking that it is. None: computed (`simulator.selectors.kept`), or no ranking at all."""
    reads: Literal["keys", "attention", "nothing"]
    """keys: compressed keys in HBM, scored with a query. attention: the weights that attention gave to what it read.
    nothing: positions, or what was settled at the end of the prompt."""

    @property
    def keeps(self) -> bool:
        """Ranks without a query, so that it can say what to keep and not what to fetch."""
        return self.ranking is None


SELECTORS: Mapping[str, Selector] = MappingProxyType(
    {
        "minmax": Selector("true", "keys"),
        "mean": Selector("mean", "keys"),
        "exact": Selector("exact", "keys"),
        "accumulated-mass": Selector(None, "attention"),
        "persistence": Selector(None, "attention"),
        "prompt-window": Selector(None, "nothing"),
        "sink-recent": Selector(None, "nothing"),
    }
)
"""Every value of `policy.selector` but `all`, which selects nothing."""
