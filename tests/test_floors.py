"""The floors of the house: imports go down only, and what has one place stays there.

import-linter (`make lint`) reads the same floors from the source; here each floor is imported in a fresh interpreter and
asked what came along, which also sees what a library drags in.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ray_muloco"
FRAMEWORKS = ("torch", "ray", "mlflow", "pyarrow", "optuna", "numpy", "tyro", "rich", "matplotlib")
MAX_FILE_LINES = 400


def modules_of(*floors: str) -> list[str]:
    """Dotted names of every module of these floors."""
    files = [file for floor in floors for file in sorted((PACKAGE / floor).rglob("*.py"))]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]


def brought_along(modules: list[str]) -> set[str]:
    """Which of FRAMEWORKS a fresh interpreter holds after importing these modules."""
    program = f"import sys, {', '.join(modules)}\nprint(*(name for name in {FRAMEWORKS!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def sources(*tops: str) -> Iterator[tuple[str, ast.Module]]:
    """(path from the root, syntax tree) of every Python file below these directories."""
    for top in tops:
        for file in sorted((ROOT / top).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), parsed(file)


@functools.cache
def parsed(file: Path) -> ast.Module:
    """A file's syntax tree, made once for all tests."""
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a file imports anywhere, in functions too; `from a import b` gives both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(prefix: str, *tops: str) -> set[str]:
    """Files below these directories that import `prefix` or something below it."""
    return {path for path, tree in sources(*tops) if any(name == prefix or name.startswith(f"{prefix}.") for name in imported(tree))}


@pytest.mark.parametrize("module", ["ray_muloco", "ray_muloco.presets", "ray_muloco.config", "ray_muloco.sections", "ray_muloco.errors"])
def test_the_ground_floor_needs_the_standard_library_alone(module: str) -> None:
    assert brought_along([module]) == set()


@pytest.mark.parametrize(
    ("floor", "may_bring"),
    [
        ("core", {"torch", "numpy"}),
        ("data", {"numpy", "pyarrow"}),
        ("training", {"torch", "numpy", "pyarrow"}),
        ("analysis", {"numpy", "matplotlib", "pyarrow"}),
        ("runtime", {"torch", "numpy", "pyarrow", "ray", "rich"}),
    ],
)
def test_a_floor_brings_along_only_what_is_below_it(floor: str, may_bring: set[str]) -> None:
    assert brought_along(modules_of(floor)) - may_bring == set()


def test_the_driver_starts_without_torch() -> None:
    """Importing torch takes seconds that a driver, which computes nothing, must not wait for."""
    assert brought_along(["ray_muloco.runtime.fit"]) & {"torch", "mlflow", "optuna"} == set()


def test_fit_is_found_on_first_use() -> None:
    program = "from ray_muloco import fit, presets, TrainConfig; print(fit.__module__, presets.tiny(method='muloco', replicas=4).scaling.num_replicas)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
    assert done.stdout.split() == ["ray_muloco.runtime.fit", "4"]


def test_only_collectives_imports_rays_collectives() -> None:
    assert importers("ray.util.collective", "ray_muloco", "jobs", "tuning") == {"ray_muloco/runtime/collectives.py"}


def test_only_runtime_imports_ray_inside_the_package() -> None:
    assert {path.split("/")[1] for path in importers("ray", "ray_muloco")} == {"runtime"}


def test_only_tracking_imports_mlflow() -> None:
    assert importers("mlflow", "ray_muloco") == {"ray_muloco/training/tracking.py"}


@pytest.mark.parametrize(("entry", "other"), [("jobs", "tuning"), ("tuning", "jobs")])
def test_entry_points_do_not_import_each_other(entry: str, other: str) -> None:
    """jobs/ is on the path of its own programs, so a module of it is known by its bare name too."""
    bare = {file.stem for file in (ROOT / other).glob("*.py")} - {"__init__"}
    names = {other, *bare} - {file.stem for file in (ROOT / entry).glob("*.py")}
    found = {(path, name) for path, tree in sources(entry) for name in imported(tree) if name.split(".")[0] in names}
    assert found == set()


def test_the_package_never_imports_entry_points() -> None:
    bare = {file.stem for top in ("jobs", "tuning") for file in (ROOT / top).glob("_*.py")}
    found = {(path, name) for path, tree in sources("ray_muloco") for name in imported(tree) if name.split(".")[0] in {"jobs", "tuning", *bare}}
    assert found == set()


def test_the_environment_is_read_in_two_files_only() -> None:
    """RAY_ADDRESS in runtime/fit.py and MLFLOW_TRACKING_URI in training/tracking.py; a flag decides everything else.

    runtime/nccl_backend.py sets a switch for torch, which takes it in no other way, and puts it back; runtime/cluster.py
        sets Ray's health checks for the head it starts, which takes them in no other way.
    """
    allowed = {"ray_muloco/runtime/fit.py", "ray_muloco/training/tracking.py", "ray_muloco/runtime/nccl_backend.py", "ray_muloco/runtime/cluster.py"}
    found = {path for path, tree in sources("ray_muloco") if any(_touches_environment(node) for node in ast.walk(tree))}
    assert found <= allowed


def _touches_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv"}
    if isinstance(node, ast.Attribute):
        return node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os"
    return isinstance(node, ast.ImportFrom) and node.module == "os" and any(alias.name in names for alias in node.names)


@pytest.mark.parametrize("name", ["pseudogradient_", "outer_step_"])
def test_the_sign_and_the_outer_step_are_written_once(name: str) -> None:
    """A function of this name, or of this name with a leading underscore or none behind, would be a second home."""
    defined = {
        path for path, tree in sources("ray_muloco") for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.strip("_") == name.rstrip("_")
    }
    assert defined == {"ray_muloco/core/outer.py"}


def test_no_torch_optimizer_takes_the_outer_step() -> None:
    assert importers("torch.optim", "ray_muloco/training", "ray_muloco/runtime") == set()


def test_ranks_belong_to_collectives() -> None:
    """Below runtime there are replicas with ids: a rank is a position in one group of one generation."""
    floors = [f"ray_muloco/{floor}" for floor in ("core", "data", "training")]
    found = {
        (path, node.lineno)
        for path, tree in sources(*floors)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id in {"rank", "world_size"}) or (isinstance(node, ast.arg) and node.arg in {"rank", "world_size"})
    }
    assert found == set()


def test_nothing_happens_at_import() -> None:
    """A module holds definitions, constants and imports: no bare call, loop or with at its top."""
    idle = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.If)
    found = {
        (path, node.lineno)
        for path, tree in sources("ray_muloco")
        for node in tree.body
        if not isinstance(node, idle) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    }
    assert found == set()


def test_no_global_seed_is_set() -> None:
    """Every generator comes from (seed, replica, purpose); a bare global seed would tie strangers together."""
    found = {
        (path, node.lineno)
        for path, tree in sources("ray_muloco", "jobs", "tuning")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.manual_seed", "torch.seed", "random.seed", "np.random.seed", "numpy.random.seed"}
    }
    assert found == set()


def test_files_stay_readable() -> None:
    lengths = {path: (ROOT / path).read_text(encoding="utf-8").count("\n") for path, _ in sources("ray_muloco", "jobs", "tuning", "tests")}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}
