"""What a layer's launches cost beside their work: layers of next to no work, with side streams and without."""

from __future__ import annotations

import gc

import numpy as np
import torch

from realhw.flows import Flow
from realhw.geometry import ModelGeometry
from realhw.graph_timer import summarise
from realhw.host_kv import HostKv, request_bytes
from realhw.measurement import Recorder
from realhw.runner import DecodeRunner
from realhw.step_trace import synthetic_step_trace
from realhw.weights import random_weights

TINY = ModelGeometry(
    "tiny", num_layers=36, hidden_size=512, num_q_heads=8, num_kv_heads=2, head_dim=128, ffn_size=1024, vocab_size=4096
)
"""Every kernel of a layer is little more than its launch; as many layers as a real model has."""
BLOCK_SIZE, NUM_KEPT = 16, 4
NUM_STEPS, REPETITIONS = 16, 9
CONTEXT_TOKENS = {"dense": BLOCK_SIZE * (NUM_KEPT + 1), "lookahead": BLOCK_SIZE * 16}
"""Attention reads as much in both: K blocks and the open one."""


def bench_layer_launches(recorder: Recorder) -> None:
    """Seconds of a layer, one request: dense in one stream; lookahead with B, H and D, whose gathers find no block."""
    weights = random_weights(TINY, torch.device("cuda"))
    for name, context_tokens in CONTEXT_TOKENS.items():
        if name == "dense":
            flow = Flow("dense", NUM_KEPT, block_size_tokens=BLOCK_SIZE)
        else:
            flow = Flow("lookahead", NUM_KEPT, slack_blocks=1, block_size_tokens=BLOCK_SIZE, fetch_cap=0.0)
        trace = synthetic_step_trace(
            NUM_STEPS + 4, TINY.num_layers, TINY.num_kv_heads, NUM_KEPT, context_tokens, BLOCK_SIZE,
            np.zeros(1, dtype=np.int32),
        )  # fmt: skip
        blocks = -(-(context_tokens + NUM_STEPS + 4) // BLOCK_SIZE)
        host = HostKv(request_bytes(TINY, blocks, BLOCK_SIZE)) if flow.moves else None
        view = None if host is None else host.view(TINY, 1, blocks, BLOCK_SIZE, host.num_bytes)
        runner = DecodeRunner(weights, flow, trace, NUM_STEPS, view)
        runner.prepare()
        runner.run()
        steps = [runner.step_seconds(runner.run())[NUM_STEPS // 2 :] for _ in range(REPETITIONS)]
        timing = summarise(np.mean(steps, axis=1), TINY.num_layers)
        recorder.add("layer_launches", timing.median_s, timing.spread_s, timing.repetitions, flow=name)
        del runner, view
        gc.collect()
        if host is not None:
            host.close()
