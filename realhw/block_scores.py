"""What a decode step's query sees of each KV block: softmax mass, and scores by which a selector ranks blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def token_mass(query: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Softmax over keys [H, S, D] of query [H, G, D], mean over the group: [H, S]."""
    logits = softcapped(torch.einsum("hgd,hsd->hgs", query, keys) * scale, softcap)
    return logits.softmax(dim=-1).mean(dim=1)


def block_sums(mass: Tensor, block_size_tokens: int) -> Tensor:
    """Sums of mass [H, S] over blocks, the last of which may be partial: [H, ceil(S/P)]."""
    missing = -mass.shape[-1] % block_size_tokens
    padded = torch.nn.functional.pad(mass, (0, missing))
    return padded.view(mass.shape[0], -1, block_size_tokens).sum(dim=-1)


def block_bounds(keys: Tensor, block_sizes: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Per-channel minimum and maximum of each selectable block's keys [H, S, D], each [H, ceil(S/P) − 1, D].

    Coarser block sizes pool finer ones that divide them. `block_sizes` ascends.
    """
    bounds: dict[int, tuple[Tensor, Tensor]] = {}
    for size in block_sizes:
        blocks = -(-keys.shape[1] // size) - 1
        finer = max((s for s in bounds if size % s == 0), default=None)
        low, high, factor = (keys, keys, size) if finer is None else (*bounds[finer], size // finer)
        shape = (keys.shape[0], blocks, factor, keys.shape[2])
        bounds[size] = (
            low[:, : blocks * factor].reshape(shape).amin(dim=2),
            high[:, : blocks * factor].reshape(shape).amax(dim=2),
        )
    return bounds


def block_means(keys: Tensor, block_size_tokens: int) -> Tensor:
    """Mean key of each selectable block of keys [H, S, D]: [H, ceil(S/P) − 1, D]."""
    blocks = -(-keys.shape[1] // block_size_tokens) - 1
    shape = (keys.shape[0], blocks, block_size_tokens, keys.shape[2])
    return keys[:, : blocks * block_size_tokens].reshape(shape).mean(dim=2)


def bound_scores(rows: Tensor, low: Tensor, high: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Upper bound of each block's largest logit, in octaves: rows [H, G, R, D], bounds [H, n, D] -> [H, R, n].

    Sum over d of max(q_d * max_d, q_d * min_d), maximum over the query group. Source: Quest (arXiv 2406.10774), §3.3.
    """
    score = torch.einsum("hgrd,hnd->hgrn", rows.clamp(min=0), high)
    score += torch.einsum("hgrd,hnd->hgrn", rows.clamp(max=0), low)
    return softcapped(score * scale, softcap).amax(dim=1) / math.log(2)


def mean_scores(query: Tensor, means: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Logit of each block's mean key, in octaves: query [H, G, D], means [H, n, D] -> [H, n], the group's maximum."""
    score = torch.einsum("hgd,hnd->hgn", query, means)
    return softcapped(score * scale, softcap).amax(dim=1) / math.log(2)


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
