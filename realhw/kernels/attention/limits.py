"""What the attention kernel takes. Plain data: who only picks points needs no torch."""

NUM_ROWS = 16
"""Query rows of one tile: draft rows x query heads per KV head, padded to the tensor cores' least."""
