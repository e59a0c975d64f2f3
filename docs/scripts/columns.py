"""Columns of `--json` rows read from standard input, as a table: columns.py NAME …"""

from __future__ import annotations

import json
import sys


def main() -> None:
    names = sys.argv[1:]
    rows = json.load(sys.stdin)["rows"]
    print("  ".join(names))
    for row in rows:
        cells = (f"{row[n]:,.3f}" if isinstance(row[n], float) else str(row[n]) for n in names)
        print("  ".join(cell.rjust(len(name)) for cell, name in zip(cells, names, strict=True)))


if __name__ == "__main__":
    main()
