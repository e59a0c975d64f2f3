"""Table of docs/speculation.md: verified drafts by head and length on the shipped trace."""

from __future__ import annotations

from oasis_sim import api

HEADS = (("ngram", 1), ("eagle3", 1), ("eagle3", 2), ("eagle3", 4), ("medusa", 2), ("mtp", 1), ("lookahead-ngram", 2))


def main() -> None:
    print("| system, batch | drafts | tokens an iteration | iteration, ms | drafting and rows, ms | tokens/s | gain |")
    print("|---|---|---|---|---|---|---|")
    for system, batch in (("dense", 16), ("quest", 32), ("oasiskv", 128)):
        setting = {"system": system, "workload.batch_size": batch}
        base = api.run(setting)
        for head, k in HEADS:
            row = api.run({
                **setting, "policy.verify_drafts": True, "policy.draft_head": head, "policy.lookahead_k": k
            })  # fmt: skip
            gain = row["throughput_tokens_per_s"] / base["throughput_tokens_per_s"] - 1
            step_ms = row["iteration_s"] * 1e3
            print(
                f"| {system}, {batch} | {head}, {k} | {row['tokens_per_iteration']:.2f} | {step_ms:.2f} "
                f"| {row['draft_overhead_s'] * 1e3:.2f} | {row['throughput_tokens_per_s']:,.0f} | {gain:+.0%} |"
            )
        print(
            f"| {system}, {batch} | as the system is | 1 | {base['iteration_s'] * 1e3:.2f} "
            f"| {base['draft_overhead_s'] * 1e3:.2f} | {base['throughput_tokens_per_s']:,.0f} | |"
        )


if __name__ == "__main__":
    main()
