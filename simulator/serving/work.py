"""What an iteration computes and moves, and what came of it; the two iteration models price the same totals."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.serving.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt that an iteration prefills."""

    request: RequestState
    tokens: int
    before: int
    """Tokens of the request whose KV exists already."""

    @property
    def is_last(self) -> bool:
        """The iteration ends with the request's next token."""
        return self.before + self.tokens == self.request.prefill_target


@dataclass(frozen=True, slots=True)
class Batch:
    """What the scheduler chose for an iteration; every request that decodes takes part."""

    num_decoding: int
    chunks: tuple[Chunk, ...] = ()
    bytes_out: int = 0
    """KV that moves to the host before the iteration starts, per GPU: swapped, or kept for later prompts."""
    pulls: tuple[RequestState, ...] = ()
    """Requests whose memory is taken and whose KV comes from a prefill replica."""
    returned: tuple[RequestState, ...] = ()
    """Requests that made room, to be prefilled again by a prefill replica."""
    bytes_in: int = 0
    """KV that comes back: swapped, or reused."""
    remote_bytes_in: int = 0
    """Of `bytes_in`, what comes from beyond the host."""
    stopped: tuple[RequestState, ...] = ()
    """Requests that decoded in the iteration before and made room."""

    @property
    def is_empty(self) -> bool:
        return not self.num_decoding and not self.chunks

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def num_ended_prompts(self) -> int:
        """Prompts whose last chunk this is: each has a row that needs logits."""
        return sum(chunk.is_last for chunk in self.chunks)


@dataclass(slots=True)
class Tally:
    """What scheduling cost: counts over a run."""

    num_preemptions: int = 0
    num_short: int = 0
    """Iterations after which the next request waits because memory is short."""
    num_swaps: int = 0
    """Of the preemptions, those that swapped."""
    recomputed_tokens: int = 0
    """KV that was dropped and prefilled again."""
    swapped_bytes: int = 0
    """Both ways."""
    prefilled_tokens: int = 0
    host_request_peak_bytes: int = 0
    """Most that one request held in host memory when it finished."""


@dataclass(slots=True)
class Finished:
    """Requests whose first, second or last token came with an iteration."""

    first_token: list[RequestState] = field(default_factory=list)
    second_token: list[RequestState] = field(default_factory=list)
    done: list[RequestState] = field(default_factory=list)
    prefilled: list[RequestState] = field(default_factory=list)
    """To decode elsewhere."""
    resumed: list[RequestState] = field(default_factory=list)
    """Requests that had tokens, but none from the iteration before."""
    num_continued: int = 0
    """Requests that have tokens from this iteration and the one before."""
