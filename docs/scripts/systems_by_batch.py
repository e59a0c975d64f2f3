"""Tokens/s, exposed transfer and what binds, for each named system at batch 1 … 256, of the default experiment."""

from __future__ import annotations

import tempfile

import oasis_sim.api as oasis

SYSTEMS = ["dense", "quest", "retrieval", "prefetch-previous", "oasiskv", "oasiskv-oracle"]
BATCHES = [1, 4, 16, 32, 64, 128, 256]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _report(folder, "each system's own fetch cap (oasiskv 0.05, the others uncapped)", {})
        _report(folder, "fetch cap 0.05 for all that fetch", {"fetch_cap": 0.05})


def _report(folder: str, title: str, policy: dict[str, float]) -> None:
    grid = {"system": SYSTEMS, "workload": {"batch_size": BATCHES}, "policy": policy}
    rows = oasis.sweep(grid, out=f"{folder}/{len(policy)}", jobs=2).rows
    print(title)
    cells = {(row["system"], row["workload.batch_size"]): row for row in rows}
    for title, text in (
        ("tokens/s", lambda r: f"{r['throughput_tokens_per_s']:,.0f}"),
        ("exposed transfer, share of TPOT", lambda r: f"{r['exposed_transfer_s'] / r['tpot_mean_s']:.0%}"),
        ("what binds", lambda r: r["bound"]),
    ):
        print(f"{title:<32}" + "".join(f"{b:>9}" for b in BATCHES))
        for system in SYSTEMS:
            row = (cells[system, batch] for batch in BATCHES)
            print(f"  {system:<30}" + "".join(f"{text(r) if r['status'] == 'ok' else '–':>9}" for r in row))
        print()
    largest = {system: cells[system, 1]["max_batch_size"] for system in SYSTEMS}
    print("largest batch that fits: " + ", ".join(f"{system} {batch}" for system, batch in largest.items()) + "\n")


if __name__ == "__main__":
    main()
