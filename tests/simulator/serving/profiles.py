"""Hardware profiles with figures changed."""

from __future__ import annotations

from simulator.specs.hardware import HardwareSpec


def changed(hardware: HardwareSpec, **factors: float) -> HardwareSpec:
    """A profile with figures multiplied: `link__h2d_bytes_per_s=0.5`."""
    for key, factor in factors.items():
        section, name = key.split("__")
        part = getattr(hardware, section)
        figure = getattr(part, name)
        figure = figure.model_copy(update={"value": figure.value * factor})
        hardware = hardware.model_copy(update={section: part.model_copy(update={name: figure})})
    return hardware
