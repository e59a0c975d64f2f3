"""What drafting costs in a decode step: an EAGLE-3 head with random weights, its KV of the whole context in HBM."""

from __future__ import annotations

from collections.abc import Callable

import torch

from realhw.kernels.activation.api import silu_multiply
from realhw.kernels.attention.api import AttentionConfig, attention_scratch, choose_splits, decode_attention
from realhw.weights import ModelWeights


class DraftHead:
    """Fuses three hidden states, then per drafted row one layer over the whole context and a small lm_head."""

    def __init__(
        self,
        weights: ModelWeights,
        batch_size: int,
        num_blocks: int,
        block_size_tokens: int,
        num_rows: int,
        fill: Callable[[torch.Tensor], None],
        generator: torch.Generator,
        num_sms: int,
    ) -> None:
        g, draft = weights.geometry, weights.draft
        device, dtype = weights.lm_head.device, weights.lm_head.dtype
        heads = batch_size * g.num_kv_heads

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

        self._weights, self._geometry, self._num_rows = draft, g, num_rows
        self._states, self._pair = random(batch_size, 3 * g.hidden_size), random(batch_size, 2 * g.hidden_size)
        self._pool = empty(heads * num_blocks, 2, block_size_tokens, g.head_dim)
        fill(self._pool)
        every_block = torch.arange(heads * num_blocks, dtype=torch.int32, device=device)
        self._table = every_block.view(batch_size, g.num_kv_heads, num_blocks)
        block_n = AttentionConfig().block_n
        self._splits = choose_splits(heads, num_blocks * block_size_tokens, block_n, num_sms, rows=1)
        self._scratch = attention_scratch(batch_size, g.num_kv_heads, g.head_dim, self._splits, device)
        self._x, self._o = empty(batch_size, g.hidden_size), empty(batch_size, g.hidden_size)
        self._qkv = empty(batch_size, g.qkv_size)
        self._attended = empty(batch_size, 1, g.num_q_heads, g.head_dim)
        self._gate_up, self._gated = empty(batch_size, 2 * g.ffn_size), empty(batch_size, g.ffn_size)
        self._logits = empty(batch_size, draft.lm_head.shape[0])

    def run(self, num_blocks: torch.Tensor, open_tokens: torch.Tensor) -> None:
        """Draft the rows; num_blocks int32 [B, H] of the context, open_tokens int32 [B] valid in the last."""
        g, draft = self._geometry, self._weights
        torch.mm(self._states, draft.fuse.t(), out=self._x)
        for _ in range(self._num_rows):
            torch.mm(self._pair, draft.layer.qkv.t(), out=self._qkv)
            query = self._qkv[:, : g.num_q_heads * g.head_dim].view(-1, 1, g.num_q_heads, g.head_dim)
            decode_attention(
                query, self._pool, self._table, num_blocks, open_tokens, self._attended, self._scratch, self._splits
            )
            torch.mm(self._attended.view(len(self._x), -1), draft.layer.o.t(), out=self._o)
            torch.mm(self._o, draft.layer.gate_up.t(), out=self._gate_up)
            silu_multiply(self._gate_up, self._gated)
            torch.mm(self._gated, draft.layer.down.t(), out=self._x)
            torch.mm(self._x, draft.lm_head.t(), out=self._logits)
