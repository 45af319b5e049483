"""The shape of the source: who may import whom, what files are called, how long they get.

Reads the files with `ast`; imports neither package. Each rule is a function from source to a list
of complaints, which the last tests call on planted violations.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each file imports only files before it. Pure files hold integers and import no torch.
ORDER = {
    "sharding": [
        "granule",
        "bounds",
        "orders",
        "search",
        "planner",
        "segments",
        "units",
        "ownership",
        "names",
        "structure",
        "negotiation",
        "plan_file",
        "placement",
        "axes",
        "ragged_ops",
        "ragged_random",
        "ragged_reductions",
        "ragged_tensor",
        "collectives",
        "debug",
        "buffer",
        "gradient_slots",
        "marks",
        "exchange",
        "bucket_parameter",
        "reduction",
        "bucket",
        "load_checks",
        "root",
        "state",
        "arguments",
        "fsdp",
        "loading",
        "report",
        "__init__",
        "capacity",
        "__main__",
    ],
    # May import all of sharding, where only the command line may import it.
    "sharding.capacity": [
        "shapes",
        "huggingface",
        "model_sources",
        "parallelism",
        "optimizer_facts",
        "step_buffers",
        "training_setup",
        "update_scratch",
        "matrix_work",
        "prediction",
        "advice",
        "tables",
        "picture",
        "__init__",
    ],
    "vfsdp_optim": [
        "newton_schulz",
        "scratch",
        "block_codec",
        "shards",
        "states",
        "weights",
        "nonfinite",
        "runs",
        "algorithm",
        "membership",
        "precision",
        "matrices",
        "foreign",
        "loading",
        "conversion",
        "members",
        "plan",
        "agreement",
        "optimizer",
        "fused_adam",
        "adamw",
        "qk_clip",
        "muon",
        "groups",
        "__init__",
    ],
    # May import all of vfsdp_optim, which may import nothing of it.
    "vfsdp_optim.testing": [
        "oracle",
        "pool",
        "gradients",
        "shardings",
        "records",
        "differences",
        "programs",
        "trial",
        "reproduce",
        "equality",
        "training",
        "ops",
        "strategies",
        "wire",
        "verify",
        "__init__",
    ],
    "vfsdp_optim.testing.pytest_plugin": ["__init__"],
}
PURE = [
    "granule",
    "bounds",
    "orders",
    "search",
    "planner",
    "segments",
    "units",
    "ownership",
    "names",
    "capacity.shapes",
    "capacity.huggingface",
    "capacity.parallelism",
    "capacity.optimizer_facts",
]
# Packages of the repository that a package may not import, besides what ORDER forbids.
FORBIDDEN = {
    "sharding": {"vfsdp_optim", "examples", "benchmarks", "tests"},
    "vfsdp_optim": {"examples", "benchmarks", "tests"},
}
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
MAX_LINES = 500
MAX_PUBLIC = 12
FOLDERS = ["sharding", "vfsdp_optim", "tests", "examples", "benchmarks"]
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MODULES = [path for path in FILES if path.relative_to(ROOT).parts[0] in ORDER]


def imported_modules(node: ast.AST, package: str) -> list[str]:
    """Return the dotted names that one import statement may load; relative ones made absolute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        base = f"{package}.{base}".rstrip(".")
    # `from sharding import planner` loads a module; `from sharding import fully_shard` does not.
    known = ORDER.get(base, [])
    return [f"{base}.{alias.name}" if alias.name in known else base for alias in node.names]


def siblings(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the modules of the same package that one import statement loads."""
    for name in imported_modules(node, package):
        if name == package:
            yield "__init__"
        elif name.startswith(f"{package}."):
            yield name.removeprefix(f"{package}.").split(".")[0]


def check_direction(source: str, package: str, module: str) -> list[str]:
    """Return the imports that point the wrong way."""
    order = ORDER[package]
    if module not in order:
        return [f"{package}/{module}.py has no place in ORDER: decide what it may import"]
    allowed = order[: order.index(module)]
    wrong = []
    for node in ast.walk(ast.parse(source)):
        for sibling in siblings(node, package):
            if sibling not in allowed:
                wrong.append(f"{package}/{module}.py imports {sibling}, which comes after it")
        for name in imported_modules(node, package):
            if name.split(".")[0] in FORBIDDEN[package.split(".")[0]]:
                wrong.append(f"{package}/{module}.py imports {name}")
    return wrong


def check_purity(source: str, package: str, module: str) -> list[str]:
    """Return what a pure file imports from outside the standard library and the pure files."""
    names = [
        name for node in ast.walk(ast.parse(source)) for name in imported_modules(node, package)
    ]
    pure = {f"{package}.{other}" for other in PURE}
    return [
        f"{package}/{module}.py imports {name}: it is pure integers"
        for name in names
        if name.split(".")[0] not in sys.stdlib_module_names and name not in pure
    ]


def check_late_imports(source: str, package: str, module: str) -> list[str]:
    """Return imports of sibling modules inside functions: they hide a cycle."""
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        f"{package}/{module}.py imports {sibling} inside {function.name}()"
        for function in functions
        for node in ast.walk(function)
        for sibling in siblings(node, package)
    ]


def check_public_names(source: str, package: str) -> list[str]:
    """Return what is wrong with `__all__` of a package."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            names = ast.literal_eval(node.value)
            # Importing such a module would put it in the place of the name.
            hidden = sorted(set(names) & set(ORDER[package]))
            if hidden:
                return [f"{package} has modules called as its public names {hidden}"]
            if len(names) > MAX_PUBLIC:
                return [f"{package} has {len(names)} public names, expected at most {MAX_PUBLIC}"]
            return []
    return [f"{package}/__init__.py lists no __all__"]


def check_file(name: str, source: str) -> list[str]:
    """Return what is wrong with a file's name and length."""
    stem = Path(name).stem
    wrong = []
    if EMPTY_NAMES & set(stem.split("_")):
        wrong.append(f"{name}: the name does not say what is in it")
    if (lines := len(source.splitlines())) > MAX_LINES:
        wrong.append(f"{name} has {lines} lines, expected at most {MAX_LINES}")
    return wrong


def _label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _module(path: Path) -> tuple[str, str, str]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    packages = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
    package = next(name for name in packages if name in ORDER)
    return path.read_text(), package, ".".join(parts[package.count(".") + 1 :])


@pytest.mark.parametrize("path", MODULES, ids=_label)
def test_module_imports_only_what_comes_before_it(path: Path) -> None:
    assert check_direction(*_module(path)) == []


@pytest.mark.parametrize("path", MODULES, ids=_label)
def test_module_has_no_late_import_of_a_sibling(path: Path) -> None:
    assert check_late_imports(*_module(path)) == []


@pytest.mark.parametrize("module", PURE)
def test_planning_is_pure_integers(module: str) -> None:
    path = ROOT / "sharding" / f"{module.replace('.', '/')}.py"
    assert check_purity(path.read_text(), "sharding", module) == []


@pytest.mark.parametrize("package", ORDER)
def test_package_has_few_public_names(package: str) -> None:
    path = ROOT / package.replace(".", "/") / "__init__.py"
    assert check_public_names(path.read_text(), package) == []


@pytest.mark.parametrize("path", FILES, ids=_label)
def test_file_is_short_and_has_a_telling_name(path: Path) -> None:
    assert check_file(_label(path), path.read_text()) == []


def test_no_test_folder_is_a_package_that_hides_ours() -> None:
    # tests/ is on sys.path: as a package, tests/sharding would be imported as `sharding`.
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize(
    ("source", "package", "module", "fault"),
    [
        ("import vfsdp_optim", "sharding", "fsdp", "imports vfsdp_optim"),
        ("from vfsdp_optim.muon import Muon", "sharding", "fsdp", "imports vfsdp_optim.muon"),
        ("from sharding.buffer import x", "sharding", "planner", "imports buffer"),
        ("from sharding import buffer", "sharding", "planner", "imports buffer"),
        ("from .buffer import x", "sharding", "planner", "imports buffer"),
        ("from . import buffer", "sharding", "planner", "imports buffer"),
        ("import sharding.buffer", "sharding", "planner", "imports buffer"),
        ("from sharding import fully_shard", "sharding", "bucket", "imports __init__"),
        ("import sharding", "sharding", "bucket", "imports __init__"),
        ("from sharding.planner import x", "sharding", "planner", "imports planner"),
        ("def f():\n    from sharding.fsdp import x", "sharding", "state", "imports fsdp"),
        ("from vfsdp_optim.groups import x", "vfsdp_optim", "muon", "imports groups"),
        ("import tests.ranks", "vfsdp_optim", "muon", "imports tests.ranks"),
        ("from vfsdp_optim.testing import x", "vfsdp_optim", "muon", "imports testing"),
        ("from vfsdp_optim.testing.pool import x", "vfsdp_optim.testing", "oracle", "imports pool"),
        ("", "sharding", "scheduler", "no place in ORDER"),
    ],
)
def test_checker_finds_an_import_against_the_direction(
    source: str, package: str, module: str, fault: str
) -> None:
    complaints = check_direction(source, package, module)
    assert len(complaints) == 1
    assert fault in complaints[0]


@pytest.mark.parametrize(
    ("source", "package", "module"),
    [
        ("import torch\nfrom sharding.granule import Granule", "sharding", "planner"),
        ("from .granule import Granule\nfrom . import granule", "sharding", "planner"),
        ("from sharding import fully_shard\nimport sharding.bucket", "vfsdp_optim", "muon"),
        ("from vfsdp_optim.optimizer import x", "vfsdp_optim", "muon"),
        ("import sharding_tools", "vfsdp_optim", "muon"),
        ("from vfsdp_optim.muon import x", "vfsdp_optim.testing", "oracle"),
    ],
)
def test_checker_accepts_imports_along_the_direction(
    source: str, package: str, module: str
) -> None:
    assert check_direction(source, package, module) == []
    assert check_late_imports(source, package, module) == []


@pytest.mark.parametrize(
    "source",
    ["import torch", "from torch import nn", "import numpy as np", "from .structure import x"],
)
def test_checker_finds_what_is_not_pure(source: str) -> None:
    assert len(check_purity(source, "sharding", "planner")) == 1
    assert check_purity("import math\nfrom .granule import x", "sharding", "planner") == []


def test_checker_finds_a_late_import_but_lets_other_packages_be_late() -> None:
    late = "class A:\n    def f(self):\n        from sharding.granule import Granule\n"
    assert len(check_late_imports(late, "sharding", "planner")) == 1
    assert check_late_imports("def f():\n    import bitsandbytes", "sharding", "fsdp") == []


def test_checker_finds_too_many_or_unlisted_public_names() -> None:
    names = [f"name{i}" for i in range(MAX_PUBLIC + 1)]
    assert check_public_names(f"__all__ = {names}", "sharding") != []
    assert check_public_names(f"__all__ = {names[1:]}", "sharding") == []
    assert check_public_names("x = 1", "sharding") != []
    assert check_public_names('__all__ = ["planner"]', "sharding") != []


def test_checker_finds_empty_names_and_long_files() -> None:
    assert len(check_file("sharding/utils.py", "")) == 1
    assert len(check_file("tests/test_helpers.py", "")) == 1
    assert len(check_file("sharding/fsdp.py", "x = 1\n" * (MAX_LINES + 1))) == 1
    assert check_file("sharding/fsdp.py", "x = 1\n" * MAX_LINES) == []
