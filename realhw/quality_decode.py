"""One batch of prompts decoded under every policy of one block size: fed dense decode's tokens, or each its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from realhw.dense_decode import DenseRun, watched
from realhw.lockstep_drafter import features_of
from realhw.models import LoadedModel
from realhw.policy_lanes import PolicyLanes
from realhw.quality_options import QualityOptions
from simulator.specs.policy import PolicySpec

MEASURES = ("kl", "nll", "nll_dense", "agrees", "recall", "hit_rate", "fetched_blocks", "dense_agrees")
"""What `teacher_forced` returns. agrees: the policy's most likely token is that of its batch's dense lane;
dense_agrees: the dense lane's is the token that the model itself decoded."""


def teacher_forced(
    loaded: LoadedModel,
    dense: DenseRun,
    grid: Sequence[PolicySpec],
    options: QualityOptions,
    selected: Sequence[int],
    steps: int,
) -> dict[str, NDArray[np.float64]]:
    """Decode dense.tokens under every policy; means over steps 1 … `steps`, float64 [P, G] each."""
    lanes = PolicyLanes(dense.prompt, grid, options, selected, steps)
    sums: dict[str, Any] = dict.fromkeys(MEASURES, 0.0)
    with lanes.attention.installed(loaded.model):
        for step in range(steps + 1):
            guesses, following = dense.guesses[:, step], dense.tokens[:, step + 1]
            tokens = lanes.rows(dense.tokens[:, step], guesses, following)
            logits = lanes.attention.run(loaded.model, tokens, lanes.begin(), lanes.ranker())
            fetched, hit_rate = lanes.plan(guesses)
            if step == 0:
                continue
            log_p = logits.float().log_softmax(dim=-1)
            log_dense, sparse = log_p[:, -1:], log_p[:, :-1]
            index = following[:, None, None]
            best = log_dense.argmax(dim=-1)
            now = {
                "kl": (log_dense.exp() * (log_dense - sparse)).sum(dim=-1),
                "nll": -sparse.gather(2, index.expand(-1, len(grid), 1))[..., 0],
                "nll_dense": -log_dense.gather(2, index)[..., 0],
                "agrees": sparse.argmax(dim=-1) == best,
                "recall": torch.stack(lanes.attention.recall).mean(dim=(0, 3))[:, :-1],
                "dense_agrees": best == following[:, None],
            }
            for name, values in now.items():
                sums[name] = sums[name] + values.double().cpu().numpy()
            sums["fetched_blocks"] = sums["fetched_blocks"] + fetched
            sums["hit_rate"] = sums["hit_rate"] + hit_rate
    shape = (len(dense.tokens), len(grid))
    return {name: np.broadcast_to(total / steps, shape) for name, total in sums.items()}


def free_running(
    loaded: LoadedModel,
    dense: DenseRun,
    grid: Sequence[PolicySpec],
    options: QualityOptions,
    selected: Sequence[int],
    steps: int,
) -> NDArray[np.int64]:
    """Let every policy decode greedily on its own: the `steps` + 1 tokens of each, [P, G, steps + 1].

    The drafter goes by each lane's own tokens and hidden states. No policy of `grid` may be an oracle.
    """
    lanes = PolicyLanes(dense.prompt, grid, options, selected, steps)
    prompts, width, most = len(dense.tokens), len(grid) + 1, dense.first_guess.shape[1]
    drafter = dense.drafter.expanded(width)
    guesses = dense.first_guess[:, None].expand(-1, width, -1)
    real, chosen = dense.tokens[:, :1].expand(-1, width), []
    with lanes.attention.installed(loaded.model), watched(loaded, drafter) as passes:
        for _ in range(steps + 1):
            tokens = lanes.rows(real, guesses, None)
            logits = lanes.attention.run(loaded.model, tokens, lanes.begin(), lanes.ranker())
            lanes.plan(guesses)
            real = logits.argmax(dim=-1)
            chosen.append(real[:, :-1])
            if most:
                features = features_of(passes)
                if features is not None:
                    rows = features.view(prompts, -1, *features.shape[1:])
                    features = rows[:, :width].flatten(0, 1)
                guesses = drafter.guess(features, real.reshape(-1, 1), most).view(prompts, width, most)
    return torch.stack(chosen, dim=2).cpu().numpy()


def holds_answer(tokenizer: Any, tokens: Sequence[int], answer: str) -> bool:
    """Whether the text up to its end token has the answer, not as a part of a longer word or number."""
    listed = list(tokens)
    if tokenizer.eos_token_id in listed:
        listed = listed[: listed.index(tokenizer.eos_token_id)]
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w|[.,]\d)", tokenizer.decode(listed)) is not None
