"""Attention over per-policy working sets: many policies decode many prompts side by side over shared prefills.

A *lane* is one policy of one prompt. Keys of a prompt are shared by its lanes; keys of decoded tokens are each lane's
own, because what it attended to before changes them. A lane runs its real token and the draft tokens that its predictor
needs: its *rows*, each one sequence of the model's batch. The rules of residency are the simulator's; here blocks
become token masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from realhw.block_scores import bound_scores
from traces.errors import InputError

ATTENTION_NAME = "oasis_sparse"
_active: SparseAttention | None = None

PromptKeys = list[tuple[Tensor, Tensor]]
"""Per layer of the model: keys and values [P, H, N, D] of the tokens that a batch of P prompts shares among lanes."""

Ranker = Callable[[int, Tensor], Tensor]
"""(selected layer, scores [P, B, H, 2, n − 1]) -> attended blocks [P, B, H, n], the open one included, where they
depend on the step's own query."""


@dataclass(frozen=True, slots=True)
class LaneRows:
    """The rows of B lanes in the order in which the model runs them: all real tokens, then all first drafts, ….

    lane, rank: int64 [R], whose row it is and how many positions ahead of the real token. predictor: int64 [B], the row
    whose query predicts; the real one where a lane runs no draft.
    """

    lane: Tensor
    rank: Tensor
    predictor: Tensor

    @classmethod
    def of(cls, num_drafts: Sequence[int], device: Any) -> LaneRows:
        """num_drafts: how many draft tokens each lane runs."""
        most = max(num_drafts, default=0)
        rows = [(lane, rank) for rank in range(most + 1) for lane, drafts in enumerate(num_drafts) if rank <= drafts]
        place = {row: index for index, row in enumerate(rows)}
        predictor = [place[lane, drafts] for lane, drafts in enumerate(num_drafts)]
        lane, rank = zip(*rows, strict=True)
        return cls(*(torch.tensor(values, device=device) for values in (lane, rank, predictor)))

    @property
    def num_lanes(self) -> int:
        return len(self.predictor)

    @property
    def most_drafts(self) -> int:
        return int(self.rank[-1])


class SparseAttention:
    """Keys, values, block masks and what they gave in the current step.

    prompt: keys of the prompts. selected: the model's layers whose blocks are selected; the others have the sliding
    window that the model gives them and no residency.
    """

    def __init__(
        self, prompt: PromptKeys, block_size_tokens: int, rows: LaneRows, selected: Sequence[int], max_steps: int
    ) -> None:
        self.prompt, self.block_size, self.rows = prompt, block_size_tokens, rows
        self.selected = {layer: index for index, layer in enumerate(selected)}
        keys = prompt[0][0]
        self.num_prompts, heads, self.num_prompt_tokens, width = keys.shape
        self._shared_blocks = self.num_prompt_tokens // block_size_tokens
        self._bounds = {layer: self._bounds_of(prompt[layer][0]) for layer in selected}
        length = max_steps + rows.most_drafts
        shape = (len(prompt), self.num_prompts, rows.num_lanes, heads, length, width)
        # Zeros, as positions that a lane never writes are read with weight 0.
        self._keys = torch.zeros(shape, device=keys.device, dtype=keys.dtype)
        self._values = torch.zeros_like(self._keys)
        self._done, self._seen_layers = 0, 0
        self.attended: Tensor | None = None
        """bool [P, B, L, H, n] of this step, the open block included; None: everything (the dense step 0)."""
        self.ranker: Ranker | None = None
        self.scores: list[Tensor] = []
        """Per selected layer [P, B, H, 2, n − 1]: of the real token's query, of the predictor's."""
        self.recall: list[Tensor] = []
        """Per selected layer [P, B, H]: softmax mass of the real token's query on attended blocks, mean over the query
        group."""

    @property
    def kv_len(self) -> int:
        """Of the real token that runs next, itself included."""
        return self.num_prompt_tokens + self._done + 1

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
        """One step of every lane: tokens int64 [P, B, 1 + drafts], the real one first; its logits [P, B, V]."""
        self.attended, self.ranker = attended, ranker
        self.scores, self.recall, self._seen_layers = [], [], 0
        rows = self.rows
        ids = tokens[:, rows.lane, rows.rank].flatten()[:, None]
        positions = (rows.rank + self.kv_len - 1).repeat(self.num_prompts)[:, None]
        hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        if self._seen_layers != len(self.prompt):
            raise InputError(f"attention of {self._seen_layers} of {len(self.prompt)} layers went through the hook")
        self._done += 1
        real = hidden.view(self.num_prompts, len(rows.lane), -1)[:, : rows.num_lanes]
        logits: Tensor = model.get_output_embeddings()(real)
        return logits

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """query [P·R, Hq, 1, D], key and value [P·R, H, 1, D] of this step's rows -> [P·R, Hq, 1, D]."""
        rows, done, num_shared = self.rows, self._done, self.num_prompt_tokens
        prompts, num_rows, heads, width = self.num_prompts, len(rows.lane), key.shape[1], key.shape[3]
        self._seen_layers += 1
        grouped = query.view(prompts, num_rows, heads, -1, width)
        for kept, new in ((self._keys[layer], key), (self._values[layer], value)):
            kept[:, rows.lane, :, done + rows.rank] = new.view(prompts, num_rows, heads, width).transpose(0, 1)
        blocks = None if window is not None else self._select(layer, grouped, scale)
        own_length = done + 1 + rows.most_drafts
        own_keys, own_values = (
            kept[layer, :, :, :, :own_length].index_select(1, rows.lane) for kept in (self._keys, self._values)
        )
        scaled = grouped * scale
        by_head = scaled.transpose(1, 2).flatten(2, 3)  # [P, H, R·G, D]
        shared_keys, shared_values = self.prompt[layer]
        of_prompt = (by_head @ shared_keys.transpose(2, 3)).view(prompts, heads, num_rows, -1, num_shared)
        of_own = torch.einsum("prhgd,prhtd->phrgt", scaled, own_keys)
        logits = torch.cat([of_prompt, of_own], dim=-1).float()
        position = torch.arange(logits.shape[-1], device=key.device) - (num_shared + done)
        hidden = position > rows.rank[:, None]
        if window is not None:
            hidden |= position <= rows.rank[:, None] - window
            logits.masked_fill_(hidden[:, None], float("-inf"))
        else:
            logits[..., num_shared:].masked_fill_(hidden[:, None, num_shared:], float("-inf"))
            self._mask_blocks(logits, blocks)
        weights = logits.softmax(dim=-1).to(value.dtype)
        mixed = (weights[..., :num_shared].flatten(2, 3) @ shared_values).view(prompts, heads, num_rows, -1, width)
        mixed = mixed + torch.einsum("phrgt,prhtd->phrgd", weights[..., num_shared:], own_values)
        return mixed.transpose(1, 2).reshape(query.shape)

    def _select(self, layer: int, grouped: Tensor, scale: float) -> Tensor | None:
        """Score the blocks and say which ones attention reads: bool [P, B, H, n], None for all."""
        index = self.selected[layer]
        scores = self._scores(layer, grouped, scale)
        self.scores.append(scores)
        if self.ranker is not None:
            return self.ranker(index, scores)
        return None if self.attended is None else self.attended[:, :, index]

    def _mask_blocks(self, logits: Tensor, blocks: Tensor | None) -> None:
        """Hide what is not attended from logits [P, H, R, G, tokens], in place, and keep the recall."""
        rows, cached = self.rows, self.num_prompt_tokens + self._done
        if blocks is None:
            shape = (self.num_prompts, rows.num_lanes, logits.shape[1])
            self.recall.append(torch.ones(shape, device=logits.device))
            return
        real = logits[:, :, : rows.num_lanes]
        everything = real.logsumexp(dim=-1)
        seen = blocks[..., None].expand(*blocks.shape, self.block_size).flatten(-2)[..., :cached]
        by_row = seen.index_select(1, rows.lane).transpose(1, 2)
        logits[..., :cached].masked_fill_(~by_row[:, :, :, None], float("-inf"))
        self.recall.append((real.logsumexp(dim=-1) - everything).exp().mean(dim=-1).transpose(1, 2))

    def _bounds_of(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Per-channel minimum and maximum of the prompts' whole blocks, [P·H, n, D] each."""
        flat = keys.flatten(0, 1)
        covered = flat[:, : self._shared_blocks * self.block_size].float()
        blocks = covered.view(len(flat), self._shared_blocks, self.block_size, flat.shape[2])
        return blocks.amin(dim=2), blocks.amax(dim=2)

    def _scores(self, layer: int, grouped: Tensor, scale: float) -> Tensor:
        prompts, _, heads, groups, width = grouped.shape
        lanes = self.rows.num_lanes
        pair = torch.stack([grouped[:, :lanes], grouped[:, self.rows.predictor]], dim=2).float()  # [P, B, 2, H, G, D]
        low, high = self._bounds[layer]
        by_head = pair.permute(0, 3, 4, 1, 2, 5).reshape(prompts * heads, groups, lanes * 2, width)
        of_prompt = bound_scores(by_head, low, high, scale, None).view(prompts, heads, lanes, 2, -1).transpose(1, 2)
        filled = self.num_blocks - 1 - self._shared_blocks
        if filled <= 0:
            return of_prompt[..., : self.num_blocks - 1]
        left = self.prompt[layer][0][:, None, :, self._shared_blocks * self.block_size :]
        own = self._keys[layer, :, :, :, : self._done + 1]
        tail = torch.cat([left.expand(-1, lanes, -1, -1, -1), own], dim=3)[..., : filled * self.block_size, :].float()
        blocks = tail.reshape(-1, filled, self.block_size, width)
        by_lane = pair.permute(0, 1, 3, 4, 2, 5).reshape(len(blocks), groups, 2, width)
        of_own = bound_scores(by_lane, blocks.amin(dim=2), blocks.amax(dim=2), scale, None)
        return torch.cat([of_prompt, of_own.view(prompts, lanes, heads, 2, filled)], dim=-1)


def rank_scores_on_device(scores: Tensor, num_ranked_blocks: int, levels_per_octave: int) -> Tensor:
    """`traces.codec.rank_scores` on the scores' device: ids int32 [..., M], −1 where there are fewer blocks."""
    count = scores.shape[-1]
    keep = min(num_ranked_blocks, count)
    out = torch.full((*scores.shape[:-1], num_ranked_blocks), -1, dtype=torch.int32, device=scores.device)
    if keep == 0:
        return out
    anchor = scores.topk(keep, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True).double()
    levels = ((scores.double() - anchor) * levels_per_octave).round().clamp(-1, 255).int()
    keys = (255 - levels) * 2**22 + torch.arange(count, dtype=torch.int32, device=scores.device)
    best = keys.topk(keep, dim=-1, largest=False, sorted=True).values
    out[..., :keep] = best % 2**22
    return out


def default_scale(head_dim: int, scaling: float | None) -> float:
    return 1 / math.sqrt(head_dim) if scaling is None else scaling


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **kwargs: Any) -> Any:
    if _active is None:
        raise InputError("the sparse attention ran outside a decode")
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise InputError(f"quality: attention with {name} is not supported")
    layer = int(module.layer_idx)
    window = None if layer in _active.selected else kwargs.get("sliding_window")
    if layer not in _active.selected and window is None:
        raise InputError(f"quality: layer {layer} is neither full attention nor has a sliding window")
    scale = default_scale(key.shape[-1], kwargs.get("scaling"))
    out = _active.attend(layer, query, key, value, scale, window)
    return out.transpose(1, 2).contiguous(), None
