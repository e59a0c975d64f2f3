"""Fit measurements into a hardware profile. Pure: no GPU, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from realhw.figures import FigureMaker, rounded
from realhw.measurement import HEAD_DIM, KV_HEADS, Measurement, RawCalibration
from realhw.profile_pairs import pair_rates
from simulator.catalog import hardware, load_hardware
from simulator.specs.base import Figure
from simulator.specs.hardware import HardwareSpec
from simulator.specs.validation import validated
from traces.errors import InputError

SHARED_BELOW = 0.9
"""Two GPUs that copy at once at less than this share of twice the rate of one share a link."""
BATCH_COUNT = 1024
"""Blocks of the batched submission whose per-block time becomes `ce_batched_op_s`."""


def build_profile(raw: RawCalibration, name: str | None = None, base: str | None = None) -> HardwareSpec:
    """The profile that the measurements give; what they lack comes from a catalog profile, its source kept.

    Raises InputError when no catalog profile has the device's name and none is named, or a measurement is missing.
    """
    template = find_template(str(raw.device["name"]), base)
    return _Builder(raw, template, name or f"{template.name}-calibrated").build()


def write_profile(spec: HardwareSpec, path: Path) -> None:
    """The profile as YAML that `load_hardware` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = spec.model_dump(mode="json", exclude_none=True)
    head = "# Written by `oasis-sim calibrate`: micro-benchmarks only, no figure is fitted to a decode step.\n"
    path.write_text(head + yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None), encoding="utf-8")


def find_template(device: str, base: str | None = None) -> HardwareSpec:
    """The catalog profile that gives what cannot be measured: `base`, else the one of the device. Raises InputError."""
    if base is not None:
        return load_hardware(base)
    found = [spec for spec in hardware() if spec.device == device and spec.date is None]
    if not found:
        raise InputError(f"device {device!r}: no catalog profile to start from; name one with --base")
    return found[0]


class _Builder:
    def __init__(self, raw: RawCalibration, template: HardwareSpec, name: str) -> None:
        self._raw = raw
        self._template = template
        self._name = name
        device = raw.device
        self._on = f"measured on {device['name']}, driver {device['driver']}, torch {device['torch']}, " + (
            f"Triton {device['triton']}, {raw.started[:10]}"
        )
        self._make = FigureMaker(self._on)

    def build(self) -> HardwareSpec:
        data: dict[str, Any] = self._template.model_dump(mode="json", exclude_none=True)
        device = self._raw.device
        data.update(
            name=self._name, device=str(device["name"]), driver=str(device["driver"]), date=self._raw.started[:10]
        )
        for section, figures in (
            ("gpu", self._gpu()), ("kernels", self._kernels()), ("link", self._link()), ("host", self._host()),
            ("nvlink", self._nvlink()),
        ):  # fmt: skip
            data[section].update({key: figure.model_dump(exclude_none=True) for key, figure in figures.items()})
        data["link"]["gather_ctas"] = self._raw.select("gather_size")[0].params["ctas"]
        data["kernels"].pop("table", None)  # of other kernels than the ones timed here
        data["kernels"]["gemms"] = [
            {"m": r.params["m"], "n": r.params["n"], "k": r.params["k"], "seconds": rounded(r.median)}
            for r in self._raw.select("gemm")
            if r.params["m"] < 1024
        ]
        data["kernels"]["timed"] = self._timed()
        data["pairs"] = pair_rates(self._raw, self._make)
        return validated(HardwareSpec, data, f"profile {self._name}")

    def _timed(self) -> list[dict[str, Any]]:
        """Every attention, scoring, top-K and plan launch as the cost model looks it up."""
        rows = []
        for kind, size in (("attention", "tokens"), ("score", "blocks"), ("topk", "blocks"), ("plan", "slots")):
            for r in self._raw.select(kind):
                heads = r.params["batch"] * r.params.get("kv_heads", KV_HEADS)
                row = {"kind": kind, "heads": heads, "size": r.params[size]}
                if kind == "attention":
                    row["rows"] = r.params["rows"]
                if kind in ("attention", "score"):
                    row["head_dim"] = r.params.get("head_dim", HEAD_DIM)
                if kind in ("topk", "plan"):
                    row["kept"] = r.params["k"]
                rows.append({**row, "seconds": rounded(r.median)})
        return rows

    def _gpu(self) -> dict[str, Figure]:
        device = self._raw.device
        large = next(r for r in self._raw.select("gemm") if r.params["m"] >= 1024)
        flops = 2.0 * large.params["m"] * large.params["n"] * large.params["k"] / large.median
        spread = flops * large.spread / large.median
        reported = f"{self._on}: reported by the driver"
        return {
            "hbm_bytes": Figure(value=float(device["hbm_bytes"]), source=reported),
            "l2_bytes": Figure(value=float(device["l2_bytes"]), source=reported),
            "num_sms": Figure(value=float(device["num_sms"]), source=reported),
            "hbm_read_bytes_per_s": self._make.rate(self._raw.one("hbm_read"), "sum of 1 GiB"),
            "bf16_sustained_flops": self._make.figure(
                flops, "8192-cubed product, random data", spread, large.repetitions
            ),
        }

    def _kernels(self) -> dict[str, Figure]:
        raw = self._raw
        gemms = [r for r in raw.select("gemm") if r.params["m"] < 1024]
        rows = {
            kind: [r for r in raw.select(kind) if r.params.get("head_dim", HEAD_DIM) == HEAD_DIM]
            for kind in ("attention", "score", "topk", "plan", "sampling")
        }
        gemm = self._make.fit(gemms, [r.num_bytes for r in gemms], "decode products", True)
        attention = self._make.fit(rows["attention"], [r.num_bytes for r in rows["attention"]], "KV bytes", True)
        score = self._make.fit(rows["score"], [r.num_bytes for r in rows["score"]], "compressed keys' bytes", True)
        topk = self._make.fit(rows["topk"], [r.params["scores"] for r in rows["topk"]], "K up to 128", False)
        plan = self._make.fit(
            rows["plan"],
            [r.params["batch"] * KV_HEADS * r.params["slots"] for r in rows["plan"]],
            "K of 16 to 256",
            False,
        )
        sampling = self._make.fit(
            rows["sampling"], [4.0 * r.params["logits"] for r in rows["sampling"]],
            "argmax of bf16 logits, counted as 4 bytes each", True,
        )  # fmt: skip
        small = [*raw.select("activation"), *raw.select("append")]
        middle = sorted(small, key=lambda r: r.median)[len(small) // 2]
        return {
            "gemm_t0_s": gemm[0], "gemm_bytes_per_s": gemm[1],
            "attention_t0_s": attention[0], "attention_bytes_per_s": attention[1],
            "score_t0_s": score[0], "score_bytes_per_s": score[1],
            "topk_t0_s": topk[0], "topk_s_per_score": topk[1],
            "plan_t0_s": plan[0], "plan_s_per_slot": plan[1],
            "sampling_t0_s": sampling[0], "sampling_bytes_per_s": sampling[1],
            "scatter_bytes_per_s": self._make.rate(raw.one("scatter"), "16,384 blocks of 8 KiB to random slots"),
            "switch_s": self._switch(),
            "small_kernel_s": self._make.time(middle, "median of gated activation and KV append over batch sizes"),
            **self._side_streams(),
        }  # fmt: skip

    def _side_streams(self) -> dict[str, Figure]:
        """What a layer of next to no work takes longer where a side stream plans and fetches for it."""
        alone, beside = (self._raw.select("layer_launches", flow=flow) for flow in ("dense", "lookahead"))
        if not alone:  # early measurements
            return {}
        more_s = max(0.0, beside[0].median - alone[0].median)
        what = "a layer of next to no work with scoring, top-K, plan and gather on side streams, against one without"
        return {"side_streams_s": self._make.figure(more_s, what, beside[0].spread, beside[0].repetitions)}

    def _switch(self) -> Figure:
        """Mean over the pairs of kinds: a layer has each of them. Their interquartile range is the spread."""
        rows = self._raw.select("switch")
        low, high = np.percentile([r.median for r in rows], [25, 75])
        what = f"two kinds in turn against each alone, mean of {len(rows)} pairs"
        mean_s = float(np.mean([r.median for r in rows]))
        return self._make.figure(max(0.0, mean_s), what, float(high - low), len(rows))

    def _link(self) -> dict[str, Figure]:
        raw = self._raw
        figures = {}
        for direction in ("h2d", "d2h"):
            large = max(raw.select("copy", direction=direction), key=lambda r: r.num_bytes)
            figures[f"{direction}_bytes_per_s"] = self._make.rate(large, "64 back-to-back copies of 16 MiB")
            figures[f"duplex_{direction}_bytes_per_s"] = self._make.rate(
                raw.one("copy_duplex", direction=direction), "the same with both directions busy"
            )
        copies = raw.select("copy", direction="h2d")
        op_s, _ = self._make.fit(copies, [r.num_bytes for r in copies], "64 back-to-back copies, 4 KiB to 16 MiB", True)
        figures["ce_op_s"] = op_s
        rate = figures["h2d_bytes_per_s"].value
        batched = self._submitted("submit_engine", "batched") or self._submitted("submit_engine", "per_block")
        per_block = batched[0].median - batched[0].num_bytes / rate
        figures["ce_batched_op_s"] = self._make.figure(
            per_block, f"{BATCH_COUNT} scattered 8 KiB blocks in one submission, bytes at the link's rate taken off",
            batched[0].spread, batched[0].repetitions,
        )  # fmt: skip
        enqueue = self._submitted("submit_cpu", "per_block")
        figures["ce_enqueue_s"] = self._make.time(enqueue[0], "CPU time of one copy call")
        figures["plan_to_host_s"] = self._make.time(
            raw.one("plan_to_host"), "kernel's end to a copy that the CPU enqueued on seeing its output"
        )
        figures.update(self._gather())
        return figures

    def _submitted(self, kind: str, method: str) -> list[Measurement]:
        """Submissions towards the device; early measurements had no other direction and did not name it."""
        rows = self._raw.select(kind, method=method, count=BATCH_COUNT)
        return [r for r in rows if r.params.get("direction", "h2d") == "h2d"]

    def _gather(self) -> dict[str, Figure]:
        raw = self._raw
        grids = raw.select("gather")
        best = max(grids, key=lambda r: r.num_bytes / r.median)
        one = raw.one("gather", ctas=1)
        cta = self._make.rate(one, "one thread block, random 8 KiB blocks")
        latency = one.params["in_flight_bytes"] / cta.value
        sized = [r for r in raw.select("gather_size") if r.num_bytes > 0]
        t0_s, _ = self._make.fit(sized, [r.num_bytes for r in sized], "random 8 KiB blocks, 16 to 4,096", True)
        return {
            "gather_t0_s": t0_s,
            "gather_bytes_per_s": self._make.rate(best, f"random 8 KiB blocks, {best.params['ctas']} thread blocks"),
            "gather_cta_bytes_per_s": cta,
            "gather_latency_s": self._make.figure(
                latency, "bytes in flight of one thread block / its rate", latency * one.spread / one.median,
                one.repetitions,
            ),
        }  # fmt: skip

    def _host(self) -> dict[str, Figure]:
        fastest = max(self._raw.select("pack"), key=lambda r: r.num_bytes / r.median)
        what = f"index_select of 4,096 scattered 8 KiB blocks, {fastest.params['threads']} threads"
        figures = {"pack_bytes_per_s": self._make.rate(fastest, what)}
        figures |= self._far_memory()
        both = self._raw.select("copy_two_gpus", direction="h2d", gpus=[0, 1])
        alone = self._raw.select("copy_two_gpus", direction="h2d", gpus=[0])
        if both and both[0].num_bytes / both[0].median < SHARED_BELOW * 2 * alone[0].num_bytes / alone[0].median:
            # Less than two links: what they share is what bounds them, and the switch is the first thing on the way.
            what = "16 MiB copies to two GPUs at once, together less than twice one"
            figures["switch_bytes_per_s"] = self._make.rate(both[0], what)
        return figures

    def _far_memory(self) -> dict[str, Figure]:
        """The slowest node's copies, and what a read of its memory takes longer than one of the fastest's."""
        copies = sorted(self._raw.select("node_copy"), key=lambda r: r.median)
        if len(copies) < 2:
            return {}
        near, far = copies[0].params["node"], copies[-1].params["node"]
        reads = {node: self._raw.one("node_gather", node=node) for node in (near, far)}
        in_flight = self._raw.one("gather", ctas=1).params["in_flight_bytes"]
        latency = {node: in_flight * r.median / r.num_bytes for node, r in reads.items()}
        more = max(0.0, latency[far] - latency[near])
        spread = in_flight * reads[far].spread / reads[far].num_bytes
        what = f"memory of NUMA node {far} against that of node {near}, the fastest"
        return {
            "far_h2d_bytes_per_s": self._make.rate(copies[-1], f"16 MiB copies from {what}"),
            "far_latency_s": self._make.figure(
                more, f"reads of one thread block, {what}", spread, reads[far].repetitions
            ),
        }

    def _nvlink(self) -> dict[str, Figure]:
        copies = self._raw.select("peer_copy")
        if not copies or self._template.nvlink.bytes_per_s.value == 0:  # copies over PCIe
            return {}
        large = max(copies, key=lambda r: r.num_bytes)
        return {"bytes_per_s": self._make.rate(large, f"copies of {large.num_bytes >> 20} MiB from one GPU to another")}
