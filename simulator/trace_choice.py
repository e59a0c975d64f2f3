"""Which request of a trace serves an experiment, how its heads serve the model's, and what it must have recorded."""

from __future__ import annotations

import numpy as np

from simulator.draft_pass import require_same_rules
from simulator.iterations import steps_of
from simulator.mapping import Mapping, resolve_mapping
from simulator.predictors import is_draft
from simulator.replay_settings import resolve_settings
from simulator.selectors.table import SELECTORS
from simulator.specs.experiment import ExperimentSpec, MappingSpec
from simulator.specs.model import ModelSpec
from simulator.specs.policy import PolicySpec
from simulator.specs.validation import suggest
from traces.errors import InputError
from traces.reader import Trace, TraceGroup


def choose_group(trace: Trace, experiment: ExperimentSpec) -> TraceGroup:
    """The request that the experiment names, else the first of its context. Raises InputError where there is none."""
    wanted = experiment.workload.context_tokens if experiment.serving is None else None
    if experiment.trace_group is not None:
        if experiment.trace_group not in trace.group_names:
            raise InputError(
                f"trace_group: trace {experiment.trace!r} has no request {experiment.trace_group!r}: "
                f"{suggest(experiment.trace_group, trace.group_names)}"
            )
        candidates = [trace.group(experiment.trace_group)]
    else:
        candidates = [trace.group(name) for name in trace.group_names]
    if not candidates:
        raise InputError(f"trace {experiment.trace!r} has no requests")
    for group in candidates:
        if wanted is None or wanted == int(group.kv_len[0]):
            return group
    has = ", ".join(f"{int(group.kv_len[0])} ({group.name})" for group in candidates)
    raise InputError(
        f"workload.context_tokens {wanted}: trace {experiment.trace!r} has no request of that context; it has {has} "
        f"(a trace of another context: oasis-sim trace synth --from {experiment.trace} --context {wanted} --out FOLDER)"
    )


def replayable_mapping(experiment: ExperimentSpec, model: ModelSpec, group: TraceGroup, policy: PolicySpec) -> Mapping:
    """How the group's heads serve the model's. Raises InputError where the policy cannot be replayed on the group."""
    if policy.selector == "all":
        mapping = _dense_mapping(model, group, policy)
    else:
        mapping = resolve_mapping(model, group, policy.block_size_tokens, experiment.mapping)
        _require_rankings(group, policy)
    resolve_settings(*steps_of(group, policy))
    return mapping


def _dense_mapping(model: ModelSpec, group: TraceGroup, policy: PolicySpec) -> Mapping:
    """Dense attention reads everything, whatever the trace says: any layer and head may stand for the model's."""
    try:
        return resolve_mapping(model, group, policy.block_size_tokens, MappingSpec())
    except InputError:
        layers = np.zeros(model.num_full_attention_layers, dtype=np.int32)
        heads = np.zeros(model.num_kv_heads, dtype=np.int32)
        return Mapping("none", layers, heads, "dense attention: what the trace attends to is not used")


def _require_rankings(group: TraceGroup, policy: PolicySpec) -> None:
    """Raises InputError where the trace lacks the selector's or the drafts' ranking at this block size."""
    size, k = policy.block_size_tokens, policy.lookahead_k
    recorded = group.rankings(size)
    where = f"trace group {group.name!r}, {size} tokens a block"
    ranking = SELECTORS[policy.selector].ranking
    if policy.predictor == "previous-layer" and "prev_layer" not in recorded:
        raise InputError(
            f"policy.predictor previous-layer: {where}: has only rankings {', '.join(recorded)}; oasis-sim "
            "record --with prev_layer makes it"
        )
    if ranking == "mean" and ranking not in recorded:
        raise InputError(
            f"policy.selector mean: {where}: has only rankings {', '.join(recorded)}; oasis-sim "
            "record --with mean makes it"
        )
    if ranking is not None and ranking not in recorded:
        raise InputError(f"policy.selector {policy.selector}: {where}: has only rankings {', '.join(recorded)}")
    if policy.predictor != "draft" and not policy.verify_drafts:
        return
    every = range(1, k + 1)
    wanted = (
        every if policy.verify_drafts else {"single": (k,), "union": every, "refine": (1, k)}[policy.lookahead_mode]
    )
    if policy.draft_pass == "sparse" and policy.predictor == "draft":
        require_same_rules(group, policy)
        return
    if any(f"draft{distance}" not in recorded for distance in wanted):
        distances = sorted(int(name.removeprefix("draft")) for name in recorded if is_draft(name))
        known = f"draft distances {', '.join(map(str, distances))}" if distances else "no drafts"
        raise InputError(f"policy.lookahead_k {k}: {where}: records {known}")
