"""Key min/max pooling in plain torch."""

from __future__ import annotations

import torch


def pool_blocks(kv: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Per-channel min and max of each block's first `num_tokens` keys: [N, 2, d] of kv [N, 2, P, d]."""
    out = torch.empty(kv.shape[0], 2, kv.shape[3], dtype=kv.dtype, device=kv.device)
    for i, n in enumerate(num_tokens.tolist()):
        keys = kv[i, 0, :n]
        out[i, 0], out[i, 1] = keys.amin(0), keys.amax(0)
    return out


def append_token(
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    metadata: torch.Tensor,
    kv_len: torch.Tensor,
    slots_per_head: int,
    fill_slot: torch.Tensor | None,
) -> None:
    """Write the newest token into the open block and fold its key into the block's min and max, in place."""
    heads, block_size = metadata.shape[1], pool.shape[2]
    for b, n in enumerate(kv_len.tolist()):
        block, offset = divmod(n - 1, block_size)
        for h in range(heads):
            first = (b * heads + h) * slots_per_head
            slot = first + (block if fill_slot is None else slots_per_head - 1)
            if fill_slot is not None and offset == 0 and int(fill_slot[b, h]) >= 0:
                pool[first + int(fill_slot[b, h])] = pool[slot]
            pool[slot, 0, offset], pool[slot, 1, offset] = key[b, h], value[b, h]
        if offset == 0:
            metadata[b, :, block, 0], metadata[b, :, block, 1] = key[b], key[b]
        else:
            metadata[b, :, block, 0] = torch.minimum(metadata[b, :, block, 0], key[b])
            metadata[b, :, block, 1] = torch.maximum(metadata[b, :, block, 1], key[b])
