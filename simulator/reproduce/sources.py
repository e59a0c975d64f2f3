"""Inputs that are files: the synthesised trace of a recipe, and a hardware profile with figures replaced."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from simulator.cache import cache_folder, cache_key
from simulator.catalog import load_hardware, load_model
from simulator.reproduce.table import Recipe
from simulator.specs.hardware import HardwareSpec
from simulator.specs.validation import suggest, validated
from traces.errors import InputError
from traces.schema import ModelGeometry
from traces.synth import synthesise as synthesis
from traces.synth.recipes import load_recipe, recipe_statistics

SEED = 0


def recipe_trace(recipe: Recipe, churn: float | None, model: str, context_tokens: int) -> Path:
    """Folder of the trace, made once and kept in the cache under everything that decides it.

    Raises InputError for an MLA model, and for a churn that the recipe's other figures contradict.
    """
    spec = load_model(model)
    if spec.mla is not None:
        raise InputError(f"model {spec.name}: MLA caches one latent for all heads; traces rank blocks per KV head")
    chosen = load_recipe(recipe.name, churn)
    kv_heads = min(recipe.kv_heads or spec.num_kv_heads, spec.num_kv_heads)
    geometry = ModelGeometry(
        name=spec.name,
        num_layers=spec.num_layers,
        num_query_heads=kv_heads * spec.num_q_heads // spec.num_kv_heads,
        num_kv_heads=kv_heads,
        head_dim=spec.head_dim,
    )
    key = {
        "kind": "recipe trace",
        "code": _synthesis_code(),
        "recipe": chosen.model_dump(mode="json"),
        "geometry": geometry.model_dump(mode="json"),
        "context": context_tokens,
        "steps": recipe.steps,
        "layers": recipe.layers,
        "seed": SEED,
    }
    folder = cache_folder() / "recipe-traces" / cache_key(key)[:32]
    if folder.is_dir():
        return folder
    try:
        synthesis.synthesise(
            recipe_statistics(chosen),
            geometry,
            context_tokens,
            recipe.steps,
            SEED,
            folder,
            layers=sorted({layer % spec.num_layers for layer in recipe.layers}),
        )
    except InputError:
        if not folder.is_dir():
            raise  # else another process has made it meanwhile
    return folder


def profile_with(hardware: str, figures: Mapping[str, float]) -> str:
    """Name of a profile, or the path of a copy whose figures (dotted, e.g. `link.gather_bytes_per_s`) are replaced."""
    return _profile_with(hardware, tuple(sorted(figures.items()))) if figures else hardware


@lru_cache(maxsize=64)
def _profile_with(hardware: str, figures: tuple[tuple[str, float], ...]) -> str:
    profile: dict[str, Any] = load_hardware(hardware).model_dump(mode="json")
    for dotted, value in figures:
        *sections, name = dotted.split(".")
        node: Any = profile
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if not isinstance(node, dict) or not isinstance(node.get(name), dict) or "value" not in node[name]:
            known = [f"{top}.{key}" for top in profile if isinstance(profile[top], dict) for key in profile[top]]
            raise InputError(f"hardware.{dotted}: no figure of profile {hardware}: {suggest(dotted, known)}")
        node[name] = {"value": value, "source": "given to oasis-sim reproduce", "assumption": True}
    validated(HardwareSpec, profile, hardware)
    text = json.dumps(profile).encode()  # JSON is YAML, and written a hundred times faster
    path = cache_folder() / "profiles" / f"{hashlib.sha256(text).hexdigest()[:32]}.yaml"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    return str(path)


@lru_cache(maxsize=1)
def _synthesis_code() -> str:
    """Hash of the synthesis' source: a trace made by other code is not taken."""
    folder = Path(synthesis.__file__).parent
    sources = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()
