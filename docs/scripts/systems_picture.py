"""Throughput against recall of every named system at one setting: the table and the picture of docs/systems.md.

python docs/scripts/systems_picture.py smollm2-135m-extras docs/images/systems.png
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import oasis_sim.api as oasis
from simulator.systems import SYSTEMS, get_system

BATCH = 48
KINDS = {
    "everything": ("all KV in HBM", "tab:gray", "s"),
    "drop": ("drops", "tab:red", "v"),
    "streamed": ("streams the whole KV", "tab:brown", "D"),
    "cache": ("fetches on demand into a cache", "tab:green", "P"),
    "exact": ("fetches, K slots", "tab:blue", "o"),
    "slack": ("prefetches by drafts, slack slots", "tab:purple", "*"),
}


def main(trace: str, picture: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        grid = {
            "trace": trace,
            "system": [name for name, system in SYSTEMS.items() if not system.serving],
            "workload": {"batch_size": BATCH},
        }
        rows = oasis.sweep(grid, out=f"{folder}/systems", jobs=1).rows
    print("| system | tokens/s | recall | hit rate | MB/token in | exposed, ms | HBM, GB | binds |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        if row["status"] != "ok":
            print(f"| `{row['system']}` | does not fit: at most {row['max_batch_size']} |  |  |  |  |  |  |")
            continue
        hit = "" if row["hit_rate"] is None else f"{row['hit_rate']:.3f}"
        print(
            f"| `{row['system']}` | {row['throughput_tokens_per_s']:,.0f} | {row['recall']:.3f} | {hit} | "
            f"{row['h2d_bytes_per_token'] / 1e6:.2f} | {row['exposed_transfer_s'] * 1e3:.2f} | "
            f"{row['hbm_bytes_peak'] / 1e9:.1f} | {row['bound']} |"
        )
    draw([row for row in rows if row["status"] == "ok"], Path(picture))


def draw(rows: list[dict[str, object]], picture: Path) -> None:
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(9.5, 8.0), layout="constrained")
    seen: set[str] = set()
    places: dict[tuple[float, float], list[str]] = {}
    for row in rows:
        name, residency = str(row["system"]), str(get_system(str(row["system"])).policy.get("residency", "exact"))
        label, colour, marker = KINDS[residency]
        x, y = float(row["recall"]), float(row["throughput_tokens_per_s"])  # type: ignore[arg-type]
        ax.scatter(x, y, color=colour, marker=marker, s=60, label=None if label in seen else label, zorder=3)
        seen.add(label)
        near = [at for at in places if abs(at[0] - x) < 0.004 and abs(math.log(at[1] / y)) < 0.02]
        places.setdefault(near[0] if near else (x, y), []).append(name)
    for (x, y), names in places.items():
        right = any(0 <= a - x < 0.1 and (a, b) != (x, y) and abs(math.log(b / y)) < 0.2 for a, b in places)
        at, side = ((-7, -3), "right") if right or x == 1 else ((7, -3), "left")
        ax.annotate(", ".join(names), (x, y), textcoords="offset points", xytext=at, ha=side, fontsize=8)
    ax.set_yscale("log")
    ax.set_xlabel("recall: softmax mass that attention reads")
    ax.set_ylabel("tokens/s of the batch")
    ax.set_title(f"Every named system, batch {BATCH}, its own defaults", loc="left")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="lower left")
    figure.savefig(picture, dpi=140)


if __name__ == "__main__":
    main(*sys.argv[1:])
