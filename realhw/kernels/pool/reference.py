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
    key: torch.Tensor, value: torch.Tensor, open_kv: torch.Tensor, metadata: torch.Tensor, kv_len: torch.Tensor
) -> None:
    """Write the newest token into the open block and fold its key into the block's min and max, in place."""
    block_size = open_kv.shape[3]
    for b, n in enumerate(kv_len.tolist()):
        block, offset = divmod(n - 1, block_size)
        open_kv[b, :, 0, offset], open_kv[b, :, 1, offset] = key[b], value[b]
        if offset == 0:
            metadata[b, :, block, 0], metadata[b, :, block, 1] = key[b], key[b]
        else:
            metadata[b, :, block, 0] = torch.minimum(metadata[b, :, block, 0], key[b])
            metadata[b, :, block, 1] = torch.maximum(metadata[b, :, block, 1], key[b])
