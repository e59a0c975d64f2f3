"""How closely synthesised twins replay: the tables of docs/synth.md.

python docs/scripts/synth_twins.py [--seeds N] [TRACE ...]

Twins of each trace, default all that ship (drafts at budgets of which a compact copy keeps the sets), and, without
TRACE, twins made at a longer context against a recording there, with its share of right guesses: of Gemma at 16K, and
of reasoning at 2K and 4K.
"""

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simulator.mapping import Mapping
from simulator.policy_composition import resolve_policy
from simulator.replay import replay
from traces.catalog import resolve, shipped_traces
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
FEW_HEADS, TWINS_OF_FEW = 12, 8
"""One twin of fewer heads is uncertain: so many are made."""
LONGER = {"16k": "32k", "2k": "4k", "4k": ""}
"""Contexts, as named by traces of one task, whose recordings are compared; no name is the 6K trace."""


def pairs() -> list[tuple[str, str]]:
    """Shipped traces of one task, the shorter one first."""
    task = r"((?:gemma3-270m-multi-document|smollm2-135m-reasoning))-?(\d+k)?(-\w+)?"
    parts = {name: match.groups(default="") for name in shipped_traces() if (match := re.fullmatch(task, name))}
    return [
        (short, long)
        for short, (task_of_short, context, device) in parts.items()
        for long, (task_of_long, longer, other) in parts.items()
        if task_of_short == task_of_long and longer == LONGER.get(context) and other in ("", device)
    ]


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


def num_twins(group: TraceGroup, asked: int) -> int:
    return asked if len(group.layers(SIZE)) * group.num_kv_heads >= FEW_HEADS else max(asked, TWINS_OF_FEW)


def drafted(group: TraceGroup, policy: str, budget: int) -> bool:
    """Whether the trace has the drafts that this policy needs, at this budget as they were recorded."""
    if not policy.startswith("draft"):
        return True
    ranking = f"draft{POLICIES[policy][1].get('lookahead_k', 1)}"
    return ranking in group.rankings(SIZE) and set_is_exact(group, SIZE, ranking, budget // SIZE)


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
        for budget in budgets(target if target.max_ranked_blocks(SIZE) < source.max_ranked_blocks(SIZE) else source)
        if drafted(source, policy, budget) and drafted(target, policy, budget)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    print("| trace | budgets | twins | worst hit rate | worst churn | cells above 5 % | worst of the mean | recall |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.traces or shipped_traces():
        group = recorded(name)
        with tempfile.TemporaryDirectory() as folder:
            found = [cells(group, group, seed, folder) for seed in range(num_twins(group, given.seeds))]
        ours = np.array([row[2] for row in found[0]])
        theirs = np.array([[row[3] for row in of_twin] for of_twin in found])
        off = theirs[..., :2] / ours[:, :2] - 1
        of_mean, recall = np.abs(off.mean(axis=0)), (theirs - ours)[..., 2].mean(axis=0)
        above = "; ".join(
            f"{found[0][at][0]} at {found[0][at][1]:,} of twin {seed}: {off[seed, at, 0]:+.3f}, {off[seed, at, 1]:+.3f}"
            for seed, at in np.argwhere((np.abs(off) > LIMIT).any(axis=-1)).tolist()
        )
        count = f"{int((np.abs(off) > LIMIT).sum())} of {off.size}" + (f" ({above})" if above else "")
        sizes = ", ".join(f"{budget:,}" for budget in budgets(group))
        at_budget = np.array([row[1] for row in found[0]])
        worst = (max(recall[at_budget == budget], key=abs) for budget in budgets(group))
        recalls = ", ".join(f"{value:+.3f}" for value in worst)
        print(
            f"| {name} | {sizes} | {len(found)} | {np.abs(off[..., 0]).max():.1%} | {np.abs(off[..., 1]).max():.1%} "
            f"| {count} | {of_mean[:, 0].max():.1%}, {of_mean[:, 1].max():.1%} | {recalls} |",
            flush=True,
        )
    for pair in [] if given.traces else pairs():
        longer_context(*pair, given.seeds)


def churn_by_head(group: TraceGroup, layers: Sequence[int], num_blocks: int) -> np.ndarray:
    statistics = measure(group, SIZE, (num_blocks,))
    of_layers = [layer for layer in statistics.layers if layer.layer in layers]
    return np.array([1 - head.persistence[0][0] for layer in of_layers for head in layer.heads])


def longer_context(shorter: str, longer: str, num_seeds: int) -> None:
    short, long = recorded(shorter), recorded(longer)
    num_seeds = num_twins(short, num_seeds)
    print(f"\nrelative difference to {longer}, mean of {num_seeds} twins: hit rate, churn")
    with tempfile.TemporaryDirectory() as folder:
        seeds = [cells(short, long, seed, folder) for seed in range(num_seeds)]
        made = [open_trace(path).group("synthesised") for path in sorted(Path(folder).glob("*.zarr"))]
        for budget in budgets(short):
            churn = churn_by_head(long, short.layers(SIZE), budget // SIZE)
            of_twins = np.mean([churn_by_head(of, short.layers(SIZE), budget // SIZE) for of in made], axis=0)
            print(
                f"{len(churn)} heads, {budget:,}: churn {churn.mean():.3f}, of the twins minus the recording's "
                f"{(of_twins - churn).mean():+.3f}, standard deviation over heads {(of_twins - churn).std():.3f}"
            )
        for at, (policy, budget, ours, _) in enumerate(seeds[0]):
            theirs = np.mean([rows[at][3] for rows in seeds], axis=0)
            own = replayed(short, short.layers(SIZE), policy, budget)
            print(
                f"{policy}, {budget:,}: twin {theirs[0] / ours[0] - 1:+.3f}, {theirs[1] / ours[1] - 1:+.3f}; "
                f"{shorter} itself {own[0] / ours[0] - 1:+.3f}, {own[1] / ours[1] - 1:+.3f}"
            )


if __name__ == "__main__":
    main()
