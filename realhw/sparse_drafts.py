"""What drafts predict when their pass attends to a policy's working set only: one more pass per recorded step.

The pass runs the step's token and the guesses over the dense keys of all tokens before, restricted per KV head to the
blocks that the policy keeps (`simulator.residency_batch`); its own keys are dropped. So it tells what the working set
changes within a step, not what errors of earlier steps add: `oasis-sim quality` decodes under a policy throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realhw.block_scores import block_bounds, bound_scores, softcapped
from simulator.draft_pass import residency_rules
from simulator.fetch_cap import allowed_blocks
from simulator.residency_batch import ResidencyBatch
from simulator.specs.policy import PolicySpec
from traces.codec import rank_scores
from traces.errors import InputError
from traces.layout import num_blocks

_FIXED = {"selector": "minmax", "predictor": "draft", "miss_rule": "attend", "lookahead_mode": "single"}


def require_recordable(policy: PolicySpec) -> None:
    """Raises InputError for a policy whose working set this pass does not follow."""
    for name, value in _FIXED.items():
        if getattr(policy, name) != value:
            raise InputError(
                f"sparse_policy.{name} {getattr(policy, name)!r}: drafts are recorded under {value!r} only"
            )
    if policy.residency not in ("exact", "slack"):
        raise InputError(f"sparse_policy.residency {policy.residency!r}: drafts are recorded under exact or slack only")
    if policy.fetch_cap_scope != "head":
        raise InputError("sparse_policy.fetch_cap_scope: drafts are recorded under head only")
    budget = policy.kv_budget_tokens
    if budget is None or budget % policy.block_size_tokens or budget < policy.block_size_tokens:
        raise InputError(
            f"sparse_policy.kv_budget_tokens {budget} is no positive multiple of block size {policy.block_size_tokens}"
        )


class SparseDrafts:
    """Residency of one policy over all full-attention layers and KV heads, and the pass that attends to it.

    layers: model layers with full attention. context_tokens: KV length of the first step.
    """

    def __init__(
        self, policy: PolicySpec, layers: Sequence[int], num_heads: int, context_tokens: int, steps: int, levels: int
    ) -> None:
        rules = residency_rules(policy)
        self._size, self._ahead, self._levels = policy.block_size_tokens, policy.lookahead_k, levels
        self._kept = int(rules["kv_budget_tokens"]) // self._size
        self._layers = {layer: index for index, layer in enumerate(layers)}
        self._blocks = [num_blocks(context_tokens + t, self._size) for t in range(steps + policy.lookahead_k)]
        slots = np.array([self._kept + int(rules["slack_blocks"])], np.int64)
        self._residency = ResidencyBatch(
            len(layers), num_heads, np.array([self._kept], np.int64), slots,
            np.array([policy.eviction == "lowest-score"]), self._blocks[-1],
        )  # fmt: skip
        self._allowed = allowed_blocks(Fraction(str(policy.fetch_cap)), self._kept, steps)
        self._steps = steps
        self._step = -1
        self._attended: NDArray[np.bool_] | None = None
        self._scores: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Next step: what its pass attends to. Step 0 attends to everything and admits the first working set."""
        self._step += 1
        self._scores.clear()
        if self._step == 0:
            return
        n = self._blocks[self._step]
        self._residency.begin(n)
        attended = self._residency.attended()[0, ..., :n].astype(bool)
        attended[..., n - 1] = True
        self._attended = attended

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None
    ) -> Tensor | None:
        """Output [1, R, Hq, D] of query [1, Hq, R, D] over the working set; None for a layer with a window.

        key, value: [1, H, S + R, D], of which the last R are the pass's own rows.
        """
        if layer not in self._layers:
            return None
        heads, rows = key.shape[1], query.shape[2]
        kv_len = key.shape[2] - rows + 1
        grouped = query[0].float().view(heads, -1, rows, query.shape[3])
        low, high = block_bounds(key[0, :, :kv_len].float(), [self._size])[self._size]
        self._scores[layer] = bound_scores(grouped, low, high, scale, softcap)
        logits = softcapped(torch.einsum("hgrd,hsd->hgrs", grouped, key[0].float()) * scale, softcap)
        own = torch.ones(rows, rows, dtype=torch.bool, device=key.device).triu(1)
        logits[..., kv_len - 1 :].masked_fill_(own, float("-inf"))
        if self._attended is not None:
            blocks = torch.from_numpy(self._attended[self._layers[layer]]).to(key.device)
            seen = blocks.repeat_interleave(self._size, dim=-1)[:, : kv_len - 1]
            logits[..., : kv_len - 1].masked_fill_(~seen[:, None, None], float("-inf"))
        out = torch.einsum("hgrs,hsd->hgrd", logits.softmax(dim=-1), value[0].float())
        return out.flatten(0, 1).transpose(0, 1)[None].to(query.dtype)

    def plan(self) -> NDArray[np.float32]:
        """After the pass: plan for later steps. Scores float32 [L, H, R, n − 1] of all full-attention layers."""
        if len(self._scores) < len(self._layers):
            raise InputError(
                f"attention of {len(self._scores)} of {len(self._layers)} layers went through the interface"
            )
        scores = torch.stack([self._scores[layer] for layer in self._layers]).cpu().numpy()
        real = rank_scores(scores[:, :, 0], self._kept, self._levels)[0]
        if self._step == 0:
            self._residency.admit(real[None], self._blocks[0])
        due = self._step + self._ahead
        if due < self._steps:
            row = self._ahead if self._ahead < scores.shape[2] else 0
            predicted = rank_scores(scores[:, :, row], self._kept, self._levels)[0]
            room = np.array([self._blocks[due] - self._blocks[self._step]])
            allowed = self._allowed[self._step : self._step + 1]
            self._residency.plan(predicted[None], np.array([due]), allowed, room=room)
        return np.asarray(scores, np.float32)
