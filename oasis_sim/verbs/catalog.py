"""`oasis-sim catalog`: what models, hardware, systems and traces are known by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oasis_sim.output import print_json
from traces.errors import InputError

Row = dict[str, Any]


def catalog(kind: str, as_json: bool) -> int:
    """Print the rows of one kind as a table, or as `{"rows": [...]}`. Raises InputError for an unknown kind."""
    if kind not in _KINDS:
        raise InputError(f"catalog {kind}: expected one of {', '.join(_KINDS)}")
    rows = _KINDS[kind]()
    if as_json:
        print_json({"rows": rows})
    else:
        from oasis_sim.output import print_rows

        print_rows(rows, hidden=("source", "hf_id"))
    return 0


def _models() -> list[Row]:
    from simulator.catalog import models

    return [
        {
            "name": model.name,
            "hf_id": model.hf_id,
            "attention": model.attention,
            "num_layers": model.num_layers,
            "num_q_heads": model.num_q_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "max_position": model.max_position,
            "scaled_position": model.scaled_position,
            "source": model.source,
        }
        for model in models()
    ]


def _hardware() -> list[Row]:
    from simulator.catalog import distinct_figures, hardware

    return [
        {
            "name": profile.name,
            "device": profile.device,
            "date": profile.date,
            "hbm_bytes": profile.gpu.hbm_bytes.value,
            "hbm_bytes_per_s": profile.gpu.hbm_bytes_per_s.value,
            "bf16_flops": profile.gpu.bf16_flops.value,
            "h2d_bytes_per_s": profile.link.h2d_bytes_per_s.value,
            "num_assumptions": sum(figure.assumption for figure in distinct_figures(profile)),
            "num_figures": len(distinct_figures(profile)),
        }
        for profile in hardware()
    ]


def _systems() -> list[Row]:
    from simulator.systems import SYSTEMS

    return [
        {"name": name, "description": system.description, "citation": system.citation}
        for name, system in SYSTEMS.items()
    ]


def _traces() -> list[Row]:
    from traces.catalog import shipped_traces
    from traces.info import describe
    from traces.reader import open_trace

    rows: list[Row] = []
    for name, path in shipped_traces().items():
        summary = describe(open_trace(path))
        groups = summary["groups"].values()
        rows.append(
            {
                "name": name,
                "model": summary["model"]["name"],
                "requests": len(summary["groups"]),
                "context_tokens": sorted({group["context_tokens"] for group in groups}),
                "num_positions": sorted({group["num_positions"] for group in groups}),
                "block_sizes": sorted({int(size) for group in groups for size in group["block_sizes"]}),
                "file_bytes": path.stat().st_size,
            }
        )
    return rows


_KINDS: dict[str, Callable[[], list[Row]]] = {
    "models": _models,
    "hardware": _hardware,
    "systems": _systems,
    "traces": _traces,
}
