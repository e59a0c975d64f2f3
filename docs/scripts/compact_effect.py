"""What `trace pack --compact` changes in replay: a trace against its compact copy, per predictor, budget and cap.

python docs/scripts/compact_effect.py FULL COMPACT [FULL COMPACT ...]
"""

import sys
from itertools import product

import numpy as np

from simulator.mapping import Mapping
from simulator.replay import replay
from simulator.specs.policy import PolicySpec
from traces.catalog import resolve
from traces.group import TraceGroup
from traces.reader import open_trace

PREDICTORS = ("previous", "draft 1", "draft 2", "draft 4", "oracle")
BUDGETS_TOKENS, FETCH_CAPS = (256, 512, 1024), (0.05, 0.2, 1.0)


def replayed(group: TraceGroup, layers: tuple[int, ...], policy: PolicySpec) -> np.ndarray:
    """Means over steady rows: blocks fetched per step, hit rate, recall."""
    rows = np.array([group.layers(16).index(layer) for layer in layers], np.int32)
    heads = np.arange(group.num_kv_heads, dtype=np.int32)
    demand = replay(group, policy, Mapping("rows", rows, heads, ""), use_cache=False)
    steady = slice(demand.steady_start, demand.steady_stop)
    kept = len(rows) * len(heads)
    hits = demand.hit[steady].sum() / (demand.hit[steady] + demand.missed[steady]).sum()
    return np.array([demand.fetched[steady].sum(axis=1).mean(), hits, demand.recall[steady].mean() / kept * len(rows)])


def main() -> None:
    pairs = list(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    print("| predictor | budget | cap | fetched, full | fetched, compact | hit rate | recall |")
    print("|---|---|---|---|---|---|---|")
    for predictor, budget, cap in product(PREDICTORS, BUDGETS_TOKENS, FETCH_CAPS):
        kind, _, distance = predictor.partition(" ")
        policy = PolicySpec(
            predictor=kind, lookahead_k=int(distance or 1), kv_budget_tokens=budget, fetch_cap=cap, residency="slack"
        )
        found = []
        for full, compact in pairs:
            groups = [open_trace(resolve(name)) for name in (full, compact)]
            first, second = (trace.group(trace.group_names[0]) for trace in groups)
            found.append([replayed(group, second.layers(16), policy) for group in (first, second)])
        full_mean, compact_mean = np.array(found).mean(axis=0)
        changes = compact_mean - full_mean
        print(
            f"| {predictor} | {budget:,} | {cap} | {full_mean[0]:.1f} | {compact_mean[0]:.1f} | "
            f"{100 * full_mean[1]:.1f} % {100 * changes[1]:+.2f} | {100 * full_mean[2]:.1f} % {100 * changes[2]:+.2f} |"
        )


if __name__ == "__main__":
    main()
