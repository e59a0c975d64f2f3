"""How closely synthesised twins replay: the tables of docs/synth.md.

python docs/scripts/synth_twins.py [--seeds N] [TRACE ...]

Twins of each trace, default all that ship (drafts at budgets of which a compact copy keeps the sets), and, without
TRACE, twins made at a longer context against recordings there, with their share of right guesses, prompt by prompt: of
Gemma at 16K, and of SmolLM2's reasoning at 2K and 4K.
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
FEW_HEADS, TWINS_OF_FEW = 12, 4
"""One twin of fewer heads is less certain: so many are made."""
LONGER = {"16k": "32k", "2k": "4k", "4k": ""}
"""Contexts, as named by traces of one task, whose recordings are compared; no name is the 6K trace."""


def pairs() -> dict[tuple[str, str, str], list[tuple[str, str]]]:
    """Shipped traces (shorter, longer) of each task and two contexts, prompt by prompt."""
    pattern = r"(gemma3-270m-(?:multi-document|reasoning)|smollm2-135m-reasoning)(?:-(\d+k))?(-\d+)?(-[a-z]\w+)?"
    parts = {name: match.groups("") for name in shipped_traces() if (match := re.fullmatch(pattern, name))}
    found: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for short, (task, context, *number_and_device) in parts.items():
        for long, (of, longer, number, device) in parts.items():
            alike = number == number_and_device[0] and device in ("", number_and_device[1])
            if of == task and longer == LONGER.get(context) and alike:
                found.setdefault((task, context, longer or "6k"), []).append((short, long))
    return found


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


def cells(group: TraceGroup, seed: int, folder: str) -> list[tuple]:
    """(policy, budget, the recording's figures, its twin's)."""
    made, layers = twin(group, group, seed, folder), group.layers(SIZE)
    return [
        (policy, budget, replayed(group, layers, policy, budget), replayed(made, layers, policy, budget))
        for policy in POLICIES
        for budget in budgets(group)
        if drafted(group, policy, budget)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    print("| trace | budgets | twins | worst hit rate | worst churn | cells above 5 % | worst of the mean | recall |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.traces or shipped_traces():
        group = recorded(name)
        with tempfile.TemporaryDirectory() as folder:
            found = [cells(group, seed, folder) for seed in range(num_twins(group, given.seeds))]
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
    for (task, short, long), of_prompts in [] if given.traces else pairs().items():
        print(f"\n{task}, {short} to {long}: relative difference of hit rate, churn")
        longer_context(of_prompts, given.seeds)


def longer_context(of_prompts: Sequence[tuple[str, str]], num_seeds: int) -> None:
    """Means over prompts and twins beside the longer recordings, and the churn of single prompts."""
    figures: dict[tuple[str, int], list[list[np.ndarray]]] = {}
    for short, long in ((recorded(short), recorded(long)) for short, long in of_prompts):
        layers, sizes = short.layers(SIZE), budgets(min(short, long, key=lambda group: group.max_ranked_blocks(SIZE)))
        with tempfile.TemporaryDirectory() as folder:
            twins = [twin(short, long, seed, folder) for seed in range(num_seeds)]
            for policy in POLICIES:
                for budget in (b for b in sizes if drafted(short, policy, b) and drafted(long, policy, b)):
                    of = [replayed(group, layers, policy, budget)[:2] for group in (long, short, *twins)]
                    figures.setdefault((policy, budget), []).append(of)
    for (policy, budget), found in figures.items():
        long, short, *made = np.moveaxis(np.array(found), 0, 1)
        ours, of_twins = long.mean(axis=0), np.mean(made, axis=0)
        off, own = of_twins.mean(axis=0) / ours - 1, short.mean(axis=0) / ours - 1
        single = ", ".join(f"{value:+.3f}" for value in of_twins[:, 1] / long[:, 1] - 1)
        print(
            f"{policy}, {budget:,}: twins {off[0]:+.3f}, {off[1]:+.3f}; the shorter recording itself "
            f"{own[0]:+.3f}, {own[1]:+.3f}; churn of the twins by prompt {single}",
            flush=True,
        )


if __name__ == "__main__":
    main()
