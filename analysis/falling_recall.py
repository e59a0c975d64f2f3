"""Recall that falls where more is fetched: said, with the likely reason, by the sweep's summary and its page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

RECALL_STEP = 0.001
"""Least change of recall that is spoken of."""


def recall_that_falls(line: Iterable[Mapping[str, Any]], selectors: Mapping[str, str]) -> str | None:
    """A clause where rows that differ in the fetch cap alone lose recall from the smallest cap to the largest.

    selectors: by system, where the row does not say. Null where recall does not fall by a thousandth, and where blocks
    are not known to be scored by bounds: then there is no reason to give.
    """
    known = [row for row in line if row["status"] == "ok" and row.get("policy.fetch_cap") and row["recall"] is not None]
    if not known:
        return None
    least, most = (pick(known, key=lambda row: row["policy.fetch_cap"]) for pick in (min, max))
    if round(least["recall"] - most["recall"], 6) < RECALL_STEP:
        return None
    given = least.get("policy.selector")
    if (given if isinstance(given, str) else selectors.get(least["system"])) != "minmax":
        return None
    return (
        f"recall falls from {least['recall']:.3f} at a cap of {least['policy.fetch_cap']:g} to {most['recall']:.3f} "
        f"at {most['policy.fetch_cap']:g}, likely because more fetches displace blocks that were needed often: min/max "
        "scores are bounds (docs/traces.md, Under fetch caps)"
    )
