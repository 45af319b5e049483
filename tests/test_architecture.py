"""The shape of the source: who may import whom, what files are called, how long they get."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each file or folder imports only those before it in its list; `__init__` is the package itself.
ORDER = {
    "sharding": ["planning", "transport", "tensor", "checkpoint", "fsdp", "report", "__init__"],
    "sharding.planning": (
        "cuts boxes granule bounds orders search planner segments turns holders waves ownership "
        "structure negotiation plan_file"
    ).split(),
    "sharding.transport": (
        "waits axes backends posting heralds collectives agreement debug gradient_marks exchange"
    ).split(),
    "sharding.tensor": (
        "placement moves gradient_hooks local_ops permuted random_ops reductions specs "
        "ragged_tensor"
    ).split(),
    "sharding.checkpoint": (
        "names matching optimizer_checks load_checks step_folders safetensors_header dcp_metadata "
        "messages model_targets optimizer_states full_state safetensors_files contents reading "
        "saving verification loading __init__"
    ).split(),
    "sharding.fsdp": (
        "many_objects transforms proofs buffer gradient_slots held_parts forms parameter "
        "gathered slots originals reduction containers input_views kept_tensors beginnings bucket "
        "module_tree root asked_by_torch module_state arguments given_cuts wishes fsdp_module "
        "fully_shard"
    ).split(),
    "vfsdp_optim": (
        "update_rms algorithm parameters states step checkpoint newton_schulz matrix_roots "
        "plan optimizer fused_adam adamw_update adamw matrix_optimizer qk_clip muon blocked "
        "shampoo soap output_heads group_overrides groups __init__ capacity testing __main__"
    ).split(),
    "vfsdp_optim.parameters": ["group", "tiles", "param_shard", "given"],
    "vfsdp_optim.states": "scratch block_codec formats weights precision unit_states".split(),
    "vfsdp_optim.step": (
        "nonfinite member runs group_runs run_lists units sharded_units admission standing_state "
        "unit_owners working_set plan_proof"
    ).split(),
    "vfsdp_optim.checkpoint": ["bitsandbytes_states", "values", "saved", "conversion"],
    "vfsdp_optim.capacity": (
        "shapes huggingface model_sources parallelism step_buffers optimizers training_setup "
        "torch_shards update_scratch matrix_work prediction advice tables fitting picture __init__"
    ).split(),
    "vfsdp_optim.testing": (
        "oracle pool gradients shardings records differences programs trial reproduce "
        "equality training ops strategies wire verify __init__"
    ).split(),
}
# Folders whose names are taken from their files; the others list theirs in `__all__`.
ROOMS = [folder for folder, names in ORDER.items() if "__init__" not in names]
# These hold integers and import no torch.
PURE = [
    f"{folder}.{name}"
    for folder, names in {
        "sharding.planning": (
            "cuts boxes granule bounds orders search planner segments turns holders waves ownership"
        ),
        "sharding.checkpoint": "names matching optimizer_checks step_folders safetensors_header",
        "vfsdp_optim.capacity": "shapes huggingface parallelism",
    }.items()
    for name in names.split()
]
# Packages of the repository that a package may not import, besides what ORDER forbids.
FORBIDDEN = {
    "sharding": {"vfsdp_optim", "examples", "benchmarks", "tests"},
    "vfsdp_optim": {"examples", "benchmarks", "tests"},
}
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
MAX_LINES = 500
MAX_PUBLIC = 13
FOLDERS = ["sharding", "vfsdp_optim", "tests", "examples", "benchmarks"]
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# The plugin is installed as a package of its own, and imports the kit when it is used.
MODULES = [
    path
    for path in FILES
    if path.relative_to(ROOT).parts[0] in ORDER and path.parent.name != "pytest_plugin"
]


def statements(source: str) -> Iterator[ast.AST]:
    """Yield all nodes of a source but those that only a type checker runs."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        yield node
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        waiting += node.orelse if for_types else list(ast.iter_child_nodes(node))


def imported_modules(node: ast.AST, package: str) -> list[str]:
    """Return the dotted names that one import statement may load; relative ones made absolute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        above = package.split(".")[: package.count(".") + 2 - node.level]
        base = ".".join([*above, *([base] if base else [])])
    # `from sharding.planning import planner` loads a module; `from sharding import fully_shard`
    # does not.
    known = ORDER.get(base, [])
    return [f"{base}.{alias.name}" if alias.name in known else base for alias in node.names]


def parting(name: str, package: str, module: str) -> tuple[str, str, str] | None:
    """Return the last folder of a file and of what it imports, and where each goes on there."""
    here, there = [*package.split("."), module], name.split(".")
    shared = 0
    while shared < min(len(here), len(there)) and here[shared] == there[shared]:
        shared += 1
    if shared == len(here):  # itself
        shared -= 1
    if not shared:
        return None
    folder = ".".join(here[:shared])
    return folder, here[shared], there[shared] if shared < len(there) else "__init__"


def check_direction(source: str, package: str, module: str) -> list[str]:
    """Return the imports that point the wrong way."""
    if module not in ORDER[package] and not (package in ROOMS and module == "__init__"):
        return [f"{package}/{module}.py has no place in ORDER: decide what it may import"]
    wrong = []
    for node in statements(source):
        for name in imported_modules(node, package):
            if name.split(".")[0] in FORBIDDEN[package.split(".")[0]]:
                wrong.append(f"{package}/{module}.py imports {name}")
            if (parts := parting(name, package, module)) is None:
                continue
            folder, mine, theirs = parts
            order = ORDER[folder]
            allowed = order[: order.index(mine)] if mine in order else []
            if theirs not in allowed:
                wrong.append(
                    f"{package}/{module}.py imports {theirs}, which comes after it in {folder}"
                )
    return wrong


def check_purity(source: str, package: str, module: str) -> list[str]:
    """Return what a pure file imports from outside the standard library and the pure files."""
    names = [name for node in statements(source) for name in imported_modules(node, package)]
    return [
        f"{package}/{module}.py imports {name}: it is pure integers"
        for name in names
        if name.split(".")[0] not in sys.stdlib_module_names and name not in PURE
    ]


def check_late_imports(source: str, package: str, module: str) -> list[str]:
    """Return imports of sibling modules inside functions: they hide a cycle."""
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        f"{package}/{module}.py imports {name} inside {function.name}()"
        for function in functions
        for node in ast.walk(function)
        for name in imported_modules(node, package)
        if parting(name, package, module) is not None
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


def check_room(source: str, folder: str) -> list[str]:
    """Return what is wrong with a folder's page, which says what lives there and holds nothing."""
    tree = ast.parse(source)
    wrong = []
    if len((ast.get_docstring(tree) or "").splitlines()) < 3:
        wrong.append(f"{folder} says in too few lines what lives there and what it may import")
    if len(tree.body) > 1:
        wrong.append(f"{folder}/__init__.py holds more than its docstring")
    return wrong


def check_file(name: str, source: str) -> list[str]:
    """Return what is wrong with a file's name and length."""
    stem = Path(name).stem
    wrong = []
    if EMPTY_NAMES & set(stem.split("_")):
        wrong.append(f"{name}: the name does not say what is in it")
    if (lines := len(source.splitlines())) > MAX_LINES:
        wrong.append(f"{name} has {lines} lines, expected at most {MAX_LINES}")
    return wrong


def named_twice(sources: dict[str, str]) -> list[str]:
    """Return classes, public functions and constants, and files that two places have.

    A name says one thing to readers, in whatever package they are; `_Job` is `Job` to them.
    """
    places: dict[str, list[str]] = {}
    for file, source in sources.items():
        if (stem := Path(file).stem)[:2] != "__":
            places.setdefault(f"{stem}.py", []).append(file)
        tree = ast.parse(source)
        names = [n.name.lstrip("_") for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        # Once, however many overloads it has.
        names += {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names += [t.id for t in targets if isinstance(t, ast.Name) and t.id[0].isupper()]
        for name in names:
            if name[0] != "_" and name != "main":
                places.setdefault(name, []).append(file)
    return [f"{name}: {', '.join(files)}" for name, files in places.items() if len(files) > 1]


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


@pytest.mark.parametrize("name", PURE)
def test_planning_is_pure_integers(name: str) -> None:
    path = ROOT / f"{name.replace('.', '/')}.py"
    assert check_purity(path.read_text(), *name.rsplit(".", 1)) == []


@pytest.mark.parametrize("package", [package for package in ORDER if package not in ROOMS])
def test_package_has_few_public_names(package: str) -> None:
    path = ROOT / package.replace(".", "/") / "__init__.py"
    assert check_public_names(path.read_text(), package) == []


@pytest.mark.parametrize("folder", ROOMS)
def test_folder_says_what_lives_there(folder: str) -> None:
    path = ROOT / folder.replace(".", "/") / "__init__.py"
    assert check_room(path.read_text(), folder) == []


@pytest.mark.parametrize("folder", ORDER)
def test_every_name_in_the_order_exists(folder: str) -> None:
    path = ROOT / folder.replace(".", "/")
    present = {p.stem for p in path.glob("*.py")} | {p.parent.name for p in path.glob("*/*.py")}
    assert set(ORDER[folder]) <= present


@pytest.mark.parametrize("path", FILES, ids=_label)
def test_file_is_short_and_has_a_telling_name(path: Path) -> None:
    assert check_file(_label(path), path.read_text()) == []


def test_one_name_stands_for_one_thing_in_both_packages() -> None:
    assert named_twice({_label(path): path.read_text() for path in MODULES}) == []


def test_no_test_folder_is_a_package_that_hides_ours() -> None:
    # Their parents may be on sys.path: as a package, tests/sharding would hide ours.
    assert list((ROOT / "tests").rglob("__init__.py")) == []


CORE = "sharding.fsdp"
PLANS = "sharding.planning"


@pytest.mark.parametrize(
    ("source", "package", "module", "fault"),
    [
        ("import vfsdp_optim", CORE, "bucket", "imports vfsdp_optim"),
        ("from vfsdp_optim.muon import Muon", "sharding", "report", "imports vfsdp_optim.muon"),
        ("from sharding.fsdp.buffer import x", PLANS, "planner", "imports fsdp"),
        ("from sharding.planning.holders import x", PLANS, "planner", "imports holders"),
        ("from sharding.planning import holders", PLANS, "planner", "imports holders"),
        ("from sharding import report", CORE, "root", "imports report"),
        ("from .holders import x", PLANS, "planner", "imports holders"),
        ("from . import holders", PLANS, "planner", "imports holders"),
        ("from ..fsdp import buffer", PLANS, "planner", "imports fsdp"),
        ("import sharding.fsdp.buffer", PLANS, "planner", "imports fsdp"),
        ("from sharding import fully_shard", CORE, "bucket", "imports __init__"),
        ("import sharding", CORE, "bucket", "imports __init__"),
        ("import sharding.fsdp", CORE, "bucket", "imports __init__"),
        ("from sharding.planning.planner import x", PLANS, "planner", "imports planner"),
        ("def f():\n    from sharding.fsdp.root import x", CORE, "bucket", "imports root"),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from . import root", CORE, "bucket", "root"),
        ("from vfsdp_optim.groups import x", "vfsdp_optim", "muon", "imports groups"),
        ("from vfsdp_optim.muon import x", "vfsdp_optim.step", "runs", "imports muon"),
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
        ("import torch\nfrom sharding.planning.granule import Granule", PLANS, "planner"),
        ("from .granule import Granule\nfrom . import granule", PLANS, "planner"),
        ("from ..planning import planner\nfrom sharding.transport.axes import x", CORE, "bucket"),
        ("from sharding import fully_shard\nimport sharding.fsdp.bucket", "vfsdp_optim", "muon"),
        ("from vfsdp_optim.optimizer import x", "vfsdp_optim", "muon"),
        ("if TYPE_CHECKING:\n    from vfsdp_optim.muon import x", "vfsdp_optim", "algorithm"),
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
    assert len(check_purity(source, PLANS, "planner")) == 1
    assert check_purity("import math\nfrom .granule import x", PLANS, "planner") == []


def test_checker_finds_a_late_import_but_lets_other_packages_be_late() -> None:
    late = "class A:\n    def f(self):\n        from sharding.planning.granule import Granule\n"
    assert len(check_late_imports(late, PLANS, "planner")) == 1
    assert check_late_imports("def f():\n    import bitsandbytes", CORE, "bucket") == []


def test_checker_finds_too_many_or_unlisted_public_names() -> None:
    names = [f"name{i}" for i in range(MAX_PUBLIC + 1)]
    assert check_public_names(f"__all__ = {names}", "sharding") != []
    assert check_public_names(f"__all__ = {names[1:]}", "sharding") == []
    assert check_public_names("x = 1", "sharding") != []
    assert check_public_names('__all__ = ["report"]', "sharding") != []


def test_checker_finds_a_folder_that_says_little_or_holds_something() -> None:
    page = '"""What lives here.\n\nWhat it may import.\n"""\n'
    assert check_room(page, CORE) == []
    assert len(check_room('"""What lives here."""\n', CORE)) == 1
    assert len(check_room(page + "from sharding.fsdp.bucket import Bucket\n", CORE)) == 1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("class Bucket: pass", "Bucket"),
        ("def f():\n    class _Bucket: pass", "Bucket"),
        ("def plan(): pass", "plan"),
        ("FORMAT = 1", "FORMAT"),
    ],
)
def test_checker_finds_a_second_thing_of_one_name(source: str, name: str) -> None:
    first = "class Bucket: pass\ndef plan(): pass\ndef _part(): pass\nFORMAT = 2"
    planted = {"sharding/one.py": first, "vfsdp_optim/two.py": f"{source}\ndef _part(): pass"}
    assert named_twice(planted) == [f"{name}: sharding/one.py, vfsdp_optim/two.py"]
    moved = {"sharding/one.py": "", "vfsdp_optim/step/one.py": "", "vfsdp_optim/__init__.py": ""}
    assert named_twice(moved) == ["one.py: sharding/one.py, vfsdp_optim/step/one.py"]


def test_checker_finds_empty_names_and_long_files() -> None:
    assert all(len(check_file(p, "")) == 1 for p in ("sharding/utils.py", "tests/test_helpers.py"))
    assert len(check_file("sharding/report.py", "x = 1\n" * (MAX_LINES + 1))) == 1
    assert check_file("sharding/report.py", "x = 1\n" * MAX_LINES) == []
