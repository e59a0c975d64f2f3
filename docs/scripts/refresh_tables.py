"""Put the tables of `oasis-sim trace overlap` into docs/traces.md: each below its line `<!-- table: TITLE -->`.

python docs/scripts/refresh_tables.py [--check]

TITLE is a heading of docs/traces/tables.md, "Full recordings" for docs/traces/top-20.parquet, or "By prompt, 1,024
tokens" for docs/traces/prompts.parquet. --check changes
nothing and fails where the page differs.
"""

import re
import sys
from pathlib import Path

from analysis.overlap_frames import load_overlap
from analysis.overlap_tables import by_prompt, markdown, top

DOCS = Path(__file__).resolve().parents[1]
PAGE, FOLDER = DOCS / "traces.md", DOCS / "traces"


def tables() -> dict[str, str]:
    """Table by title."""
    parts = (FOLDER / "tables.md").read_text(encoding="utf-8").split("## ")[1:]
    found = dict(part.strip().split("\n\n", 1) for part in parts)
    found["Full recordings"] = markdown(top(load_overlap(FOLDER / "top-20.parquet"))).strip()
    found["By prompt, 1,024 tokens"] = markdown(by_prompt(load_overlap(FOLDER / "prompts.parquet"), 1024)).strip()
    return found


def refreshed(page: str) -> str:
    known = tables()

    def table(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n\n{known[match[1]]}\n"

    return re.sub(r"<!-- table: (.*?) -->\n(?:\n(?:\|.*\n)+)?", table, page)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    new = refreshed(page)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if new == page else f"{PAGE}: its tables are not those of {FOLDER}")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
