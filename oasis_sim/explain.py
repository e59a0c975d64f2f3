"""Sentences about one row: what binds it, how far it is from the limit, whether its recall is enough."""

from __future__ import annotations

from typing import Any

from oasis_sim.output import milliseconds, number, share

Row = dict[str, Any]

BOUND_NAMES = {
    "hbm": "HBM bandwidth",
    "compute": "compute",
    "h2d": "the host link (H2D)",
    "remote": "the remote link",
    "capacity": "memory capacity",
    "software": "software overhead",
}
CEILINGS = {
    "hbm": "hbm_ceiling_tokens_per_s",
    "compute": "compute_ceiling_tokens_per_s",
    "h2d": "h2d_ceiling_tokens_per_s",
    "remote": "remote_ceiling_tokens_per_s",
}
LABELS = {
    "policy.block_size_tokens": "block",
    "policy.fetch_cap": "fetch cap",
    "policy.lookahead_k": "lookahead",
    "policy.kv_budget_tokens": "budget",
    "placement.host_numa": "NUMA",
    "workload.batch_size": "batch",
    "workload.context_tokens": "context",
}


def label(parameter: str) -> str:
    return LABELS.get(parameter, parameter.rpartition(".")[2].replace("_", " "))


def value(row: Row, parameter: str) -> str:
    given = row.get(parameter)
    if isinstance(given, bool):
        return "yes" if given else "no"
    if isinstance(given, float):
        return f"{given:g}"
    return "–" if given is None else f"{given:,}" if isinstance(given, int) else str(given)


def settings(row: Row, parameters: list[str]) -> str:
    """`fetch cap 0.05, block 16, …` for the parameters that the row's system looks at."""
    return ", ".join(f"{label(name)} {value(row, name)}" for name in parameters if row.get(name) is not None)


def binding(row: Row) -> str:
    """What binds a row and how much of the bound's own rate it reaches."""
    bound = row["bound"]
    sentence = f"bound by {BOUND_NAMES.get(bound, bound)}"
    ceiling = row.get(CEILINGS.get(bound, ""))
    if ceiling:
        reached = row["throughput_tokens_per_s"] / ceiling
        sentence += f": {share(reached)} of the {number(ceiling, 'tokens/s')} that it alone would allow"
    elif row.get("bound_detail"):
        sentence += f": {row['bound_detail']}"
    return sentence


def exposure(row: Row) -> str:
    """How much of the transfer time attention waits for."""
    if not row.get("h2d_bytes_per_token"):
        return "nothing crosses the host link during decode"
    hidden = row.get("hidden_fraction")
    sentence = (
        f"{milliseconds(row['exposed_transfer_s'])} of {milliseconds(row['tpot_mean_s'])} per step wait for blocks"
    )
    if hidden is not None:
        sentence += f"; {share(hidden)} of the transfer time is hidden"
    if row.get("link_utilization") is not None:
        sentence += f"; the link is busy {share(row['link_utilization'])} of the step"
    return sentence


def recall_verdict(row: Row) -> str:
    """Recall against what an admissible point needs."""
    needed, recall = row.get("min_recall"), row["recall"]
    if recall is None:
        return "recall unknown"
    if needed is None:
        return f"recall {recall:.3f}"
    relation, verdict = ("≥", "enough") if recall >= needed else ("<", "not enough")
    return f"recall {recall:.3f} {relation} {needed:.3f}: {verdict}"
