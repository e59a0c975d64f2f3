"""`oasis-sim trace info|check|pack`."""

from __future__ import annotations

from pathlib import Path

from oasis_sim.options import whole_numbers
from oasis_sim.output import print_json
from traces.catalog import resolve
from traces.errors import InputError
from traces.reader import open_trace


def info(name_or_path: str, as_json: bool) -> int:
    """Print what a trace holds."""
    from traces.info import describe

    summary = describe(open_trace(resolve(name_or_path)))
    if as_json:
        print_json(summary)
        return 0
    from oasis_sim.trace_card import print_trace

    print_trace(summary)
    return 0


def check(name_or_path: str, as_json: bool) -> int:
    """Read everything and compare the content hash. Raises TraceError naming file, array and index."""
    from traces.check import check_trace

    summary = check_trace(resolve(name_or_path))
    if as_json:
        print_json({"ok": True, **summary})
        return 0
    requests = ", ".join(
        f"{name} ({group['context_tokens']:,} tokens, {group['num_positions']} steps)"
        for name, group in summary["groups"].items()
    )
    print(f"ok: {summary['file']}: {requests}; content hash {summary['content_hash']}")
    return 0


def pack(
    source: str,
    target: str,
    compact: bool,
    layers: str | None,
    draft_sets: str | None,
    max_budget: int | None,
    keep: str | None,
    as_json: bool,
) -> int:
    """Zip a recorded folder as it is, or a compact copy of any trace."""
    if compact:
        from simulator.verified_trace import open_verified
        from traces.compact import BLOCK_SIZE_TOKENS, MAX_RANKED_BLOCKS, pack_compact

        chosen = None if layers is None else whole_numbers("--layers", layers)
        sets = None if draft_sets is None else whole_numbers("--draft-sets", draft_sets)
        ranked = MAX_RANKED_BLOCKS
        if max_budget is not None:
            ranked = max_budget // BLOCK_SIZE_TOKENS
            if max_budget % BLOCK_SIZE_TOKENS:
                raise InputError(f"--max-budget {max_budget}: is not a multiple of the {BLOCK_SIZE_TOKENS}-token block")
        names = () if keep is None else tuple(keep.split(","))
        open_verified(resolve(source))
        written = pack_compact(
            resolve(source),
            Path(target),
            layers=chosen,
            max_ranked_blocks=ranked,
            draft_sets=None if sets is None else [k for k in sets if k],
            keep=names,
        )
    else:
        from traces.pack import pack as pack_folder

        if any(given is not None for given in (layers, draft_sets, max_budget, keep)):
            raise InputError(
                "--layers, --draft-sets, --max-budget and --keep choose what a compact copy holds: add --compact"
            )
        written = pack_folder(Path(source), Path(target))
    if as_json:
        print_json({"out": str(written), "bytes": written.stat().st_size})
    else:
        print(f"{written}: {written.stat().st_size / 1e6:.2f} MB")
    return 0
