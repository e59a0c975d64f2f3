"""The KV cache of a recording: whole for full attention, a window for layers that have one, cut back after guesses."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from traces.errors import InputError


def new_cache(model: Any) -> DynamicCache:
    """An empty cache. Windowed layers keep their window only, where this transformers can cut such a cache back."""
    cache = DynamicCache(config=model.config)
    windowed = any(getattr(layer, "is_sliding", False) for layer in cache.layers)
    return DynamicCache() if windowed and not hasattr(cache, "activate_past_recording") else cache


def prepare_cutting(cache: DynamicCache) -> None:
    """From here on every pass is followed by `cut`."""
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()


def cut(cache: DynamicCache, num_rows: int) -> None:
    """Drop the last `num_rows` tokens."""
    if num_rows or hasattr(cache, "activate_past_recording"):
        cache.crop(-num_rows)


def require_cached(cache: DynamicCache, num_tokens: int, model: str) -> None:
    """Raises InputError where a pass over `num_tokens` left the cache without them."""
    if cache.get_seq_length() != num_tokens:
        raise InputError(
            f"{model} keeps no KV cache that transformers manages: {cache.get_seq_length()} of {num_tokens} tokens are "
            "in it; a recording needs one"
        )
