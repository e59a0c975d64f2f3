"""The byte identities of KV, working set and compressed keys, from the catalog's geometry."""

from __future__ import annotations

from simulator import catalog


def main() -> None:
    model = catalog.load_model("Qwen3-8B")
    context, budget, block = 32768, 2048, 16
    kv = model.kv_bytes(context)
    keys = model.metadata_bytes(context // block)
    working_set = model.working_set_bytes(budget // block, block)
    print(f"{model.name}: KV per token            {model.kv_bytes_per_token():>13,} B")
    print(f"{model.name}: KV at 32K               {kv:>13,} B  = {kv / 2**30:.2f} GiB")
    print(f"{model.name}: 2,048-token working set {working_set:>13,} B  = {working_set / 2**20:.0f} MiB")
    print(f"{model.name}: compressed keys at 32K  {keys:>13,.0f} B  = 1/{kv / keys:.0f} of the KV")


if __name__ == "__main__":
    main()
