"""Watch a Hugging Face model's attention while it decodes: block scores and softmax mass, never an S x S matrix.

The hook sits in transformers' attention-function registry under one name and delegates the attention itself to the
implementation that the model had.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from traces.errors import OasisError

ATTENTION_NAME = "oasis_record"
_active: AttentionTap | None = None


class RecordError(OasisError):
    """A model whose attention the hook did not see, or saw in a form that it cannot record."""


@dataclass(frozen=True, slots=True)
class StepAttention:
    """One decode step's attention by block size, for the layers recorded there.

    scores: float32 [L_P, H, R, n − 1], the min/max bound of row r's query on each selectable block, maximum over the
    query group, in log2 of softmax weight. Row 0 is the real token, row j the token guessed j positions ahead; all
    against the blocks that exist now. mass: float32 [L_P, H, n], softmax mass of row 0, mean over the query group.
    """

    scores: dict[int, NDArray[np.float32]]
    mass: dict[int, NDArray[np.float32]]


class AttentionTap:
    """Collects what every layer's attention does in one forward pass.

    block_layers: model layers to record, by block size in tokens.
    """

    def __init__(self, num_layers: int, block_layers: Mapping[int, tuple[int, ...]]) -> None:
        self.num_layers = num_layers
        self.block_layers = {size: tuple(layers) for size, layers in sorted(block_layers.items())}
        self.delegate = "sdpa"
        self._kv_len: int | None = None
        self._num_rows = 1
        self._seen: set[int] = set()
        self._scores: dict[tuple[int, int], Tensor] = {}
        self._mass: dict[tuple[int, int], Tensor] = {}

    @contextmanager
    def installed(self, model: Any) -> Iterator[None]:
        """Route `model`'s attention through this tap until the block ends. One tap at a time."""
        global _active
        if _active is not None:
            raise RecordError("another recording is running in this process")
        self.delegate = model.config._attn_implementation
        AttentionInterface.register(ATTENTION_NAME, _attention)
        mask = ALL_MASK_ATTENTION_FUNCTIONS[self.delegate]
        AttentionMaskInterface.register(ATTENTION_NAME, mask)
        model.set_attn_implementation(ATTENTION_NAME)
        _active = self
        try:
            yield
        finally:
            _active = None
            model.set_attn_implementation(self.delegate)

    def begin(self, kv_len: int, num_rows: int) -> None:
        """Record the next forward pass: the real token, whose KV length becomes `kv_len`, and num_rows − 1 guesses."""
        self._kv_len, self._num_rows = kv_len, num_rows
        self._seen.clear()
        self._scores.clear()
        self._mass.clear()

    def finish(self) -> StepAttention:
        """What the pass left. Raises RecordError naming the layers whose attention was not seen."""
        self._kv_len = None
        unseen = sorted(set(range(self.num_layers)) - self._seen)
        if unseen:
            raise RecordError(
                f"attention of {len(unseen)} of {self.num_layers} layers was not seen (layers {_ranges(unseen)}): "
                "the model does not route it through transformers' attention interface"
            )
        scores, mass = {}, {}
        for size, layers in self.block_layers.items():
            scores[size] = torch.stack([self._scores[size, layer] for layer in layers]).cpu().numpy()
            mass[size] = torch.stack([self._mass[size, layer] for layer in layers]).cpu().numpy()
        return StepAttention(scores, mass)

    def observe(self, module: Any, query: Tensor, key: Tensor, scaling: float | None, softcap: float | None) -> None:
        """Record layer `module.layer_idx`: query [1, Hq, R, D], key [1, H, kv_len + R − 1, D], after rotation."""
        if self._kv_len is None:
            return
        layer = int(module.layer_idx)
        self._seen.add(layer)
        sizes = [size for size, layers in self.block_layers.items() if layer in layers]
        if not sizes:
            return
        if query.shape[0] != 1 or query.shape[2] != self._num_rows:
            shape = tuple(query.shape)
            raise RecordError(f"layer {layer}: query has shape {shape}, expected batch 1 and {self._num_rows} rows")
        if key.shape[2] != self._kv_len + self._num_rows - 1:
            raise RecordError(
                f"layer {layer}: the cache holds {key.shape[2]} keys, expected {self._kv_len + self._num_rows - 1}"
            )
        keys = key[0, :, : self._kv_len].float()
        rows = query[0].float().view(keys.shape[0], -1, self._num_rows, keys.shape[2])
        scale = keys.shape[2] ** -0.5 if scaling is None else scaling
        mass = token_mass(rows[:, :, 0], keys, scale, softcap)
        for size, (low, high) in block_bounds(keys, sizes).items():
            self._mass[size, layer] = block_sums(mass, size)
            self._scores[size, layer] = bound_scores(rows, low, high, scale, softcap)


def token_mass(query: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Softmax over keys [H, S, D] of query [H, G, D], mean over the group: [H, S]."""
    logits = _softcapped(torch.einsum("hgd,hsd->hgs", query, keys) * scale, softcap)
    return logits.softmax(dim=-1).mean(dim=1)


def block_sums(mass: Tensor, block_size_tokens: int) -> Tensor:
    """Sums of mass [H, S] over blocks, the last of which may be partial: [H, ceil(S/P)]."""
    missing = -mass.shape[-1] % block_size_tokens
    padded = torch.nn.functional.pad(mass, (0, missing))
    return padded.view(mass.shape[0], -1, block_size_tokens).sum(dim=-1)


def block_bounds(keys: Tensor, block_sizes: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Per-channel minimum and maximum of each selectable block's keys [H, S, D], each [H, ceil(S/P) − 1, D].

    Coarser block sizes pool finer ones that divide them. `block_sizes` ascends.
    """
    num_tokens = keys.shape[1]
    bounds: dict[int, tuple[Tensor, Tensor]] = {}
    for size in block_sizes:
        blocks = -(-num_tokens // size) - 1
        finer = max((s for s in bounds if size % s == 0), default=None)
        low, high, factor = (keys, keys, size) if finer is None else (*bounds[finer], size // finer)
        shape = (keys.shape[0], blocks, factor, keys.shape[2])
        bounds[size] = (
            low[:, : blocks * factor].reshape(shape).amin(dim=2),
            high[:, : blocks * factor].reshape(shape).amax(dim=2),
        )
    return bounds


def bound_scores(rows: Tensor, low: Tensor, high: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Upper bound of each block's largest logit, in octaves: rows [H, G, R, D], bounds [H, n, D] -> [H, R, n].

    Sum over d of max(q_d * max_d, q_d * min_d), maximum over the query group. Source: Quest (arXiv 2406.10774), §3.3.
    """
    score = torch.einsum("hgrd,hnd->hgrn", rows.clamp(min=0), high)
    score += torch.einsum("hgrd,hnd->hgrn", rows.clamp(max=0), low)
    return _softcapped(score * scale, softcap).amax(dim=1) / math.log(2)


def _softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    if _active is None:
        raise RecordError("the recording attention ran without a recording")
    if kwargs.get("s_aux") is not None:
        raise RecordError("attention sinks that are no tokens (s_aux) are not supported")
    _active.observe(module, query, key, kwargs.get("scaling"), kwargs.get("softcap"))
    if _active.delegate == "eager":
        delegate = sys.modules[type(module).__module__].eager_attention_forward
    else:
        delegate = ALL_ATTENTION_FUNCTIONS[_active.delegate]
    return delegate(module, query, key, value, attention_mask, **kwargs)


def _ranges(values: list[int]) -> str:
    """1, 2, 3, 7 -> '1-3, 7'."""
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
