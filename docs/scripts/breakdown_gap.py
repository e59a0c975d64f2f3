"""Largest |sum of the breakdown - TPOT| over `--json` rows read from standard input."""

from __future__ import annotations

import json
import sys

from simulator.metrics import BREAKDOWN


def main() -> None:
    rows = [row for row in json.load(sys.stdin)["rows"] if row["status"] == "ok"]
    gap = max(abs(sum(row[part] for part in BREAKDOWN) - row["tpot_mean_s"]) for row in rows)
    print(f"{len(rows)} points, largest gap {gap:.1e} s")


if __name__ == "__main__":
    main()
