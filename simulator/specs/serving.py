"""A serving run: which requests come when, how the scheduler batches them, what latency they are promised.

Flat, so that every key is `serving.<key>` on the command line and in sweeps.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from simulator.specs.base import Name, PositiveFloat, PositiveInt, Spec
from traces.lengths import LENGTHS

MAX_NUM_SEQS = 65_536
MAX_NUM_REQUESTS = 10_000_000
"""Arrivals and lengths of so many still are a quarter of a gigabyte."""
MAX_DURATION_S = 1e9
"""Three decades until the last arrival: beyond, a clock of 64-bit floats cannot tell microseconds."""
MIN_RATE_PER_S = 1.0 / MAX_DURATION_S
MAX_RATE_PER_S = 1e9
"""Gaps of a nanosecond, far below any iteration: all at once, which is `arrivals: closed`."""
MAX_PREFILL_REPLICAS = 1_024
"""Far beyond what one decode host's adapters can take in."""
Arrivals = Literal["file", "closed", "poisson", "gamma"]
SchedulerPolicy = Literal["fcfs", "shortest-remaining-first"]
Preemption = Literal["recompute", "swap"]
Router = Literal["round-robin", "least-loaded"]
PrefixCacheTiers = Literal["none", "gpu", "host", "gpu+host"]
Disaggregation = Literal["none", "full-push", "layer-push", "first-set", "pull"]
FirstToken = Literal["prefill", "decode"]
StampedBatches = Literal["refuse", "spread", "keep"]

NUM_DRAWN_REQUESTS = 256
"""Requests drawn where neither a file nor `serving.num_requests` says how many. An assumption: seconds to simulate."""
KV_BUDGET_TOKENS = 2_048
"""Budget of a serving run that names none: its contexts differ, so no share of one will do. Source: OasisKV
(arXiv 2608.08097), K = 128 blocks of 16 tokens."""


class ServingSpec(Spec):
    requests: Name | None = None
    """Request file (Mooncake or plain JSONL, Azure, BurstGPT or plain CSV). Null: lengths are drawn."""
    num_requests: Annotated[int, Field(gt=0, le=MAX_NUM_REQUESTS, strict=True)] | None = None
    """The first of the file, or how many are drawn. Null: all, or 256."""
    lengths: Name = "reasoning"
    """Distribution that lengths are drawn from (`traces.lengths.LENGTHS`)."""
    prompt_tokens: PositiveInt | None = None
    """Prompt length of every drawn request. Null: drawn."""
    output_tokens: PositiveInt | None = None
    """Output length of every drawn request. Null: drawn."""
    arrivals: Arrivals | None = None
    """file: as stamped; closed: all at once; poisson, gamma: a renewal process. Null: file with a file, else closed."""
    rate_per_s: Annotated[float, Field(ge=MIN_RATE_PER_S, le=MAX_RATE_PER_S, strict=True)] | None = None
    """Mean arrivals per second: required by poisson and gamma; a file's own pattern is stretched to it."""
    burstiness_cv: Annotated[float, Field(ge=0.001, le=100, strict=True)] | None = None
    """Standard deviation / mean of gamma's gaps; 1 is Poisson, more comes in bursts. At 0.001 requests come like
    clockwork; at 100 one gap in thousands holds all the time."""
    stamped_batches: StampedBatches = "refuse"
    """What to do with a file whose arrivals were stamped in batches: refuse it, spread each batch evenly over its
    interval, or keep bursts that the logging made."""
    scheduler: SchedulerPolicy = "fcfs"
    """Order of the queue, and reversed of preemption. shortest-remaining-first knows each output's length: an oracle,
    the bound on what length prediction can give."""
    max_num_seqs: Annotated[int, Field(gt=0, le=MAX_NUM_SEQS, strict=True)] = 256
    """Requests that run at once on a replica. Source: vLLM's default on GPUs below 70 GiB (v0.11)."""
    max_num_batched_tokens: PositiveInt = 2_048
    """Tokens of an iteration: one for each decoding request, the rest prefill chunks. Source: vLLM's
    SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS (v0.11)."""
    max_model_len: PositiveInt | None = None
    """Longest prompt and output together, at most what the model has with RoPE scaling. Null: without it."""
    preemption: Preemption = "recompute"
    """What becomes of the KV of a request that must make room: recompute drops it and prefills again; swap moves it
    to the host and back. Source: vLLM recomputes (v1)."""
    link_limit: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    """Admission by link demand: another request starts only while the expected fetches of all take at most this share
    of a decode step. Null: admission by memory alone."""
    prefix_cache: PrefixCacheTiers = "none"
    """Where KV of prompts stays for later ones that begin alike, in memory that running requests leave free; needs a
    request file with hash ids. A hit on the host crosses the link before its request runs. With disaggregation it is
    the prefill replicas' memory."""
    prefix_gpu_tokens: PositiveInt | None = None
    """At most so many tokens of a replica in HBM. Null: what is free."""
    prefix_host_tokens: PositiveInt | None = None
    """At most so many tokens of a replica in host memory. Null: what is free."""
    disaggregation: Disaggregation = "none"
    """Prompts are prefilled on other hosts, and KV crosses the network to this one. full-push: all of it before
    decoding; layer-push: the same, sent as it is computed; first-set: working set, compressed keys and draft KV, the
    rest behind them; pull: the same first, of the rest only what plans fetch, when they do."""
    prefill_replicas: Annotated[int, Field(gt=0, le=MAX_PREFILL_REPLICAS, strict=True)] | None = None
    """Replicas that prefill, with as many GPUs and as much host memory each as one that decodes. Null: as many as
    decode."""
    first_token: FirstToken = "prefill"
    """Who answers with the first token. prefill: the side that computed it, at once (DistServe, Splitwise, Mooncake);
    decode: the other, once it has the KV (vLLM's disaggregated prefill, whose proxy drops the prefill side's token)."""
    router: Router = "round-robin"
    """Which replica a request goes to; least-loaded: the one with the fewest unfinished requests."""
    slo_ttft_s: PositiveFloat = 2.0
    """Promised time to first token. Source: MLPerf Inference v4.0, Llama-2-70B server."""
    slo_tpot_s: PositiveFloat = 0.2
    """Promised time per output token. Source: MLPerf Inference v4.0, Llama-2-70B server."""

    @property
    def arrival_process(self) -> Arrivals:
        return self.arrivals or ("closed" if self.requests is None else "file")

    @property
    def leaves_some_behind(self) -> bool:
        """Whether requests start to decode before all of their KV has come."""
        return self.disaggregation in ("first-set", "pull")

    @model_validator(mode="after")
    def _coherent(self) -> ServingSpec:
        process = self.arrival_process
        if process == "file" and self.requests is None:
            raise ValueError("arrivals file needs serving.requests, a request file")
        if process in ("poisson", "gamma") and self.rate_per_s is None:
            raise ValueError(f"arrivals {process} needs serving.rate_per_s")
        if process == "gamma" and self.burstiness_cv is None:
            raise ValueError("arrivals gamma needs serving.burstiness_cv (1 is Poisson)")
        if self.requests is None and self.lengths not in LENGTHS:
            raise ValueError(f"lengths {self.lengths!r}: one of {', '.join(LENGTHS)}")
        if self.prefix_cache != "none" and self.requests is None:
            raise ValueError(
                "prefix_cache needs serving.requests, a request file with hash ids: drawn prompts share none"
            )
        if self.disaggregation != "none" and self.preemption == "swap":
            raise ValueError(
                f"disaggregation {self.disaggregation} goes with preemption recompute: what makes room is prefilled "
                "again by a prefill replica"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "every decoding request needs a token of each iteration"
            )
        return self


def ignored_serving_parameters(serving: ServingSpec) -> frozenset[str]:
    """Dotted keys that cannot change the result of this run."""
    ignored: set[str] = set()
    process = serving.arrival_process
    if process == "closed":
        ignored.add("serving.rate_per_s")
    if process != "gamma":
        ignored.add("serving.burstiness_cv")
    if process != "file":
        ignored.add("serving.stamped_batches")
    if serving.disaggregation == "none":
        ignored.update(("serving.prefill_replicas", "serving.first_token"))
    ignored.update(f"serving.prefix_{tier}_tokens" for tier in ("gpu", "host") if tier not in serving.prefix_cache)
    if serving.requests is not None:
        ignored.update(("serving.lengths", "serving.prompt_tokens", "serving.output_tokens"))
    if serving.prompt_tokens is not None and serving.output_tokens is not None:
        ignored.add("serving.lengths")
    return frozenset(ignored)
