"""How selected blocks come to HBM and new KV goes home: who waits for what, over which links, in which pieces.

Closed batches (`step_work`) and serving iterations (`serving.iteration`) price their steps on the same path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator import cost
from simulator.capacity import STREAM_BUFFERS
from simulator.links import LinkCost, fetch_cost, stream_cost, write_back_cost
from simulator.remote import RemoteCost, reads_beyond_host, remote_cost, stream_write_bytes_per_s
from simulator.specs.experiment import PlacementSpec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import KV_BYTES_PER_ELEMENT, PolicySpec
from simulator.step_layout import StepRules
from simulator.topology import Solo

Seconds = tuple[float, float, float]
"""Scoring, top-K, plan."""
NOTHING: Seconds = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PerBlock:
    """Seconds of a kernel over blocks: t0 (if there are any) + blocks x block_s."""

    t0_s: float = 0.0
    block_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FetchPath:
    """One GPU's; rates alone."""

    rules: StepRules
    link: LinkCost
    """H2D."""
    write_link: LinkCost
    """D2H."""
    remote: RemoteCost | None
    """Beyond the host; None: nothing comes from there."""
    remote_stream_bytes_per_s: float
    """Of a prompt's KV on its way beyond the host; 0: it stays."""
    writes_beyond: bool
    """Whether new KV goes beyond the host, too."""
    block_bytes: int
    """What of a block moves."""
    piece_bytes: int
    """New KV is written in such pieces: blocks, or tokens."""
    ops_per_piece: int
    landing: PerBlock
    """On the compute stream before attention, for arriving blocks: out of the staging buffer, keys from low rank."""
    fallback: PerBlock
    """Attention over the missing blocks of heads that fall back to dense."""

    @property
    def solo(self) -> Solo:
        """What one GPU's transfers draw while they run alone, overheads of the host link aside."""
        return Solo(self.link.bytes_per_s, 1.0 if self.remote is None else self.block_bytes / self.remote.read_s)


def fetch_path(
    model: ModelSpec, hardware: HardwareSpec, policy: PolicySpec, placement: PlacementSpec, corrected_share: float
) -> FetchPath:
    """`corrected_share`: as for `rules_of`. `model` is one GPU's part."""
    rules = rules_of(model, policy, corrected_share)
    link_cost = stream_cost if policy.residency == "streamed" else fetch_cost
    link = link_cost(hardware, policy.transport, policy.gather_ctas, placement.host_numa)
    block_bytes, (piece_bytes, ops_per_piece) = cost.moved_block_bytes(model, policy), written_piece(model, policy)
    remote, stream_rate = None, 0.0
    if reads_beyond_host(policy, placement):
        remote = remote_cost(hardware, placement, block_bytes, piece_bytes, ops_per_piece)
        stream_rate = stream_write_bytes_per_s(hardware, placement)
        lands_in_slots = placement.remote_path == "direct"
        rules = replace(rules, remote=True, lands_in_slots=lands_in_slots)
        # Whatever the transport, the CPU posts the reads.
        link = replace(
            link, hop_s=hardware.link.plan_to_host_s.value + remote.hop_s, staged=link.staged and not lands_in_slots
        )
    return FetchPath(
        rules=rules,
        link=link,
        write_link=write_back_cost(hardware, policy.transport, placement.host_numa),
        remote=remote,
        remote_stream_bytes_per_s=stream_rate,
        writes_beyond=remote is not None,
        block_bytes=block_bytes,
        piece_bytes=piece_bytes,
        ops_per_piece=ops_per_piece,
        landing=_landing(model, hardware, policy, link.staged, block_bytes),
        fallback=_fallback(model, hardware, policy),
    )


def rules_of(model: ModelSpec, policy: PolicySpec, corrected_share: float = 1.0) -> StepRules:
    """Who selects where: the real query's selection (on demand, stall) is serial on C; a prediction runs on B.

    corrected_share: of the heads that miss rule correct repairs; where it is 0 nobody waits for the real query.
    """
    streams = policy.residency == "streamed"
    same_step = streams or policy.predictor == "previous-layer"
    prefetches = policy.offloads and policy.predictor != "current" and not same_step
    repairs = policy.miss_rule in ("stall", "dense") or (policy.miss_rule == "correct" and corrected_share > 0)
    selects_on_c = policy.selector != "all" and (policy.predictor == "current" or repairs)
    return StepRules(
        num_layers=model.num_layers,
        lookahead_k=policy.plan_distance if prefetches else 0,
        on_demand=selects_on_c,
        urgent=prefetches and policy.lookahead_mode == "refine",
        plan_waits=policy.selector != "all" or streams,
        same_step=same_step,
        stream_buffers=STREAM_BUFFERS if streams else 0,
    )


def selections_s(
    hardware: HardwareSpec, model: ModelSpec, policy: PolicySpec, rules: StepRules, corrected_share: float,
    batch_size: int, num_blocks: int, num_slots: int,
) -> tuple[Seconds, Seconds]:  # fmt: skip
    """One layer's selections, on the compute stream and on the side stream.

    `num_blocks`: blocks of a request's context. `num_slots`: slots that it fills per KV head (`capacity.slots_held`).
    """
    if policy.selector == "all":
        return NOTHING, NOTHING
    whole = cost.selection_s(hardware, model, policy, batch_size, num_blocks, num_slots)
    on_compute = on_side = NOTHING
    if rules.on_demand and (policy.predictor == "current" or policy.miss_rule == "stall"):
        on_compute = whole
    elif rules.on_demand and policy.miss_rule == "correct":
        # The kernels skip heads that are not corrected.
        corrected = max(1, round(corrected_share * batch_size))
        on_compute = cost.selection_s(hardware, model, policy, corrected, num_blocks, num_slots)
    if rules.prefetches:
        on_side = whole
    if policy.predictor == "previous-layer":
        # The next layer's query from this layer's input: another query projection.
        on_side = (on_side[0] + cost.query_s(hardware, model, batch_size), *on_side[1:])
    return on_compute, on_side


def written_piece(model: ModelSpec, policy: PolicySpec) -> tuple[int, int]:
    """(bytes, operations) of one piece of new KV: a block, or a token, whose key and value lie apart in their block."""
    block_bytes = cost.moved_block_bytes(model, policy)
    if policy.write_back == "token":
        return block_bytes // policy.block_size_tokens, 2 if policy.key_rank is None else 1
    return block_bytes, 1


def _landing(model: ModelSpec, hardware: HardwareSpec, policy: PolicySpec, staged: bool, block_bytes: int) -> PerBlock:
    t0_s = block_s = 0.0
    if policy.key_rank is not None:  # one product over all blocks: t0 and as many times a block
        one_s, two_s = (cost.rebuild_keys_s(hardware, model, policy, blocks) for blocks in (1, 2))
        t0_s, block_s = 2 * one_s - two_s, two_s - one_s
    if staged:
        t0_s += hardware.kernels.attention_t0_s.value
        block_s += block_bytes / hardware.kernels.scatter_bytes_per_s.value
    return PerBlock(t0_s, block_s)


def _fallback(model: ModelSpec, hardware: HardwareSpec, policy: PolicySpec) -> PerBlock:
    if policy.miss_rule != "dense" or not policy.offloads:
        return PerBlock()
    whole_bytes = model.block_bytes(policy.block_size_tokens, KV_BYTES_PER_ELEMENT[policy.kv_dtype])
    kernels = hardware.kernels
    return PerBlock(kernels.attention_t0_s.value, whole_bytes / kernels.attention_bytes_per_s.value)
