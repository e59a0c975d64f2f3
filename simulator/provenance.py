"""What produced a result: versions of the software that shaped it, and the commit it was built from."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RECORDED_PACKAGES = ("oasis-sim", "numba", "numpy", "pyarrow", "pydantic", "simpy", "zarr")


def provenance() -> dict[str, Any]:
    """Versions, commit and machine, as JSON values."""
    return {
        "git_sha": git_sha(Path(__file__).resolve().parent.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in RECORDED_PACKAGES},
    }


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def git_sha(checkout: Path) -> str | None:
    """Commit of the checkout that holds the code, with `-dirty` for uncommitted changes; null when installed."""
    if not (checkout / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
