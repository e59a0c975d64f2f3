"""What side streams cost the compute stream beside what their kernels take: a fork and a join of each, every layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from realhw.device import new_event, new_stream
from realhw.geometry import ModelGeometry
from realhw.graph_timer import Launch, Timing, summarise
from realhw.measurement import Recorder
from realhw.pairbench import layer_products
from realhw.schedule import PRIORITY

SIDE_STREAMS = (0, 1, 2, 3)
LAYERS, PRODUCTS = 36, 4
REPETITIONS = 9


def bench_forks(recorder: Recorder, geometry: ModelGeometry) -> None:
    """A layer's products in turn, with 0 to 3 side streams that run an empty kernel a layer: seconds of a layer."""
    flag = torch.zeros(1, device="cuda")
    for rows in (2, 64, 128):
        products = layer_products(geometry, rows).launches
        for num_sides in SIDE_STREAMS:
            timing = _layer(products, num_sides, lambda: _fill(flag))
            recorder.add("fork", timing.median_s, timing.spread_s, timing.repetitions, rows=rows, sides=num_sides)


def _fill(flag: torch.Tensor) -> None:
    flag.fill_(0.0)


def _layer(products: Sequence[Launch], num_sides: int, side: Launch) -> Timing:
    """Forked after a layer's first product, joined before the first product of the next layer."""
    for launch in (*products, side):
        launch()
    torch.cuda.synchronize()
    main, sides = new_stream(), [new_stream(PRIORITY["B"]) for _ in range(num_sides)]
    start, end = (new_event(timing=True, external=True) for _ in range(2))
    turns = itertools.cycle(products)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        start.record(main)
        done: list[torch.cuda.Event] = []
        for _ in range(LAYERS):
            for event in done:
                main.wait_event(event)
            next(turns)()
            ready = new_event()
            ready.record(main)
            done = []
            for stream in sides:
                with torch.cuda.stream(stream):
                    stream.wait_event(ready)
                    side()
                    done.append(new_event())
                    done[-1].record(stream)
            for launch in itertools.islice(turns, PRODUCTS - 1):
                launch()
        for event in done:
            main.wait_event(event)
        end.record(main)
    samples = []
    for _ in range(REPETITIONS + 1):
        graph.replay()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e-3)
    return summarise(samples[1:], LAYERS)
