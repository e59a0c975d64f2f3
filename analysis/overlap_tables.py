"""Markdown tables of a folder that `oasis-sim trace overlap` wrote; docs/traces.md holds them as they are printed.

python -m analysis.overlap_tables FOLDER [--detail-budget TOKENS]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.overlap_frames import (
    CAPS,
    MISSES,
    OVERLAP,
    at_budget,
    context_name,
    load_caps,
    load_misses,
    load_overlap,
    require,
    short_model,
    trace_names,
)
from analysis.overlap_misses import CAP_LOOKS, CASES, found_by
from traces.errors import InputError
from traces.one_line import end_in_one_line

PUBLISHED_DRAFT, PUBLISHED_PREVIOUS = 0.960, 0.839
"""Overlap of the best 20 blocks of 16, Qwen3-8B, a draft and the previous token. Source: OasisKV, arXiv 2608.08097."""
TOP_BLOCKS, NEAR_TOP_BLOCKS = 20, 16
"""16: the nearest count of which compact copies keep the sets."""
Rows = Iterator[Sequence[str]]


def one_step(frame: pd.DataFrame, budget_tokens: int) -> Rows:
    rows = at_budget(frame, budget_tokens)
    rows = rows[rows["distance"] == 1]
    yield ("trace", "right", "draft", "earlier query", "random", *_GUESSES)
    means, steps = _means(rows, "overlap"), rows.groupby(["trace", "predictor", "guess"])["steps"].first()
    for trace, name in trace_names(rows).items():
        every = steps.get((trace, "draft", "all"))
        right = None if every is None else steps.get((trace, "draft", "right"), 0) / every
        yield (
            name,
            "–" if right is None else f"{100 * right:.0f} %",
            *(_share(means.get((trace, kind, "all"))) for kind in ("draft", "previous", "random")),
            *(
                f"{_share(means.get((trace, 'draft', guess)))} / {_share(means.get((trace, 'previous', guess)))}"
                for guess in ("right", "wrong", "none")
            ),
        )


_GUESSES = ("token right: draft / earlier", "wrong: draft / earlier", "no guess: draft / earlier")


def by_distance(frame: pd.DataFrame, budget_tokens: int) -> Rows:
    rows = at_budget(frame, budget_tokens)
    steps = rows[rows["predictor"] == "draft"].groupby(["trace", "distance", "guess"])["steps"].first()
    rows = rows[rows["guess"] == "all"]
    distances = sorted(int(k) for k in rows["distance"].unique())
    label = ", ".join(map(str, distances))
    yield (
        "trace", f"right (%), distance {label}", "draft", "earlier query", "mass lost (points): draft", "earlier query"
    )  # fmt: skip
    rows = rows.assign(lost=100 * (rows["recall_true"] - rows["recall"]))
    mean = rows.groupby(["trace", "predictor", "distance"])[["overlap", "lost"]].mean()
    for trace, name in trace_names(rows).items():
        every = [(steps.get((trace, k, "right"), 0), steps.get((trace, k, "all"))) for k in distances]
        cells = [
            ", ".join(_text(mean[value].get((trace, kind, k)), digits) for k in distances)
            for value, digits in (("overlap", 3), ("lost", 2))
            for kind in ("draft", "previous")
        ]
        yield (
            name,
            ", ".join("–" if total is None else f"{100 * right / total:.0f}" for right, total in every),
            *cells,
        )


def by_head(frame: pd.DataFrame, budget_tokens: int) -> Rows:
    """The hardest and the easiest heads for the draft one step ahead."""
    rows = at_budget(frame, budget_tokens)
    rows = rows[(rows["distance"] == 1) & (rows["guess"] == "all")]
    yield ("trace", "layers", "hardest (layer.head: draft, earlier query)", "easiest", "spread of layers")
    for trace, name in trace_names(rows).items():
        own = rows[rows["trace"] == trace].set_index(["layer", "kv_head"])
        draft: Any
        previous: Any
        draft, previous = (own[own["predictor"] == kind]["overlap"] for kind in ("draft", "previous"))
        if draft.empty:
            continue
        order = draft.sort_values().index
        cells = [
            "; ".join(f"{layer}.{head}: {draft[layer, head]:.2f}, {previous[layer, head]:.2f}" for layer, head in some)
            for some in (order[:3], order[::-1][:2])
        ]
        layers = draft.groupby("layer").mean()
        yield (name, str(len(layers)), *cells, f"{layers.min():.2f} … {layers.max():.2f}")


def by_block_size(frame: pd.DataFrame, budget_tokens: int) -> Rows:
    """Of traces with several block sizes, over the layers that all of them have."""
    rows = at_budget(frame, budget_tokens, None)
    rows = require(rows[(rows["distance"] == 1) & (rows["guess"] == "all")], "draft")
    yield ("trace", "block", "layers", "overlap: draft", "earlier query", "mass: draft", "earlier query", "own query")
    for trace, name in trace_names(rows).items():
        own = rows[rows["trace"] == trace]
        shared = set.intersection(*(set(part["layer"]) for _, part in own.groupby("block_size_tokens")))
        own = own[own["layer"].isin(sorted(shared))]
        if own["block_size_tokens"].nunique() < 2 or "draft" not in set(own["predictor"]):
            continue
        mean = own.groupby(["block_size_tokens", "predictor"])[["overlap", "recall", "recall_true"]].mean()
        for size in sorted(own["block_size_tokens"].unique()):
            draft, previous = mean.loc[(size, "draft")], mean.loc[(size, "previous")]
            figures = (draft["overlap"], previous["overlap"], draft["recall"], previous["recall"], draft["recall_true"])
            yield (name, str(size), str(len(shared)), *(_share(value) for value in figures))


def misses(frame: pd.DataFrame, budget_tokens: int) -> Rows:
    """One step ahead, means over the traces."""
    rows = at_budget(frame, budget_tokens)
    rows = require(rows[rows["distance"] == 1], "draft", "wrong")
    names = [name for _, _, name, _, _ in CASES]
    yield ("by", "needed blocks", "blocks", "mass", *(f"found: {n}" for n in names), *(f"mass missed: {n}" for n in names))  # fmt: skip  # noqa: E501
    for by in ("change", "place", "churn"):
        found: Any = found_by(rows, by).groupby(["predictor", "guess", "order", "bin"]).mean()
        for order, label in found.loc[("draft", "wrong")].index:
            all_steps = found.loc[("draft", "all", order, label)]
            cases = [(kind, guess, order, label) for kind, guess, *_ in CASES]
            shares = [f"{100 * found.loc[key, 'found']:.0f} %" if key in found.index else "–" for key in cases]
            masses = [f"{100 * found.loc[key, 'missed_mass']:.2f}" if key in found.index else "–" for key in cases]
            yield (
                by, label, f"{all_steps['true_blocks']:.1f}", f"{100 * all_steps['true_mass']:.1f} %", *shares, *masses
            )  # fmt: skip


def caps(frame: pd.DataFrame, budget_tokens: int) -> Rows:
    """Hit rate and recall, means over the traces."""
    rows = at_budget(frame, budget_tokens)
    rows = rows[rows["rules"] == "table"]
    yield ("fetch cap", *(f"{name}: hit rate, recall" for _, _, name in CAP_LOOKS.values()))
    mean = rows.groupby(["predictor", "distance", "fetch_cap"])[["hit_rate", "recall"]].mean()
    for cap in sorted(rows["fetch_cap"].unique()):
        cells = [
            f"{_share(mean['hit_rate'].get((*key, cap)))}, {_share(mean['recall'].get((*key, cap)))}"
            for key in CAP_LOOKS
        ]
        yield (f"{cap:g}", *cells)


def sparse(frame: pd.DataFrame, budget_tokens: int) -> Rows:
    """Drafts over a working set beside dense ones."""
    rows = at_budget(frame, budget_tokens)
    yield ("trace", "distance", "guess", "overlap: dense", "over the working set", "of the two", "mass lost: dense", "over the working set")  # fmt: skip  # noqa: E501
    rows = rows.assign(lost=100 * (rows["recall_true"] - rows["recall"]))
    mean: Any = rows.groupby(["trace", "distance", "guess", "predictor"])[["overlap", "agreement", "lost"]].mean()
    for trace, name in trace_names(rows).items():
        for distance in sorted(rows["distance"].unique()):
            for guess in ("all", "right", "wrong"):
                key = (trace, distance, guess)
                if (*key, "draft_sparse") not in mean.index:
                    continue
                dense, over = mean.loc[(*key, "draft")], mean.loc[(*key, "draft_sparse")]
                figures = (dense["overlap"], over["overlap"], over["agreement"])
                lost = (f"{dense['lost']:.2f}", f"{over['lost']:.2f}")
                yield (name, str(distance), guess, *(_share(value) for value in figures), *lost)


def replayed(frame: pd.DataFrame) -> Rows:
    """Both kinds of drafts under the policy that the sparse ones were recorded under."""
    yield ("trace", "drafts", "distance", "fetch cap", "hit rate", "recall", "churn")
    recorded = frame[frame["rules"] == "recorded"]
    for row in recorded.to_dict("records"):
        name = "over the working set" if row["predictor"] == "draft_sparse" else "dense"
        figures = (f"{row['hit_rate']:.4f}", f"{row['recall']:.4f}", f"{row['churn']:.4f}")
        yield (trace_names(frame)[row["trace"]], name, str(row["distance"]), f"{row['fetch_cap']:g}", *figures)


def top(frame: pd.DataFrame, num_blocks: int = TOP_BLOCKS) -> Rows:
    """Beside what was published: overlap of the best 20 blocks of 16, and the share of right tokens that it takes."""
    rows = frame[(frame["block_size_tokens"] == 16) & (frame["num_blocks"] == num_blocks) & (frame["distance"] == 1)]
    rows = rows[rows["set_is_exact"]]
    yield ("trace", "right", "draft", "earlier query", "earlier query, by mass", "token right", "token wrong", f"right tokens for {100 * PUBLISHED_DRAFT:.1f} %")  # fmt: skip  # noqa: E501
    yield ("published, Qwen3-8B", "–", f"{PUBLISHED_DRAFT:.3f}", f"{PUBLISHED_PREVIOUS:.3f}", "–", "–", "–", "–")
    by_mass = rows[(rows["selector"] == "exact") & (rows["guess"] == "all")].groupby("trace")["overlap"].mean()
    rows = rows[rows["selector"] == "minmax"]
    drafted = rows[rows["predictor"] == "draft"]
    means, steps = _means(rows, "overlap"), rows.groupby(["trace", "predictor", "guess"])["steps"].first()
    for trace, name in trace_names(rows).items():
        if trace not in set(drafted["trace"]):
            continue
        right, wrong = means.get((trace, "draft", "right")), means.get((trace, "draft", "wrong"))
        share = steps.get((trace, "draft", "right"), 0) / steps[trace, "draft", "all"]
        needed = None if right is None or wrong is None else (PUBLISHED_DRAFT - wrong) / (right - wrong)
        yield (
            name,
            f"{100 * share:.0f} %",
            *(_share(means.get((trace, kind, "all"))) for kind in ("draft", "previous")),
            _share(by_mass.get(trace)),
            _share(right),
            _share(wrong),
            "–" if needed is None else f"{100 * needed:.0f} %",
        )


def by_prompt(frame: pd.DataFrame, budget_tokens: int) -> Rows:
    """Traces of one model, task and context side by side: how far a figure is the prompt's."""
    ahead = at_budget(frame, budget_tokens).query("distance == 1")
    rows = ahead[ahead["guess"] == "all"]
    yield ("model, task", "context", "prompts", "right", "draft", "earlier query", "mass held: draft", "earlier query")
    right = ahead[(ahead["predictor"] == "draft") & (ahead["guess"] == "right")]
    shares = right.groupby("trace")["steps"].first() / rows.groupby("trace")["steps"].first()
    for _, same in rows.groupby(["model", "task", "context_tokens"], sort=False):
        model, task, context = same.iloc[0][["model", "task", "context_tokens"]]
        of = {kind: same[same["predictor"] == kind].groupby("trace") for kind in ("draft", "previous")}
        yield (
            f"{short_model(model)} {task}",
            context_name(int(context)),
            str(same["trace"].nunique()),
            ", ".join(f"{100 * shares.get(trace, 0):.0f} %" for trace in of["draft"].groups),
            *(
                ", ".join(f"{value:.3f}" for value in of[kind][figure].mean())
                for figure in ("overlap", "recall")
                for kind in ("draft", "previous")
            ),
        )


def write_tables(overlap: pd.DataFrame, missed: pd.DataFrame, capped: pd.DataFrame, budget_tokens: int) -> str:
    """All tables as Markdown. What the traces have no rows for is left out."""
    blocks = f"{budget_tokens:,} tokens"
    parts = {
        f"One step ahead, {blocks}": one_step(overlap, budget_tokens),
        f"By distance, {blocks}": by_distance(overlap, budget_tokens),
        f"By layer and KV head, one step ahead, {blocks}": by_head(overlap, budget_tokens),
        f"By block size, one step ahead, {blocks}": by_block_size(overlap, budget_tokens),
        f"Where predictions miss, one step ahead, {blocks}": misses(missed, budget_tokens),
        f"Under fetch caps, {blocks}": caps(capped, budget_tokens),
        f"Drafts over a working set, {blocks}": sparse(overlap, budget_tokens),
        "Both kinds of drafts replayed under the recorded policy": replayed(capped),
        f"Best {TOP_BLOCKS} blocks of 16, one step ahead": top(overlap),
        f"Best {NEAR_TOP_BLOCKS} blocks of 16, one step ahead": top(overlap, NEAR_TOP_BLOCKS),
    }
    texts = []
    for title, rows in parts.items():
        try:
            table = markdown(rows)
        except InputError:
            continue
        if table:
            texts.append(f"## {title}\n\n{table}")
    return "\n".join(texts)


def markdown(rows: Rows) -> str:
    """A header and the rows below it; empty where there are none."""
    header, *body = list(rows)
    lines = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) if body else ""


def _means(rows: pd.DataFrame, value: str) -> pd.Series[float]:
    return rows.groupby(["trace", "predictor", "guess"])[value].mean()


def _text(value: float | None, digits: int) -> str:
    return "–" if value is None or pd.isna(value) else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return _text(value, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--detail-budget", type=int, default=512)
    given = parser.parse_args()
    folder = given.folder
    tables = load_overlap(folder / OVERLAP), load_misses(folder / MISSES), load_caps(folder / CAPS)
    print(write_tables(*tables, given.detail_budget), end="")


if __name__ == "__main__":
    end_in_one_line()
    main()
