"""One request on its way through a replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class RequestState:
    index: int
    """Place in the workload."""
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    """Ids of the prompt's blocks; equal ids under equal predecessors hold the same KV."""
    replica: int = 0
    """That decodes it."""
    prefill_replica: int | None = None
    """Where prefill is elsewhere."""
    generated_tokens: int = 0
    """Output tokens that exist; while the request decodes, `DecodeBatch` counts them."""
    prefilled_tokens: int = 0
    """Of `prefill_target`, those whose KV exists."""
    started_s: float | None = None
    """When it first left the queue."""
    first_token_s: float | None = None
    second_token_s: float | None = None
    last_token_s: float | None = None
    """When a token came that the next one does not follow an iteration later: the first, or the last before it made
    room."""
    finished_s: float | None = None
    prefilled_s: float | None = None
    """When a prefill replica last had all its KV."""
    handover_s: float | None = None
    """From the end of its first prefill until decoding could start elsewhere."""
    network_bytes: int = 0
    """That crossed between prefill and decode for it, or are on their way."""
    reused_tokens: int = 0
    """Prompt tokens that a prefix cache had when it first started."""
    num_preemptions: int = 0
    is_prefilled: bool = False
    """A prefill replica has its KV."""
    left_blocks: int = 0
    """Of its prompt, that are still on the prefill side when it starts to decode."""
    pulled_blocks: int = 0
    """Of its prompt, that plans fetched from the prefill side: known when it stops decoding."""
    is_expected: bool = False
    """Its KV is sent as it is computed, to memory that is taken."""
    swapped_blocks: int = 0
    """Blocks whose KV waits on the host for the request to come back; 0: none."""

    @property
    def prefill_target(self) -> int:
        """Tokens whose KV must exist before the next token: the prompt, and after a preemption what was generated."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def kv_len(self) -> int:
        """KV length that its next decode step attends to: it counts the newest token, whose KV that step writes."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def remaining_tokens(self) -> int:
        """Prefill and output to come."""
        return self.prefill_target - self.prefilled_tokens + self.output_tokens - self.generated_tokens
