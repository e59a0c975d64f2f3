"""Where the prompt's own queries attend: softmax mass summed over them while prefill runs, never an S x S matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from realhw.block_scores import softcapped

_SLAB_BYTES = 128 << 20
"""Of fp32 logits at once."""


class PromptMass:
    """Softmax mass of the queries at positions 0 … N − 1, by token, mean over the query group.

    window: how many of the last queries are summed apart; None: none. all_queries: whether all are summed.
    """

    def __init__(self, num_tokens: int, all_queries: bool, window: int | None) -> None:
        self.num_tokens, self._all = num_tokens, all_queries
        self._first_of_window = num_tokens if window is None else max(0, num_tokens - window)
        self._sums: dict[tuple[str, int], Tensor] = {}

    def add(self, layer: int, rows: Tensor, keys: Tensor, scale: float, softcap: float | None) -> None:
        """Queries rows [H, G, R, D] at the last R positions of keys [H, S, D]."""
        heads, groups, count, _ = rows.shape
        start = keys.shape[1] - count
        first = 0 if self._all else max(0, self._first_of_window - start)
        slab = max(1, _SLAB_BYTES // (4 * heads * groups * keys.shape[1]))
        for at in range(first, count, slab):
            part = rows[:, :, at : at + slab]
            positions = torch.arange(start + at, start + at + part.shape[2], device=keys.device)
            logits = softcapped(torch.einsum("hgrd,hsd->hgrs", part, keys) * scale, softcap)
            later = torch.arange(keys.shape[1], device=keys.device) > positions[:, None]
            weights = logits.masked_fill_(later, float("-inf")).softmax(dim=-1).mean(dim=1)
            if self._all:
                self._add("prefill_mass", layer, weights.sum(dim=1))
            inside = positions >= self._first_of_window
            if inside.any():
                self._add("prompt_window_mass", layer, weights[:, inside].sum(dim=1))

    def of_layer(self, name: str, layer: int) -> Tensor:
        """`prefill_mass` or `prompt_window_mass`: float32 [H, N], the mean over the queries."""
        mass = self._sums[name, layer]
        return mass / mass.sum(dim=-1, keepdim=True)

    def _add(self, name: str, layer: int, mass: Tensor) -> None:
        if (name, layer) not in self._sums:
            self._sums[name, layer] = torch.zeros(mass.shape[0], self.num_tokens, device=mass.device)
        self._sums[name, layer][:, : mass.shape[1]] += mass
