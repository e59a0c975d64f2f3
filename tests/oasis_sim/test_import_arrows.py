"""Which package may import which, and that ours are the ones that Python finds."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "traces": {"traces"},
    "simulator": {"simulator", "traces"},
    "realhw": {"realhw", "simulator", "traces"},
    "analysis": {"analysis"},
    "oasis_sim": {"oasis_sim", "analysis", "realhw", "simulator", "traces"},
}
READ_BY_ANALYSIS = ("simulator.metrics", "traces.errors", "traces.one_line")
"""Names of the columns and of the errors: plain data, so that analysis reads result files and nothing else."""
GPU_LIBRARIES = {"torch", "triton", "transformers"}
WITHOUT_GPU_LIBRARIES = {"traces", "simulator", "analysis"}
STANDARD_LIBRARY_ONLY = ("simulator/metrics.py", "traces/errors.py")


def _modules(package: str) -> list[Path]:
    return sorted((REPOSITORY / package).rglob("*.py"))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted module, line) of every import statement of a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def _arrow_faults(package: str, path: Path) -> list[str]:
    faults = []
    for module, line in _imports(path):
        root = module.split(".")[0]
        own = root in MAY_IMPORT and root not in MAY_IMPORT[package]
        if package == "analysis" and module.startswith(READ_BY_ANALYSIS):
            own = False
        if own or (root in GPU_LIBRARIES and package in WITHOUT_GPU_LIBRARIES):
            faults.append(f"{path.relative_to(REPOSITORY)}:{line} imports {module}")
    return faults


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    modules = _modules(package)
    assert modules
    assert [fault for path in modules for fault in _arrow_faults(package, path)] == []


def test_the_walk_sees_a_forbidden_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    path = tmp_path / "module.py"
    path.write_text("def f():\n    import torch\n    from simulator.points import run_point\n")
    assert _arrow_faults("traces", path) == [
        "module.py:2 imports torch",
        "module.py:3 imports simulator.points.run_point",
    ]
    assert _arrow_faults("analysis", path) == _arrow_faults("traces", path)
    assert _arrow_faults("oasis_sim", path) == []


@pytest.mark.parametrize("file", STANDARD_LIBRARY_ONLY)
def test_names_and_errors_need_only_the_standard_library(file: str) -> None:
    roots = {module.split(".")[0] for module, _ in _imports(REPOSITORY / file)}
    assert roots <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("package", ["traces", "simulator", "realhw", "analysis"])
def test_package_files_are_empty(package: str) -> None:
    for path in _modules(package):
        if path == REPOSITORY / "realhw" / "__init__.py":  # decides how `python -m realhw.MODULE` ends
            assert [module for module, _ in _imports(path)] == ["sys", "traces.one_line.end_in_one_line"]
        else:
            assert path.name != "__init__.py" or path.read_text() == "", path


def _run_elsewhere(code: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_own_packages_are_found_from_another_folder_in_isolated_mode(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"sys.path.append({str(REPOSITORY)!r})\n"  # what an editable install's .pth does
        "from oasis_sim.shadowing import require_own_packages\n"
        "require_own_packages()\n"
        "import traces.errors; print(traces.errors.__file__)\n"
    )
    done = _run_elsewhere(code, tmp_path, "-I")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(REPOSITORY / "traces" / "errors.py")


def test_a_package_that_shadows_ours_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "__init__.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    done = subprocess.run(
        [sys.executable, "-m", "oasis_sim", "catalog", "systems"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: oasis-sim needs its own package 'traces'")
    assert str(tmp_path / "traces") in done.stderr
