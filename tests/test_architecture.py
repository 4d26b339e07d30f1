"""Imports run downwards, and the lowest layer knows torch, numpy and the standard library only."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rollout_audit"
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))

LAYERS = [
    ["errors", "heap", "kernels", "__init__"],
    ["report", "engine_ray"],
    ["stats", "quantiles", "tails", "packing"],
    ["config", "batch"],
    ["render", "gates", "readers", "options", "explanation"],
    ["metrics", "inspection", "terminal"],
    ["diagnosis"],
    ["state", "api"],
    ["audit", "saving"],
    ["diagnosing", "running"],
    ["cli"],
    ["__main__"],
]
"""From the bottom to the top. A module imports from its own folder or from below."""


def layer_of(module: str) -> int:
    top = module.split("/")[0]
    return next(level for level, names in enumerate(LAYERS) if top in names)


def imports_of(module: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downwards(module: str) -> None:
    for name in imports_of(module):
        if not name.startswith("rollout_audit"):
            continue
        parts = name.split(".")[1:]
        below = "/".join(parts) or "__init__"
        same_folder = "/" in module and parts[:1] == [module.split("/")[0]]
        assert same_folder or layer_of(below) < layer_of(module), f"{module} imports {name}"


@pytest.mark.parametrize(
    "module", [m for m in MODULES if m.startswith("kernels/") or m in ("stats", "quantiles", "tails")]
)
def test_the_lowest_layer_needs_torch_numpy_and_the_standard_library_only(module: str) -> None:
    tops = {name.split(".")[0] for name in imports_of(module)} - {"rollout_audit"}
    assert tops <= set(sys.stdlib_module_names) | {"torch", "numpy"}


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("render/")])
def test_renderers_see_no_tensors(module: str) -> None:
    assert not {name.split(".")[0] for name in imports_of(module)} & {"torch", "numpy"}


@pytest.mark.parametrize(
    "module", ["cli", "options", "terminal", "config", "errors", "report", "gates", "__init__", "inspection"]
)
def test_what_runs_before_the_work_needs_no_torch(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    at_import = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {node.module or "" for node in at_import if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in at_import if isinstance(node, ast.Import) for alias in node.names}
    assert "torch" not in {name.split(".")[0] for name in names}


def test_a_file_fits_a_sitting() -> None:
    long = {module: len((PACKAGE / f"{module}.py").read_text().splitlines()) for module in MODULES}
    assert not {module: lines for module, lines in long.items() if lines > 450}
