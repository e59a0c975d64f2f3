"""What a system decides: which blocks attention reads, which are predicted, kept, moved and how.

A system is a composition of these choices (`simulator.systems`); any key may be overridden.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simulator.specs.base import Fraction, PositiveInt, Spec

Selector = Literal["minmax", "exact", "mean", "accumulated-mass", "persistence", "prompt-window", "sink-recent", "all"]
Predictor = Literal["current", "previous", "draft", "previous-layer", "oracle", "random"]
Residency = Literal["everything", "exact", "slack", "cache", "drop", "streamed"]
Eviction = Literal["least-recently-selected", "lowest-score"]
Transport = Literal["ce-per-block", "ce-batched", "ce-contiguous", "gather"]
MissRule = Literal["stall", "attend", "correct", "dense"]
CapScope = Literal["head", "layer", "request"]
LookaheadMode = Literal["single", "union", "refine"]
KvDtype = Literal["bf16", "fp8", "int8"]
WriteBack = Literal["block", "token"]
MassHistory = Literal["decode", "prompt"]
DraftPass = Literal["dense", "sparse"]
DraftHead = Literal["eagle3", "medusa", "mtp", "ngram", "lookahead-ngram", "self"]


HostResidency = Literal["full", "fetched", "none"]
KV_BYTES_PER_ELEMENT = {"bf16": 2, "fp8": 1, "int8": 1}
MAX_SLACK_BLOCKS = 65_536
"""Blocks of 16 tokens in a million: more slots than any context has blocks."""


class PolicySpec(Spec):
    selector: Selector = "minmax"
    """Ranks a step's blocks. With the real query: minmax, Quest's bound from per-block key minima and maxima; mean, the
    score of the block's mean key; exact, softmax mass. Without one, to say what residency `drop` keeps:
    accumulated-mass (H2O), persistence (Scissorhands), prompt-window (SnapKV), sink-recent (StreamingLLM). all: every
    block (dense attention)."""
    mass_history: MassHistory = "decode"
    """From where accumulated-mass sums: the first decode step, or the prompt's first query."""
    recent_share: Fraction = 0.5
    """Share of K that accumulated-mass and persistence always leave to the newest blocks. H2O: half."""
    sink_tokens: PositiveInt = 4
    """First tokens of the context that sink-recent keeps, in whole blocks. StreamingLLM: 4."""
    history_steps: Annotated[int, Field(gt=0, le=4096, strict=True)] = 400
    """Steps over which persistence counts importance. Scissorhands' history window."""
    predictor: Predictor = "draft"
    """Ranks the blocks to fetch. current: the real query, on demand; previous: the latest real query seen;
    draft: the draft token's query, `lookahead_k` positions ahead; previous-layer: the query that the input of the
    layer before lets expect, in the same step; oracle: the selector's own future choice;
    random: uniform over the blocks that exist."""
    residency: Residency = "exact"
    """What HBM keeps per KV head. everything: the whole KV; exact: K blocks; slack: K + `slack_blocks`, for
    arrivals; cache: the same number, of which attention reads the K selected; drop: K blocks, and nobody keeps the
    others; streamed: two layers, refilled with the whole KV of one layer after another, every step."""
    slack_blocks: Annotated[int, Field(gt=0, le=MAX_SLACK_BLOCKS, strict=True)] | None = None
    """Slots per KV head beyond K. Null with residency `slack`: ceil(lookahead_k * fetch_cap * K); with `cache`: K."""
    eviction: Eviction = "least-recently-selected"
    transport: Transport = "gather"
    """How blocks cross the host link. ce-*: copy engine, one operation per block, per contiguous run in one
    batched submission, or one per layer after the CPU has packed it; gather: SMs read pinned host memory."""
    gather_ctas: Annotated[int, Field(gt=0, le=4096, strict=True)] = 16
    """Thread blocks of the gather kernel; where none are named, those of a calibrated profile (`link.gather_ctas`)."""
    miss_rule: MissRule = "attend"
    """stall: fetch what the real query selects and is absent, then attend; attend: attend to what is resident;
    correct: stall for the heads whose query is less like the step before's than `correction_cosine`; dense: a head
    whose attended mass is below `dense_below_recall` fetches and reads every block."""
    correction_cosine: Annotated[float, Field(ge=-1, le=1, strict=True)] = 0.8
    """Cosine of a head's query with the step before's below which it is corrected; at 1 all are. FreeKV's τ."""
    dense_below_recall: Fraction = 0.9
    """Recall below which a head falls back to dense attention. An assumption."""
    key_rank: Annotated[int, Field(gt=0, le=65_536, strict=True)] | None = None
    """Rank at which keys stay in HBM, so that values alone cross the link; ShadowKV: 160. Null: keys cross."""
    kv_dtype: KvDtype = "bf16"
    kv_budget_tokens: PositiveInt | None = None
    """Tokens per KV head that attention reads (K = budget / block). Null: context / 8."""
    block_size_tokens: PositiveInt = 16
    fetch_cap: Fraction = 1.0
    """New blocks per step as a share of K; 1 is uncapped."""
    fetch_cap_scope: CapScope = "head"
    """Over what the cap's credit is pooled. head is an assumption: the paper does not say."""
    lookahead_k: PositiveInt = 1
    """Steps between a plan and the attention that it serves, and tokens drafted per step. Where drafts are verified a
    plan serves the next iteration."""
    lookahead_mode: LookaheadMode = "single"
    draft_pass: DraftPass = "dense"
    """What the pass attended to in which the drafts were recorded. dense: everything, so that any policy may replay
    them; sparse: the working set of the one policy that the trace names, which alone may replay them."""
    write_back: WriteBack = "block"
    """When new KV goes to the host: as a block fills, or every token."""
    metadata_vectors_per_block: Annotated[int, Field(gt=0, le=64, strict=True)] = 2
    """Compressed-key vectors per block (min and max: 2)."""
    metadata_bytes_per_element: Annotated[float, Field(gt=0, le=8, strict=True)] = 2.0
    host_residency: HostResidency = "none"
    """What host memory keeps of KV whose home is beyond it. full: a copy of everything, pulled at admission; fetched:
    the blocks fetched last (least recently fetched out, per KV head); none."""
    host_cache_tokens: PositiveInt | None = None
    """Tokens per KV head that `fetched` keeps. Null: context / 2, an assumption, about what OasisKV reports (decode
    hosts held 1/2.2 to 1/2.6 of the full KV)."""
    draft_head: DraftHead = "eagle3"
    """Whose cost drafting has (`simulator.draft_heads`): a one-layer EAGLE-3 head, Medusa heads, the model's own
    multi-token-prediction module, prompt lookup on the CPU, lookahead decoding's n-gram rows, or the model itself,
    whose draft row of one step gives the token drafted in the next."""
    verify_drafts: Annotated[bool, Field(strict=True)] = False
    """Drafted tokens are checked by the step that runs them, and those before the first wrong one are kept. Which are
    right is the trace's."""

    @property
    def plan_distance(self) -> int:
        """Steps from a plan to its attention; with verified drafts a plan is for the next iteration."""
        return 1 if self.verify_drafts else self.lookahead_k

    @property
    def offloads(self) -> bool:
        """Whether the whole KV lies outside HBM: new blocks are written there, selected ones come back."""
        return self.residency in ("exact", "slack", "cache", "streamed")

    @property
    def sink_blocks(self) -> int:
        return -(-self.sink_tokens // self.block_size_tokens)
