"""What a trace holds, as plain data for `oasis-sim trace info`."""

from __future__ import annotations

from typing import Any

from traces.reader import FileGroup, Trace


def describe(trace: Trace) -> dict[str, Any]:
    """JSON-ready summary of a trace: model, provenance, and per group its rows, block sizes and drafter."""
    return {
        "file": trace.file,
        **trace.attrs.model_dump(mode="json", exclude_none=True),
        "content_hash": trace.content_hash,
        "groups": {name: _describe_group(trace, name) for name in trace.group_names},
    }


def _describe_group(trace: Trace, name: str) -> dict[str, Any]:
    group = trace.group(name)
    summary: dict[str, Any] = {
        "context_tokens": int(group.kv_len[0]),
        "num_positions": group.num_positions,
        "content_hash": group.content_hash,
        "block_sizes": {
            size: {
                "layers": list(group.layers(size)),
                "max_ranked_blocks": group.max_ranked_blocks(size),
                "max_budget_tokens": group.max_ranked_blocks(size) * size,
                "rankings": list(group.rankings(size)),
            }
            for size in group.block_sizes
        },
    }
    if isinstance(group, FileGroup):
        extra = group.attributes.model_dump(
            mode="json", exclude={"blocks", "content_hash", "context_tokens"}, exclude_none=True
        )
        summary |= extra
    return summary
