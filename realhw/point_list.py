"""The points of the default campaign, the most telling ones first; every system in every cell, then what varies."""

from __future__ import annotations

from dataclasses import replace

from realhw.decode_point import Point

CELLS = (
    (32, 16384), (16, 4096), (8, 32768), (64, 4096), (8, 16384), (16, 16384), (32, 4096), (16, 32768), (1, 16384),
    (64, 16384), (32, 32768), (1, 4096),
)  # fmt: skip
"""(batch size, context); K is an eighth of the context."""
POLICIES = (
    ("oasiskv", 0.05),
    ("dense", 1.0),
    ("quest", 1.0),
    ("prefetch-previous", 0.1),
    ("oasiskv", 0.1),
    ("retrieval", 1.0),
    ("oasiskv", 0.02),
)
START_STRIDE = 2
STEPS_BESIDE = 9
"""Steps of a graph beside the distance: four to settle, five that count (a cap's remainder comes round in five)."""
COPY_ENGINE_STEPS = 16
TRACE, TRACE_CONTEXT = "smollm2-135m-reasoning", 6144
SHORT_TRACE, SHORT_CONTEXT = "smollm2-135m-reasoning-4k-h200", 4096


def steps_for(lookahead_k: int) -> int:
    """Steps of a graph in which as many count at every distance."""
    return STEPS_BESIDE + max(1, lookahead_k)


def point(system: str, batch_size: int, context_tokens: int, fetch_cap: float = 1.0, block: int = 16) -> Point:
    """A point with a budget of an eighth of the context."""
    kept = context_tokens // 8 // block
    return Point(
        system, batch_size, context_tokens, kept, block, fetch_cap, num_steps=steps_for(1),
        start_stride=START_STRIDE,
    )  # fmt: skip


def ahead(p: Point, lookahead_k: int) -> Point:
    """The point at another distance, with as many steps that count."""
    return replace(p, lookahead_k=lookahead_k, num_steps=steps_for(lookahead_k))


def cell_points() -> list[list[Point]]:
    """Every policy in every cell."""
    return [[point(system, *cell, cap) for system, cap in POLICIES] for cell in CELLS]


def transport_points() -> list[Point]:
    """Copy engines where scattered blocks take about as long as the step, packed ones also at larger batches."""
    batched = [
        point("oasiskv", 1, 16384, 0.05), point("oasiskv", 8, 4096, 0.05), point("prefetch-previous", 8, 4096, 0.1),
        point("oasiskv", 16, 4096, 0.02), point("prefetch-previous", 1, 16384, 0.1), point("retrieval", 1, 16384),
    ]  # fmt: skip
    packed = [
        point("oasiskv", 32, 16384, 0.05), point("prefetch-previous", 16, 4096, 0.1), point("oasiskv", 8, 32768, 0.1),
        point("retrieval", 32, 16384, 0.05), point("oasiskv", 8, 16384, 0.1), point("retrieval", 16, 4096),
    ]  # fmt: skip
    long = [replace(p, num_steps=COPY_ENGINE_STEPS, start_stride=1) for p in (*batched, *packed)]
    return [replace(p, transport="ce-batched" if i < len(batched) else "ce-contiguous") for i, p in enumerate(long)]


def varied_points() -> list[Point]:
    """Block sizes, lookahead distances, grids and caps beside the cells' own."""
    first = point("oasiskv", 32, 16384, 0.05)
    return [
        ahead(first, 2), replace(first, gather_ctas=16), point("oasiskv", 32, 16384, 0.05, 32),
        point("oasiskv", 32, 16384, 0.05, 8), ahead(point("oasiskv", 16, 4096, 0.1), 3),
        point("prefetch-previous", 16, 4096, 0.1, 8), point("prefetch-previous", 16, 4096, 0.1, 32),
        point("retrieval", 32, 16384, 0.05), point("prefetch-previous", 32, 16384, 0.3),
        ahead(point("prefetch-previous", 8, 16384, 0.1), 2), point("quest", 32, 4096, block=8),
        replace(point("oasiskv", 8, 32768, 0.05), gather_ctas=8),
    ]  # fmt: skip


def traced_points() -> list[Point]:
    """Block ids of recorded traces, through the simulator's mapping."""
    cell = [replace(point(s, 32, TRACE_CONTEXT, c), trace=TRACE) for s, c in POLICIES]
    sizes = [replace(point("oasiskv", 32, TRACE_CONTEXT, 0.05, size), trace=TRACE) for size in (8, 32)]
    own = [replace(point(s, 32, TRACE_CONTEXT, c), trace=TRACE, model="SmolLM2-135M") for s, c in POLICIES[:6]]
    return [
        *cell, *sizes,
        ahead(replace(point("oasiskv", 16, TRACE_CONTEXT, 0.1), trace=TRACE), 2),
        replace(point("oasiskv", 32, TRACE_CONTEXT, 0.05), trace=TRACE, transport="ce-contiguous"),
        replace(point("prefetch-previous", 16, SHORT_CONTEXT, 1.0), trace=SHORT_TRACE),
        *own,
    ]  # fmt: skip


def other_model_points() -> list[Point]:
    """The same flows at other geometries."""
    llama = [replace(point(s, 32, 16384, c), model="Llama-3.1-8B") for s, c in POLICIES[:6]]
    llama.append(replace(point("oasiskv", 8, 16384, 0.1), model="Llama-3.1-8B"))
    small = [replace(point(s, 64, 4096, c), model="SmolLM2-135M") for s, c in POLICIES[:4]]
    return llama + small


def default_points() -> list[Point]:
    """All of them; what is left out when time runs out is at the end."""
    cells = cell_points()
    head = [*cells[0], *cells[1], *transport_points(), *varied_points(), *traced_points(), *other_model_points()]
    rest = [p for cell in cells[2:] for p in cell]
    again = [replace(p, repeat=1) for p in (cells[0][0], cells[1][3], cells[2][1], cells[3][4], transport_points()[6])]
    whole = [replace(p, aliased=False) for p in (cells[4][4], cells[4][5])]
    return [*head, *rest, *again, *whole]


def smoke_points() -> list[Point]:
    """Each flow and transport once on a short step, with the geometries and a recorded trace among them."""
    small = point("oasiskv", 1, 4096, 0.1)
    return [
        replace(point("retrieval", 1, 4096), transport="ce-batched"),
        replace(point("retrieval", 1, 4096), transport="ce-contiguous"),
        replace(point("prefetch-previous", 1, 4096, 0.1), transport="ce-batched"),
        replace(point("prefetch-previous", 8, 4096, 0.1), transport="ce-contiguous"),
        replace(small, transport="ce-batched"),
        replace(small, transport="ce-contiguous", lookahead_k=2),
        replace(point("oasiskv", 8, TRACE_CONTEXT, 0.1), trace=TRACE),
        replace(point("oasiskv", 8, TRACE_CONTEXT, 0.1), trace=TRACE, model="SmolLM2-135M"),
        replace(point("retrieval", 8, TRACE_CONTEXT, block=8), trace=TRACE),
    ]
