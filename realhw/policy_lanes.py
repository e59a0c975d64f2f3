"""Residency of a grid of policies over a batch of prompts, as a live decode drives it step by step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realhw.lockstep_drafter import NO_GUESS
from realhw.quality_options import QualityOptions
from realhw.sparse_decode import LaneRows, PromptKeys, Ranker, SparseAttention, rank_scores_on_device
from simulator.fetch_cap import allowed_blocks
from simulator.predictors import random_ranking
from simulator.residency_batch import ResidencyBatch
from simulator.specs.policy import PolicySpec
from traces.errors import InputError

Scalar = TypeVar("Scalar", bound=np.generic)


class PolicyLanes:
    """Lanes 0 … G − 1 of each prompt follow the grid's policies, lane G decodes densely.

    A step is: `begin`, `attention.run` with its mask, `rows` for tokens and `ranker`, then `plan`. Who is resident when
    is decided by `simulator.residency_batch`, as in replay.
    """

    def __init__(
        self,
        prompt: PromptKeys,
        grid: Sequence[PolicySpec],
        options: QualityOptions,
        selected: Sequence[int],
        steps: int,
    ) -> None:
        self.grid, self._options = grid, options
        self.size = grid[0].block_size_tokens
        self._device = prompt[0][0].device
        self.num_prompts, heads, num_tokens, _ = prompt[0][0].shape
        kept = np.array([_budget(p) // self.size for p in grid], dtype=np.int64)
        ahead = np.array([0 if p.predictor == "current" else p.lookahead_k for p in grid], dtype=np.int64)
        drafts = [int(k) if p.predictor in ("draft", "oracle") else 0 for p, k in zip(grid, ahead, strict=True)]
        self.attention = SparseAttention(
            prompt, self.size, LaneRows.of([*drafts, 0], self._device), selected, steps + 1
        )
        self._num_blocks = [-(-(num_tokens + 1 + step) // self.size) for step in range(steps + 1)]
        slots = kept + np.array([p.slack_blocks or 0 for p in grid], dtype=np.int64)
        by_score = np.array([p.eviction == "lowest-score" for p in grid])
        self._kept, self._ahead = self._per_lane(kept), self._per_lane(ahead)
        self._residency = ResidencyBatch(
            len(selected), heads, self._kept, self._per_lane(slots), self._per_lane(by_score), self._num_blocks[-1],
            options.threads or os.cpu_count() or 1,
        )  # fmt: skip
        self._allowed = [
            allowed_blocks(Fraction(str(p.fetch_cap)), int(k), steps + 1) for p, k in zip(grid, kept, strict=True)
        ]
        self._width = int(kept.max())
        self._drafted = torch.tensor([p.lookahead_k if p.predictor == "draft" else 0 for p in grid])
        self._oracle = torch.tensor([p.predictor == "oracle" for p in grid] + [False], device=self._device)
        blocks = np.array(self._num_blocks, dtype=np.int32)
        ahead_of_random = {p.lookahead_k for p in grid if p.predictor == "random"}
        layers = tuple(range(len(selected)))
        self._random = {
            k: random_ranking(layers, heads, blocks, self._width, k, options.seed) for k in sorted(ahead_of_random)
        }
        self._step = -1
        self._fetched_now = np.zeros(len(self._kept), dtype=np.int64)
        self._ranking: Tensor | None = None
        self._before = torch.empty(0)
        """Attended blocks bool [P, G, L, H, n] before any on-demand fetch of the step, without the open block."""

    def rows(self, real: Tensor, guesses: Tensor, following: Tensor | None) -> Tensor:
        """Tokens to run, int64 [P, G + 1, 1 + drafts].

        real: [P] or [P, G + 1], the step's token. guesses: [P, most] or [P, G + 1, most]. following: [P], what really
        comes next, for `oracle`.
        """
        most = self.attention.rows.most_drafts
        tokens = torch.zeros(self.num_prompts, len(self.grid) + 1, 1 + most, dtype=torch.long, device=self._device)
        tokens[..., 0] = real if real.ndim == 2 else real[:, None]
        wide = (guesses if guesses.ndim == 3 else guesses[:, None])[..., :most]
        tokens[..., 1 : 1 + wide.shape[-1]] = wide.clamp(min=0)
        if following is not None and self._oracle.any():
            tokens[:, self._oracle, 1] = following[:, None]
        return tokens

    def begin(self) -> Tensor | None:
        """Next step: attended blocks bool [P, G + 1, L, H, n], the open block included; None at the dense step 0."""
        self._step += 1
        self._fetched_now[:] = 0
        if self._step == 0:
            return None
        n = self._num_blocks[self._step]
        self._residency.begin(n)
        attended = self._on_device(self._residency.attended()[..., :n])
        self._before = attended
        return self._with_dense(attended, n)

    def ranker(self) -> Ranker | None:
        """For on-demand policies: fetch what this layer's own query selects before its attention."""
        if self._step == 0 or not (self._ahead == 0).any():
            return None
        step, n = self._step, self._num_blocks[self._step]
        due, allowed = np.where(self._ahead == 0, step, -1), self._allowed_at(step)

        def rank(layer: int, scores: Tensor) -> Tensor:
            ids = self._ranked(scores[:, :-1, :, 0]).flatten(0, 1)[:, None].cpu().numpy()
            self._fetched_now += self._residency.plan(ids, due, allowed, layer)
            attended = self._on_device(self._residency.attended(layer)[..., :n])
            return self._with_dense(attended, n)[:, :, 0]

        return rank

    def plan(self, guesses: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """After attention: plans for later steps. guesses as for `rows`: where the drafter had none, the step's own
        ranking serves. Returns (blocks fetched, hit rate) of this step, [P, G] each."""
        step, n, grid = self._step, self._num_blocks[self._step], len(self.grid)
        ids = self._ranked(torch.stack([scores[:, :-1] for scores in self.attention.scores], dim=2))
        true, predicted = ids[..., 0, :], ids[..., 1, :]
        predicted = torch.where(self._unguessed(guesses)[:, :, None, None, None], true, predicted)
        if step == 0:
            self._residency.admit(true[:, 0].cpu().numpy(), n)
            hits = np.ones((self.num_prompts, grid))
        else:
            hits = self._hit_rate(true, n)
        ranking = self._on_host(predicted.flatten(0, 1))
        for index, policy in enumerate(self.grid):
            if policy.predictor == "random" and step + policy.lookahead_k < len(self._num_blocks):
                ranking[index::grid] = self._random[policy.lookahead_k][step + policy.lookahead_k]
        due = np.where((self._ahead > 0) & (step + self._ahead < len(self._num_blocks)), step + self._ahead, -1)
        room = np.array([self._num_blocks[at] - n if at >= 0 else 0 for at in due.tolist()])
        fetched = self._residency.plan(ranking, due, self._allowed_at(step), room=room) + self._fetched_now
        return fetched.reshape(self.num_prompts, grid), hits

    def _unguessed(self, guesses: Tensor) -> Tensor:
        """Which lanes' drafts do not exist: bool [P, G]."""
        wide = guesses if guesses.ndim == 3 else guesses[:, None].expand(-1, len(self.grid) + 1, -1)
        if wide.shape[-1] == 0:
            return torch.zeros(self.num_prompts, len(self.grid), dtype=torch.bool, device=self._device)
        needed = self._drafted.to(self._device)
        found = (wide[:, :-1] != NO_GUESS).sum(dim=-1)
        return found < needed

    def _ranked(self, scores: Tensor) -> Tensor:
        return rank_scores_on_device(scores, self._width, self._options.score_levels_per_octave)

    def _hit_rate(self, true: Tensor, n: int) -> NDArray[np.float64]:
        """Mean over heads of |true ∩ attended| / min(K, n), before an on-demand fetch: [P, G]."""
        kept = torch.from_numpy(self._kept[: len(self.grid)]).to(self._device)[:, None, None, None]
        selectable = (true >= 0) & (torch.arange(true.shape[-1], device=self._device) < kept)
        found = self._before.gather(-1, true.clamp(min=0).long()) & selectable
        counts = found.sum(dim=-1).double() + (kept[..., 0] >= n)
        rate: NDArray[np.float64] = (counts / kept[..., 0].clamp(max=n)).mean(dim=(2, 3)).cpu().numpy()
        return rate

    def _on_host(self, ranking: Tensor) -> NDArray[np.int32]:
        """A copy in the same host memory every time: fresh pages would cost more than the transfer."""
        if self._ranking is None:
            self._ranking = torch.empty(ranking.shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return self._ranking.copy_(ranking).numpy()

    def _allowed_at(self, step: int) -> NDArray[np.int64]:
        return self._per_lane(np.array([allowed[step] for allowed in self._allowed]))

    def _per_lane(self, of_policy: NDArray[Scalar]) -> NDArray[Scalar]:
        return np.tile(of_policy, self.num_prompts)

    def _on_device(self, attended: NDArray[np.uint8]) -> Tensor:
        flat = torch.from_numpy(np.ascontiguousarray(attended)).to(self._device).bool()
        return flat.view(self.num_prompts, len(self.grid), *flat.shape[1:])

    def _with_dense(self, attended: Tensor, n: int) -> Tensor:
        both = torch.cat([attended, torch.ones_like(attended[:, :1])], dim=1)
        both[..., n - 1] = True
        return both


def _budget(policy: PolicySpec) -> int:
    if policy.kv_budget_tokens is None:
        raise InputError("policy.kv_budget_tokens is open")
    return policy.kv_budget_tokens
