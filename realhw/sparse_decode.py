"""Attention over per-policy working sets: many policies decode the same tokens side by side over one shared prefill.

Row b of the batch is one policy. Keys of the prompt are shared; keys of decoded tokens are each policy's own, because
what it attended to before changes them. The rules of residency are the simulator's; here blocks become token masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from realhw.hook import block_bounds, bound_scores
from traces.errors import InputError

ATTENTION_NAME = "oasis_sparse"
_active: SparseAttention | None = None

Ranker = Callable[[int, Tensor], Tensor | None]
"""(layer, scores [B, H, 2, n − 1]) -> attended blocks [B, H, n] where they depend on the step's own query."""


class SparseAttention:
    """Keys, values, block masks and what they gave in the current step.

    prompt: per layer (keys, values) [H, N, D]. predictor_row: int64 [B], the row whose query predicts (0: the real
    token's own).
    """

    def __init__(
        self,
        prompt: list[tuple[Tensor, Tensor]],
        block_size_tokens: int,
        predictor_row: Tensor,
        max_steps: int,
    ) -> None:
        self.prompt, self.block_size, self.predictor_row = prompt, block_size_tokens, predictor_row
        self.num_prompt = prompt[0][0].shape[1]
        shared_blocks = self.num_prompt // block_size_tokens
        covered = shared_blocks * block_size_tokens
        self._bounds = [
            block_bounds(keys[:, : covered + 1], [block_size_tokens])[block_size_tokens]
            if covered < keys.shape[1]
            else block_bounds(functional.pad(keys, (0, 0, 0, 1)), [block_size_tokens])[block_size_tokens]
            for keys, _ in prompt
        ]
        self._covered = covered
        heads, _, width = prompt[0][0].shape
        shape = (len(prompt), len(predictor_row), heads, max_steps, width)
        self._keys = torch.empty(shape, device=prompt[0][0].device, dtype=prompt[0][0].dtype)
        self._values = torch.empty_like(self._keys)
        self._done = 0
        self.attended: Tensor | None = None
        """bool [B, L, H, n] of this step, the open block included; None: everything (the dense step 0)."""
        self.ranker: Ranker | None = None
        self.scores: list[Tensor] = []
        """Per layer [B, H, 2, n − 1]: of the real token's query, of the predictor's."""
        self.recall: list[Tensor] = []
        """Per layer [B, H]: softmax mass of the real token's query on attended blocks, mean over the query group."""

    @property
    def kv_len(self) -> int:
        """Of the real token that runs next, itself included."""
        return self.num_prompt + self._done + 1

    @property
    def num_blocks(self) -> int:
        return -(-self.kv_len // self.block_size)

    @contextmanager
    def installed(self, model: Any) -> Iterator[None]:
        """Route the model's attention here."""
        global _active
        before = model.config._attn_implementation
        AttentionInterface.register(ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)
        model.set_attn_implementation(ATTENTION_NAME)
        _active = self
        try:
            yield
        finally:
            _active = None
            model.set_attn_implementation(before)

    def run(self, model: Any, tokens: Tensor, attended: Tensor | None, ranker: Ranker | None = None) -> Tensor:
        """One step of every policy: tokens int64 [B, R], the real token and drafts after it; logits [B, V] of row 0."""
        self.attended, self.ranker = attended, ranker
        self.scores, self.recall = [], []
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None] + self.kv_len - 1
        hidden = model.base_model(
            input_ids=tokens, position_ids=positions.expand(len(tokens), -1), use_cache=False
        ).last_hidden_state
        if len(self.scores) != len(self.prompt):
            raise InputError(f"attention of {len(self.scores)} of {len(self.prompt)} layers went through the interface")
        self._done += 1
        logits: Tensor = model.get_output_embeddings()(hidden[:, 0])
        return logits

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [B, Hq, R, D], key and value [B, H, R, D] of this step's rows -> [B, Hq, R, D]."""
        batch, heads, rows, width = key.shape
        grouped = query.view(batch, heads, -1, rows, width)
        self._keys[layer, :, :, self._done] = key[:, :, 0]
        self._values[layer, :, :, self._done] = value[:, :, 0]
        scores = self._scores(layer, grouped, scale)
        self.scores.append(scores)
        blocks = None if self.attended is None else self.attended[:, layer]
        if self.ranker is not None:
            own = self.ranker(layer, scores)
            blocks = blocks if own is None else own
        decoded = self._done
        flat = grouped.flatten(2, 3)  # [B, H, G·R, D]
        shared_keys, shared_values = self.prompt[layer]
        shared = flat.transpose(0, 1).flatten(1, 2) @ shared_keys.transpose(1, 2)
        logits = torch.cat(
            [
                shared.view(heads, batch, -1, self.num_prompt).transpose(0, 1),
                flat @ self._keys[layer, :, :, :decoded].transpose(2, 3),
                flat @ key.transpose(2, 3),
            ],
            dim=-1,
        )
        logits = (logits * scale).float().view(batch, heads, -1, rows, logits.shape[-1])
        later = torch.ones(rows, rows, dtype=torch.bool, device=key.device).triu(1)
        logits[..., self.num_prompt + decoded :].masked_fill_(later, float("-inf"))
        everything = logits[:, :, :, 0].softmax(dim=-1)
        if blocks is None:
            self.recall.append(torch.ones(batch, heads, device=key.device))
        else:
            cached = self.num_prompt + decoded
            seen = blocks.repeat_interleave(self.block_size, dim=-1)[..., : cached + 1]
            self.recall.append((everything[..., : cached + 1] * seen[:, :, None]).sum(dim=-1).mean(dim=-1))
            logits[..., :cached].masked_fill_(~seen[:, :, None, None, :cached], float("-inf"))
        weights = logits.softmax(dim=-1).to(value.dtype).flatten(2, 3)
        out = (
            (weights[..., : self.num_prompt].transpose(0, 1).flatten(1, 2) @ shared_values)
            .view(heads, batch, -1, width)
            .transpose(0, 1)
        )
        out = out + weights[..., self.num_prompt : self.num_prompt + decoded] @ self._values[layer, :, :, :decoded]
        out = out + weights[..., self.num_prompt + decoded :] @ value
        return out.view(batch, heads, -1, rows, width).flatten(1, 2)

    def _scores(self, layer: int, grouped: Tensor, scale: float) -> Tensor:
        batch, heads, groups, _, width = grouped.shape
        index = self.predictor_row.view(-1, 1, 1, 1, 1).expand(batch, heads, groups, 1, width)
        rows = torch.cat([grouped[:, :, :, :1], grouped.gather(3, index)], dim=3).float()
        low, high = self._bounds[layer]
        of_prompt = bound_scores(rows.permute(1, 2, 0, 3, 4).flatten(2, 3), low.float(), high.float(), scale, None)
        parts = [of_prompt.view(heads, batch, 2, -1).transpose(0, 1)]
        filled = self.num_blocks - 1 - self._covered // self.block_size
        if filled > 0:
            left = self.prompt[layer][0][:, self._covered :]
            own = self._keys[layer, :, :, : self._done + 1]
            tail = torch.cat([left.expand(batch, -1, -1, -1), own], dim=2)[:, :, : filled * self.block_size].float()
            blocks = tail.reshape(batch * heads, filled, self.block_size, width)
            own_scores = bound_scores(rows.flatten(0, 1), blocks.amin(dim=2), blocks.amax(dim=2), scale, None)
            parts.append(own_scores.view(batch, heads, 2, -1))
        return torch.cat(parts, dim=-1)[..., : self.num_blocks - 1]


def rank_scores_on_device(scores: Tensor, num_ranked_blocks: int, levels_per_octave: int) -> Tensor:
    """`traces.codec.rank_scores` on the scores' device: ids int32 [..., M], −1 where there are fewer blocks."""
    count = scores.shape[-1]
    keep = min(num_ranked_blocks, count)
    out = torch.full((*scores.shape[:-1], num_ranked_blocks), -1, dtype=torch.int32, device=scores.device)
    if keep == 0:
        return out
    values = scores.double()
    anchor = values.topk(keep, dim=-1).values[..., -1:]
    levels = ((values - anchor) * levels_per_octave).round().clamp(-1, 255).long()
    keys = (255 - levels) * 2**24 + torch.arange(count, device=scores.device)
    best = keys.topk(keep, dim=-1, largest=False, sorted=True).values
    out[..., :keep] = (best % 2**24).int()
    return out


def default_scale(head_dim: int, scaling: float | None) -> float:
    return 1 / math.sqrt(head_dim) if scaling is None else scaling


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **kwargs: Any) -> Any:
    if _active is None:
        raise InputError("the sparse attention ran outside a decode")
    for name in ("softcap", "s_aux", "sliding_window"):
        if kwargs.get(name) is not None:
            raise InputError(f"quality: attention with {name} is not supported")
    scale = default_scale(key.shape[-1], kwargs.get("scaling"))
    out = _active.attend(int(module.layer_idx), query, key, value, scale)
    return out.transpose(1, 2).contiguous(), None
