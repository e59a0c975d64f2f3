"""How `python -m PACKAGE.MODULE` ends on what was to be expected: as the command line does, in one line on stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from traces.errors import EnvironmentMissing, OasisError

OWN_PACKAGES = ("oasis_sim", "simulator", "traces", "realhw", "analysis")
MISSING = EnvironmentMissing.exit_code


def end_in_one_line() -> None:
    """Take `sys.excepthook`: to be called by a module that is run, or by its package before the module's imports."""
    sys.excepthook = _end


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Raises SystemExit, which Python takes from a hook; other errors keep their traceback."""
    if isinstance(error, OasisError):
        text, code = str(error), error.exit_code
    elif isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] not in OWN_PACKAGES:
        text, code = f"this module needs {error.name}: pip install '.[gpu]' in a clone", MISSING
    elif isinstance(error, OSError) and error.filename is not None:
        text, code = f"{error.filename}: {error.strerror}", MISSING
    else:
        sys.__excepthook__(kind, error, trace)
        return
    print("error:", " ".join(text.split()), file=sys.stderr)
    raise SystemExit(code)
