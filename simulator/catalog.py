"""Models and hardware by catalog name or file: the shipped data, looked up without regard to case."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from simulator.hf_config import load_hf_config
from simulator.specs.base import Figure, Spec
from simulator.specs.hardware import HardwareSpec
from simulator.specs.model import ModelSpec
from simulator.specs.validation import unknown_name, validated
from simulator.yaml_io import load_yaml
from traces.errors import InputError

DATA = Path(__file__).resolve().parent / "data"


@lru_cache(maxsize=1)
def models() -> tuple[ModelSpec, ...]:
    """Every model of the catalog, in its order."""
    path = DATA / "models.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["models"]
    return tuple(validated(ModelSpec, row, f"{path.name}, {row.get('name')}") for row in rows)


def hardware_names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted, without reading them."""
    return tuple(sorted(path.stem for path in (DATA / "hardware").glob("*.yaml")))


def hardware() -> tuple[HardwareSpec, ...]:
    """Every shipped hardware profile, by name."""
    return tuple(load_hardware(name) for name in hardware_names())


def load_model(name_or_path: str | Path) -> ModelSpec:
    """A catalog model (name or Hugging Face id), or the model that a `config.json` or its folder describes.

    Raises InputError: unknown name (with the nearest ones), a file that does not end in .json or cannot be read, or a
    config key that is missing.
    """
    text = str(name_or_path)
    for model in models():
        if text.casefold() in {model.name.casefold(), (model.hf_id or model.name).casefold()}:
            return model
    path = Path(text)
    if path.suffix == ".json" or path.is_dir():
        return load_hf_config(path)
    _refuse_file(path, "a model's file is a Hugging Face config.json and must end in .json")
    raise unknown_name("model", text, (m.name for m in models()), "a path to a Hugging Face config.json or its folder")


def load_hardware(name_or_path: str | Path) -> HardwareSpec:
    """A shipped profile by name, or a profile from a YAML file (`oasis-sim calibrate` writes them).

    Raises InputError: unknown name (with the nearest ones), a file that does not end in .yaml or .yml, or one that is
    no valid profile (naming the key).
    """
    text = str(name_or_path)
    if text.casefold() in hardware_names():
        return _shipped_profile(text.casefold())
    if Path(text).suffix in {".yaml", ".yml"}:
        return validated(HardwareSpec, load_yaml(text), text)
    _refuse_file(Path(text), "a hardware profile is a file that must end in .yaml or .yml")
    raise unknown_name("hardware", text, hardware_names(), "a path to a profile that ends in .yaml")


def _refuse_file(path: Path, rule: str) -> None:
    """Raises InputError for a file or folder that is there: its ending tells a path from a name."""
    if path.exists():
        raise InputError(f"{path}: {rule}")


def distinct_figures(profile: HardwareSpec) -> list[Figure]:
    """The figures of a profile at any depth, in its order; one that stands for several entries (the same value from the
    same source, e.g. for each pair of kernels) counts once."""
    found: dict[tuple[float, str, bool], Figure] = {}
    for figure in _figures(profile):
        found.setdefault((figure.value, figure.source, figure.assumption), figure)
    return list(found.values())


def _figures(node: object) -> Iterator[Figure]:
    if isinstance(node, Figure):
        yield node
    elif isinstance(node, Spec):
        for name in type(node).model_fields:
            yield from _figures(getattr(node, name))
    elif isinstance(node, Mapping | tuple | list):
        for inner in node.values() if isinstance(node, Mapping) else node:
            yield from _figures(inner)


@lru_cache(maxsize=16)
def _shipped_profile(name: str) -> HardwareSpec:
    return validated(HardwareSpec, load_yaml(DATA / "hardware" / f"{name}.yaml"), f"{name}.yaml")
