"""Base of every model read from YAML or JSON: frozen, closed to unknown keys, documented attributes."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Spec(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


MAX_COUNT = 2**53
"""Largest integer that every format we write holds exactly."""
PositiveInt = Annotated[int, Field(gt=0, le=MAX_COUNT, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A name or path: no control characters, short enough for a file system to say that it does not exist."""


class Figure(Spec):
    """One number of a hardware profile with where it came from."""

    value: NonNegativeFloat
    source: str = Field(min_length=1)
    """Datasheet, public file at a commit, or the measured file; for assumptions, the reason."""
    assumption: bool = False
    """True where nobody measured it for this device."""
    spread: NonNegativeFloat | None = None
    """Interquartile range of the repetitions, in the unit of `value` (calibrated profiles)."""
    repetitions: PositiveInt | None = None
