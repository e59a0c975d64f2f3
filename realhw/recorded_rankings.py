"""Rankings of a recorded trace in one npz, for machines that have numpy and no trace reader.

`python -m realhw.recorded_rankings smollm2-135m-reasoning --out FOLDER` writes FOLDER/smollm2-135m-reasoning.npz: the
selector's and the drafts' rankings as recorded, and which recorded layer and head serves each of a model's, by the
simulator's own mapping.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realhw.geometry import GEOMETRIES
from realhw.step_trace import Int32, StepTrace
from traces.errors import InputError

NUM_ROWS = 96
"""Positions exported: enough for eight staggered requests of 16 steps."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRankings:
    """One request of a trace. arrays: `kv_len` [S]; `RANKING_P` [S, L, H, M]; `MODEL_P_layers`, `MODEL_P_heads`."""

    name: str
    content_hash: str
    group: str
    arrays: dict[str, NDArray[Any]]

    def step_trace(
        self, model: str, block_size_tokens: int, ranking: str, shift: int, offsets: Int32, num_kept: int
    ) -> StepTrace:
        """Rankings on the model's layers and heads; `ranking` predicts (`true` with a shift: the previous step's).

        Raises InputError where the export lacks the ranking, the block size or the model, or ranks fewer than K.
        """
        true, predicted = self._ranked("true", block_size_tokens), self._ranked(ranking, block_size_tokens)
        key = f"{model}_{block_size_tokens}"
        if f"{key}_layers" not in self.arrays:
            raise InputError(f"trace {self.name}: exported without model {model} at {block_size_tokens} tokens a block")
        selectable = -(-int(self.arrays["kv_len"].max()) // block_size_tokens) - 1
        if true.shape[3] < min(num_kept, selectable):
            raise InputError(
                f"trace {self.name}: ranks {true.shape[3]} blocks of {block_size_tokens} tokens, need K = {num_kept}"
            )
        layers, heads = self.arrays[f"{key}_layers"], self.arrays[f"{key}_heads"]
        # One rank more than K: a block that fills before the due step may stand above the K-th that can be fetched.
        mapped = [
            np.ascontiguousarray(ids[:, layers][:, :, heads, : num_kept + 1], dtype=np.int32)
            for ids in (true, predicted)
        ]
        return StepTrace(mapped[0], mapped[1], shift, self.arrays["kv_len"].astype(np.int32), offsets)

    def _ranked(self, ranking: str, block_size_tokens: int) -> NDArray[Any]:
        name = f"{ranking}_{block_size_tokens}"
        if name not in self.arrays:
            have = ", ".join(sorted(n for n in self.arrays if n.split("_")[0] in ("true", ranking)))
            raise InputError(f"trace {self.name}: no ranking {ranking} at {block_size_tokens} tokens; exported: {have}")
        return self.arrays[name]

    def save(self, path: Path) -> None:
        """Write the npz."""
        path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({"name": self.name, "content_hash": self.content_hash, "group": self.group})
        np.savez_compressed(path, head=np.array(head), **self.arrays)  # type: ignore[arg-type]


def load_rankings(path: Path) -> RecordedRankings:
    """Read an npz that `save` wrote. Raises InputError for anything else."""
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        head = json.loads(str(arrays.pop("head")))
        return RecordedRankings(head["name"], head["content_hash"], head["group"], arrays)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: holds no exported rankings ({type(error).__name__}: {error})") from error


def export_rankings(
    trace: str, group: str | None = None, num_rows: int = NUM_ROWS, models: Sequence[str] = tuple(GEOMETRIES)
) -> RecordedRankings:
    """The first rows of a trace's request, with the simulator's mapping to each model at each recorded block size."""
    from simulator.catalog import load_model
    from simulator.mapping import resolve_mapping
    from simulator.specs.experiment import MappingSpec
    from simulator.verified_trace import open_verified
    from traces.catalog import resolve

    opened = open_verified(resolve(trace))
    request = opened.group(group or opened.group_names[0])
    arrays: dict[str, NDArray[Any]] = {"kv_len": request.kv_len[:num_rows]}
    for size in request.block_sizes:
        for ranking in request.rankings(size):
            if ranking != "exact":
                ids = request.ranking(ranking, size)[:num_rows]
                arrays[f"{ranking}_{size}"] = ids.astype(np.int16 if ids.max() < 1 << 15 else np.int32)
        for model in models:
            mapping = resolve_mapping(load_model(model), request, size, MappingSpec())
            arrays[f"{model}_{size}_layers"], arrays[f"{model}_{size}_heads"] = mapping.layer_of, mapping.head_of
    return RecordedRankings(trace, opened.content_hash, request.name, arrays)


@lru_cache(maxsize=4)
def find_rankings(trace: str, group: str | None, folder: Path | None) -> RecordedRankings:
    """The export FOLDER/TRACE.npz where a folder is given, else the trace itself; group null: the trace's first.

    Raises InputError where the export is of another group.
    """
    if folder is None:
        return export_rankings(trace, group)
    found = load_rankings(folder / f"{trace}.npz")
    if group is not None and found.group != group:
        raise InputError(f"{folder / trace}.npz: holds group {found.group}, the point needs {group}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="+", help="name of a shipped trace")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for trace in options.trace:
        path = options.out / f"{trace}.npz"
        export_rankings(trace).save(path)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
