"""Four of the project's packages have common names: make sure that Python would import ours."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

OWN_PACKAGES = ("simulator", "traces", "realhw", "analysis")


def require_own_packages() -> None:
    """Raise ImportError, in one line that says what shadows what, unless the packages lie beside `oasis_sim`."""
    home = Path(__file__).resolve().parent.parent
    for name in OWN_PACKAGES:
        spec = find_spec(name)
        places = [Path(place).resolve() for place in (spec.submodule_search_locations or ())] if spec else []
        if places[:1] != [home / name]:
            found = ", ".join(map(str, places)) or (spec.origin if spec else None) or "nothing"
            raise ImportError(
                f"oasis-sim needs its own package {name!r} from {home / name}, but Python finds {found}: "
                "rename or remove what shadows it"
            )
