"""KV that a request does not have when it starts to decode: it comes when a plan first fetches it, or by itself.

How much of a prompt a request has fetched after so many steps is replay's: its trace group, with host memory that keeps
every block it ever had. Beyond the trace's last step its rows repeat, and of their fetches the share is new that was in
its last quarter, until everything has come: an assumption that errs towards more traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.capacity import slots_held
from simulator.cost import moved_block_bytes
from simulator.fetch_path import FetchPath
from simulator.remote import RemoteCost
from simulator.serving.batch_kernel import OF_ALL, OF_REMOTE, REMOTE_FETCHED, REMOTE_REPAIRED
from simulator.serving.network import Part, Wire
from simulator.serving.pools import Int64, Pool, RequestPools
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import PolicySpec

LAST_QUARTER = 4
Counts = NDArray[Any]


def with_tail(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """[2R, D, counts, L] from a group's rows [R, D, counts, L] in the trace's order: once as they are, then with the
    new blocks that are expected later. Requests go through the first half once and then repeat the second."""
    tail = rows.copy()
    late = rows[-max(1, len(rows) // LAST_QUARTER) :].astype(np.float64)
    (fetched, urgent, repaired), (new_fetched, new_urgent, new_repaired) = OF_ALL, OF_REMOTE

    def expected(of: Counts, all_late: Counts, new_late: Counts) -> Int64:
        """Whole blocks whose running sum is that of the expected ones; never more than `of`."""
        share = new_late.sum(axis=0) / np.maximum(all_late.sum(axis=0), 1.0)
        total = np.floor(np.cumsum(of * share, axis=0) + 1e-9).astype(np.int64)
        return np.diff(total, axis=0, prepend=0)

    def ahead(of: Counts, which: int, due_next: int) -> Counts:
        return np.asarray(of[:, :, which] - of[:, :, due_next], np.float64)

    tail[:, :, new_urgent] = expected(rows[:, :, urgent], late[:, :, urgent], late[:, :, new_urgent])
    tail[:, :, new_repaired] = expected(rows[:, :, repaired], late[:, :, repaired], late[:, :, new_repaired])
    tail[:, :, new_fetched] = tail[:, :, new_urgent] + expected(
        ahead(rows, fetched, urgent), ahead(late, fetched, urgent), ahead(late, new_fetched, new_urgent)
    )
    return np.concatenate([rows, tail])


def brought_blocks(rows: NDArray[np.int32], num_steps: int) -> Int64:
    """[num_steps + 1]: new blocks that a request has fetched before each step, on the GPU with the most; `rows` are
    those of `with_tail`."""
    new = rows[:, :, [REMOTE_FETCHED, REMOTE_REPAIRED]].sum(axis=(2, 3), dtype=np.int64)
    half = len(new) // 2
    repeats = max(1, -(-(num_steps - half) // half))
    steps = np.concatenate([new[:half], *[new[half:]] * repeats])[:num_steps]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(steps, axis=0).max(axis=1)])


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What has not come of a prompt when its request starts to decode."""

    gap_bytes: Int64
    """[max blocks + 1] by the prompt's blocks: what its first set leaves and host memory has not taken, per GPU."""
    gap_blocks: Int64
    """The same: what its first set leaves, in blocks of all GPUs of a replica."""
    brought_bytes: Int64
    """[groups, blocks] by trace group and blocks generated since: what has come of it, at most, per GPU."""

    def bytes(self, group: int, prompt_blocks: int, blocks: int) -> int:
        """Per GPU, of a request that holds `blocks` blocks; the plain twin of `batch_kernel.behind`."""
        since = min(max(0, blocks - prompt_blocks), self.brought_bytes.shape[1] - 1)
        return max(0, int(self.gap_bytes[prompt_blocks] - self.brought_bytes[group, since]))


ALL_CAME = LeftBehind(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros((1, 1), np.int64))
"""Nothing is left behind, whatever the prompt."""


def left_behind(
    model: ModelSpec, policy: PolicySpec, tables: RequestPools, rows: list[NDArray[np.int32]], num_gpus: int,
    follows: bool,
) -> LeftBehind:  # fmt: skip
    """`rows`: of each trace group, as `with_tail` makes them. `model` is one GPU's part, `num_gpus` of a replica.
    `follows`: all of it is on its way, and the host has taken memory for it.
    """
    most, size = len(tables.decode) - 1, tables.block_size_tokens
    plain = policy.model_copy(update={"residency": "exact", "slack_blocks": None})
    first = np.array([slots_held(plain, blocks) + (blocks > 0) for blocks in range(most + 1)], np.int64)
    heads, block_bytes = model.num_full_attention_layers * model.num_kv_heads, moved_block_bytes(model, policy)
    gap_bytes = tables.decode[:, Pool.HOST_KV] - first * heads * block_bytes
    gap_blocks = num_gpus * gap_bytes // block_bytes
    if follows:
        return LeftBehind(np.zeros_like(gap_bytes), gap_blocks, np.zeros((len(rows), 1), np.int64))
    # Memory is taken a block of tokens ahead, so what its steps bring is taken with it.
    ahead = np.arange(1, most + 2) * size
    brought = [brought_blocks(group, int(ahead[-1]))[ahead] for group in rows]
    return LeftBehind(gap_bytes, gap_blocks, np.array(brought) * block_bytes)


def keeps_all_fetched(policy: PolicySpec, kv_len: int) -> PolicySpec:
    """The policy on a host that keeps every block it ever had: replay then tells first fetches from others."""
    size = policy.block_size_tokens
    return policy.model_copy(update={"host_residency": "fetched", "host_cache_tokens": (-(-kv_len // size) + 1) * size})


def pull_path(path: FetchPath, hardware: HardwareSpec, num_gpus: int) -> FetchPath:
    """Fetches of a decode replica: blocks that its host does not have come from prefill hosts, new KV stays here.

    A block is a message; the GPUs in use divide the host's adapters, idle or not: an assumption.
    """
    read_s = Wire(hardware, num_gpus).seconds((Part(path.block_bytes, float(path.block_bytes)),)) * num_gpus
    hop_s = hardware.nic.t0_s.value
    return replace(
        path,
        rules=replace(path.rules, remote=True),
        # Whatever the transport, the CPU posts the reads.
        link=replace(path.link, hop_s=hardware.link.plan_to_host_s.value + hop_s),
        remote=RemoteCost(hop_s, read_s, write_s=0.0),
        writes_beyond=False,
    )
