"""Trace-driven simulator of LLM decode whose KV cache lives beyond HBM.

`from oasis_sim import api` for notebooks; the command line is `oasis_sim.cli`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `oasis_sim.api` when first asked for: `import oasis_sim` alone stays cheap."""
    if name == "api":
        return import_module("oasis_sim.api")
    raise AttributeError(f"module 'oasis_sim' has no attribute {name!r}")
