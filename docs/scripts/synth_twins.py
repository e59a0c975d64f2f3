"""How closely synthesised twins replay: the tables of docs/synth.md.

python docs/scripts/synth_twins.py [--seeds N] [TRACE ...]

Twins of each trace (drafts at budgets of which a compact copy keeps the sets), and, without TRACE, twins made at twice
the context against a recording there: of Gemma at 16K, with the 32K recording's share of right guesses, and of
reasoning at 2K.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simulator.mapping import Mapping
from simulator.policy_composition import resolve_policy
from simulator.replay import replay
from traces.catalog import resolve
from traces.group import TraceGroup
from traces.predicted import set_is_exact
from traces.reader import open_trace
from traces.synth.kinds import with_acceptance
from traces.synth.measure import measure
from traces.synth.synthesise import synthesise

SIZE, LIMIT = 16, 0.05
POLICIES = {
    "on demand": ("retrieval", {}),
    "on demand, cap 0.05": ("retrieval", {"fetch_cap": 0.05, "miss_rule": "attend"}),
    "previous step": ("prefetch-previous", {}),
    "draft k = 1, cap 0.05": ("oasiskv", {}),
    "draft k = 2": ("oasiskv", {"lookahead_k": 2, "fetch_cap": 1.0}),
}
PAIRS = (
    ("gemma3-270m-multi-document-16k-cpu", "gemma3-270m-multi-document-32k-cpu", 8),
    ("smollm2-135m-reasoning-2k-h200", "smollm2-135m-reasoning-4k-h200", None),
)
"""Shorter, longer, twins averaged; None: as many as --seeds says."""
TRACES = (
    "smollm2-135m-reasoning", "smollm2-135m-code-4k-h200", "smollm2-135m-reasoning-4k-h200",
    "smollm2-135m-needle-7k-h200", "smollm2-135m-reasoning-2k-h200", "smollm2-135m-sparse-drafts",
)  # fmt: skip


def recorded(name: str) -> TraceGroup:
    trace = open_trace(resolve(name))
    return trace.group(trace.group_names[0])


def budgets(group: TraceGroup) -> list[int]:
    return [budget for budget in (256, 512, 1024, 2048, 4032) if budget <= SIZE * group.max_ranked_blocks(SIZE)]


def replayed(group: TraceGroup, layers: Sequence[int], policy: str, budget: int) -> np.ndarray:
    """Hit rate, churn and recall on these layers, every head for itself."""
    at = np.array([group.layers(SIZE).index(layer) for layer in layers], np.int32)
    mapping = Mapping("own", at, np.arange(group.num_kv_heads, dtype=np.int32), "")
    system, overrides = POLICIES[policy]
    resolved = resolve_policy(system, {**overrides, "kv_budget_tokens": budget}, int(group.kv_len[0]))
    demand = replay(group, resolved, mapping, use_cache=False)
    return np.array([demand.hit_rate(), demand.churn(), demand.mean_recall()])


def twin(source: TraceGroup, target: TraceGroup, seed: int, folder: str) -> TraceGroup:
    """At the target's context and, where it is another recording, with its share of right guesses."""
    statistics, context = measure(source, SIZE), int(target.kv_len[0])
    if source is not target:
        statistics = with_acceptance(statistics, target.attributes.drafter.acceptance)
    out = Path(folder) / f"{context}-{seed}.zarr"
    layers = source.layers(SIZE)
    made = synthesise(statistics, source.model, context, source.num_positions, seed, out, layers=layers)
    return open_trace(made).group("synthesised")


def cells(source: TraceGroup, target: TraceGroup, seed: int, folder: str) -> list[tuple]:
    """(policy, budget, the target's figures, the twin's)."""
    made, layers = twin(source, target, seed, folder), source.layers(SIZE)
    return [
        (policy, budget, replayed(target, layers, policy, budget), replayed(made, layers, policy, budget))
        for policy in POLICIES
        for budget in budgets(target)
        if not policy.startswith("draft") or set_is_exact(target, SIZE, "draft1", budget // SIZE)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="*", default=TRACES)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    print("| trace | budgets | worst hit rate | worst churn | cells above 5 % | recall: worst at each budget |")
    print("|---|---|---|---|---|---|")
    for name in given.traces:
        group = recorded(name)
        with tempfile.TemporaryDirectory() as folder:
            found = [
                row
                for seed in range(given.seeds)
                for row in cells(group, group, seed, folder)
            ]  # fmt: skip
        off = np.abs(np.array([theirs[:2] / ours[:2] - 1 for _, _, ours, theirs in found]))
        recall = [
            max((theirs[2] - ours[2] for _, at, ours, theirs in found if at == budget), key=abs)
            for budget in budgets(group)
        ]
        above = "; ".join(
            f"{policy} at {budget:,}: hit rate {theirs[0] / ours[0] - 1:+.3f}, churn {theirs[1] / ours[1] - 1:+.3f}"
            for policy, budget, ours, theirs in found
            if (np.abs(theirs[:2] / ours[:2] - 1) > LIMIT).any()
        )
        count = f"{int((off > LIMIT).sum())} of {off.size}" + (f" ({above})" if above else "")
        sizes = ", ".join(f"{budget:,}" for budget in budgets(group))
        recalls = ", ".join(f"{value:+.3f}" for value in recall)
        print(f"| {name} | {sizes} | {off[:, 0].max():.1%} | {off[:, 1].max():.1%} | {count} | {recalls} |")
    for pair in PAIRS if given.traces == TRACES else ():
        twice(*pair[:2], pair[2] or given.seeds)


def twice(shorter: str, longer: str, num_seeds: int) -> None:
    short, long = recorded(shorter), recorded(longer)
    print(f"\nrelative difference to {longer}, mean of {num_seeds} twins: hit rate, churn")
    with tempfile.TemporaryDirectory() as folder:
        seeds = [cells(short, long, seed, folder) for seed in range(num_seeds)]
        for at, (policy, budget, ours, _) in enumerate(seeds[0]):
            theirs = np.mean([rows[at][3] for rows in seeds], axis=0)
            own = replayed(short, short.layers(SIZE), policy, budget)
            print(
                f"{policy}, {budget:,}: twin {theirs[0] / ours[0] - 1:+.3f}, {theirs[1] / ours[1] - 1:+.3f}; "
                f"{shorter} itself {own[0] / ours[0] - 1:+.3f}, {own[1] / ours[1] - 1:+.3f}"
            )


if __name__ == "__main__":
    main()
