"""Run every `$ command` of a document's console blocks again and put what it prints below it.

python docs/scripts/refresh_console.py docs/validation.md
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"(```console\n\$ )(.+)\n(?:.*\n)*?```")


def refresh(block: re.Match[str]) -> str:
    command = block.group(2)
    print(command, file=sys.stderr)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: exit {done.returncode}\n{done.stderr}")
    text = "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
    return f"{block.group(1)}{command}\n{text}\n```"


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(BLOCK.sub(refresh, path.read_text()))


if __name__ == "__main__":
    main()
