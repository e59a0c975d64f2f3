"""Published ratios of disaggregated OasisKV, simulated: `python docs/scripts/disaggregation_ratios.py [OUTPUTS …]`.

Qwen3-8B, prompts of 16,384 and 32,768 tokens, requests far apart; the traces are those of `oasis-sim reproduce`, as
long as the longest output. Full KV is what dense attention pushes or, for host memory, the KV at the end.
"""

from __future__ import annotations

import argparse

from simulator.catalog import load_model
from simulator.experiment import expand
from simulator.points import run_point
from simulator.reproduce.sources import recipe_trace
from simulator.reproduce.table import published

parser = argparse.ArgumentParser()
parser.add_argument("output_tokens", type=int, nargs="*", default=[512, 1024, 2600])
options = parser.parse_args()
experiment = next(one for one in published() if one.name == "disaggregated-host-memory")
assert experiment.recipe is not None, "its trace is synthesised"
recipe = experiment.recipe.model_copy(update={"steps": max(options.output_tokens)})
churn = float(experiment.inputs["churn"].value)
model = load_model("Qwen3-8B")


def row(prompt_tokens: int, output_tokens: int, **settings: object) -> dict[str, float]:
    trace = recipe_trace(recipe, churn, model.name, prompt_tokens)
    keys = {
        **experiment.settings,
        "trace": str(trace),
        "serving.arrivals": "poisson",
        "serving.rate_per_s": 0.001,
        "serving.num_requests": 3,
        "serving.prompt_tokens": prompt_tokens,
        "serving.output_tokens": output_tokens,
        **settings,
    }
    if keys["system"] == "dense":
        keys = {key: value for key, value in keys.items() if key not in ("policy.fetch_cap", "policy.kv_budget_tokens")}
    return run_point(expand(keys, {})[0], use_cache=False)


print("prompt   output   full over admission   full over all of the network   full over host memory")
for prompt_tokens in (16_384, 32_768):
    for output_tokens in options.output_tokens:
        dense = row(prompt_tokens, output_tokens, system="dense", **{"serving.disaggregation": "full-push"})
        pull = row(prompt_tokens, output_tokens, **{"serving.disaggregation": "pull"})
        pushed = dense["network_bytes_per_request"]
        print(
            f"{prompt_tokens:6,} {output_tokens:8,} {pushed / pull['admission_network_bytes']:21.2f} "
            f"{pushed / pull['network_bytes_per_request']:30.2f} "
            f"{model.kv_bytes(prompt_tokens + output_tokens) / pull['host_bytes_per_request_peak']:23.2f}"
        )
