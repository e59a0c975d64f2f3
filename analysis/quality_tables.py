"""Tables of what sparsity costs in quality, in Markdown, from the parquet files of `oasis-sim quality`.

python -m analysis.quality_tables FOLDER [--task TASK]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from analysis.load import read_table
from traces.errors import InputError
from traces.one_line import end_in_one_line

TABLE, PROMPTS = "quality.parquet", "prompts.parquet"
BUDGET, BLOCK, CAP = "policy.kv_budget_tokens", "policy.block_size_tokens", "policy.fetch_cap"
COLUMNS = (
    *("predictor", BUDGET, BLOCK, CAP, "task", "kl", "kl_low", "kl_high", "recall", "h2d_bytes_per_token"),
    *("num_prompts", "num_steps"),
)
PROMPT_COLUMNS = ("predictor", BUDGET, BLOCK, CAP, "task", "prompt", "kl")
LEAST_KL = 1e-4
"""Below it a policy is dense but for rounding."""
RECALL_EDGES = (0.75, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99)
SAMPLES, SEED = 2000, 0


def load_quality(folder: Path, task: str = "all") -> pd.DataFrame:
    """A row per policy, of one task. Raises InputError where there is no such table or task."""
    path = folder / TABLE if folder.is_dir() else folder
    return _of_task(read_table(path, COLUMNS, "a quality table"), task, path)


def load_prompts(folder: Path, task: str = "all") -> pd.DataFrame:
    """A row per policy and prompt. Raises InputError as `load_quality` does."""
    path = folder / PROMPTS
    frame = read_table(path, PROMPT_COLUMNS, "a table of quality by prompt")
    return frame if task == "all" else _of_task(frame, task, path)


def _of_task(frame: pd.DataFrame, task: str, path: Path) -> pd.DataFrame:
    tasks = sorted(frame["task"].unique())
    if task not in tasks:
        raise InputError(f"{path}: has no task '{task}'; it has {', '.join(tasks)}")
    return frame[frame["task"] == task]


def informed(frame: pd.DataFrame) -> pd.DataFrame:
    """Without the random predictor."""
    return frame[frame["predictor"] != "random"]


def rank_correlation(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's, with mean ranks for ties."""
    ranks = [pd.Series(np.asarray(values)).rank().to_numpy() for values in (x, y)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def kl_by_recall(frame: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """What KL the policies of a range of recall have: range, how many, median, least, most."""
    own = informed(frame)
    bins = pd.cut(own["recall"], [0.0, *RECALL_EDGES, 1.0 + 1e-9], right=False)
    for span, rows in own.groupby(bins, observed=True):
        told = f"{span.left:.2f} – {min(span.right, 1.0):.2f}"
        kl = rows["kl"]
        yield told, str(len(rows)), f"{kl.median():.4f}", f"{kl.min():.4f}", f"{kl.max():.4f}"


def proxy(frame: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """How recall orders policies by KL: budget, block, policies, recall from, to, KL from, to, rank correlation."""
    own = informed(frame)
    for (budget, block), rows in [(("all", "all"), own), *own.groupby([BUDGET, BLOCK])]:
        if len(rows) < 3 or rows["kl"].max() < LEAST_KL:
            continue
        recall, kl = rows["recall"], rows["kl"]
        spans = (f"{recall.min():.3f} – {recall.max():.3f}", f"{kl.min():.4f} – {kl.max():.4f}")
        yield str(budget), str(block), str(len(rows)), *spans, f"{rank_correlation(recall, kl):.2f}"


def paired(prompts: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """KL of a predictor minus that of the previous step, and of a cap minus no cap, with the rest of the policy and the
    prompt equal: budget, what, KL of the second, difference, 95 % bootstrap interval over prompts."""
    own = informed(prompts)
    for budget, rows in own.groupby(BUDGET):
        if rows["kl"].max() < LEAST_KL:
            continue
        for column, other, rest in (("predictor", "previous", CAP), (CAP, 1.0, "predictor")):
            base = rows[rows[column] == other]
            for value in sorted(set(rows[column]) - {other}):
                first = rows[rows[column] == value]
                both = first.merge(base, on=["prompt", BLOCK, rest], suffixes=("", "_base"))
                if both.empty:
                    continue
                change = (both["kl"] - both["kl_base"]).groupby(both["prompt"]).mean().to_numpy()
                drawn = np.random.default_rng(SEED).choice(change, (SAMPLES, len(change))).mean(axis=1)
                low, high = np.quantile(drawn, [0.025, 0.975])
                what = f"{value} − {other}" if column == "predictor" else f"cap {value:g} − uncapped"
                yield (
                    str(budget),
                    what,
                    f"{both['kl_base'].mean():.4f}",
                    f"{change.mean():+.4f}",
                    f"{low:+.4f} … {high:+.4f}",
                )


def cap_cost(frame: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """KL under each cap as a multiple of that without one, all else equal: block size, predictors, and the geometric
    mean over predictors and budgets at each cap of `caps`."""
    informed_ones = [str(name) for name in informed(frame)["predictor"].unique()]
    for block, rows in frame[frame["kl"] > LEAST_KL].groupby(BLOCK):
        for whose, predictors in {"previous": ["previous"], "draft1": ["draft1"], "all": informed_ones}.items():
            own = rows[rows["predictor"].isin(predictors)]
            kl = own.pivot_table(index=["predictor", BUDGET], columns=CAP, values="kl")
            if len(kl) and 1.0 in kl:
                ratio = np.exp(np.log(kl.div(kl[1.0], axis=0)).mean())
                yield str(block), whose, *(f"{ratio[cap]:.2f}" if cap in ratio else "–" for cap in caps(frame))


def caps(frame: pd.DataFrame) -> list[float]:
    """Those of the table, without 1."""
    return sorted(set(frame[CAP].dropna()) - {1.0})


def markdown(header: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", default="all", help="of the prompts; default: every prompt")
    given = parser.parse_args(arguments)
    frame = load_quality(given.folder, given.task)
    print("Policies by recall, random ones left out\n")
    print(markdown(("recall", "policies", "KL median", "least", "most"), kl_by_recall(frame)))
    print("\nRecall as a proxy\n")
    print(markdown(("budget", "block", "policies", "recall", "KL", "rank correlation"), proxy(frame)))
    print("\nKL under a cap, as a multiple of that without one\n")
    print(markdown(("block", "predictor", *(f"cap {cap:g}" for cap in caps(frame))), cap_cost(frame)))
    print("\nKL differences, everything else equal\n")
    columns = ("budget", "difference", "KL of the second", "mean", "95 %")
    print(markdown(columns, paired(load_prompts(given.folder, given.task))))


if __name__ == "__main__":
    end_in_one_line()
    main()
