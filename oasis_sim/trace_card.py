"""What `oasis-sim trace info` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oasis_sim.output import console, print_rows


def print_trace(summary: Mapping[str, Any]) -> None:
    """A trace's summary (`traces.info.describe`) for a person: where it came from, then one row per block size."""
    out = console()
    model = summary["model"]
    out.print(f"[bold]{summary['name']}[/bold]: {summary['file']}")
    made = "synthesised for" if summary["provenance"].get("attention") == "synthesised" else "recorded from"
    out.print(
        f"{made} {model['name']}: {model['num_layers']} layers, {model['num_query_heads']} query and "
        f"{model['num_kv_heads']} KV heads of {model['head_dim']}"
    )
    for key, value in summary["provenance"].items():
        text = ", ".join(f"{name} {item}" for name, item in value.items()) if isinstance(value, dict) else value
        if text:
            out.print(f"  {key}: {text}", style="dim", markup=False)
    out.print(f"content hash {summary['content_hash']}", style="dim")
    for name, group in summary["groups"].items():
        out.print()
        out.print(
            f"[bold]{name}[/bold]: context {group['context_tokens']:,} tokens, {group['num_positions']} decode steps"
        )
        if group.get("prompt"):
            out.print(f"  prompt: {group['prompt']}", markup=False)
        if drafter := group.get("drafter"):
            shares = ", ".join(f"{share * 100:.0f} %" for share in drafter.get("acceptance") or ())
            accepted = f"; right at distance 1, 2, …: {shares}" if shares else ""
            out.print(f"  drafts: {drafter['name']}{accepted}", markup=False)
        print_rows(
            [
                {
                    "block": int(size),
                    "layers": len(block["layers"]),
                    "ranked_blocks": block["max_ranked_blocks"],
                    "largest_budget": block["max_budget_tokens"],
                    "rankings": block["rankings"],
                }
                for size, block in group["block_sizes"].items()
            ]
        )
