"""A failing program as a script that fails without hypothesis. Pure text."""

import base64
import dataclasses
import functools
import importlib
import inspect
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

from vfsdp_optim.testing.programs import Program

try:
    import cloudpickle
except ImportError:  # an extra of the package
    cloudpickle = None

MAX_LINES = 30
_WIDTH = 96


def script(make_optimizer: Any, program: Program, why: str) -> str:
    """Return a script of at most `MAX_LINES` lines that runs `program` and fails.

    Args:
        make_optimizer: written as an import where it can be imported, else as its pickle.
        program: written out.
        why: the first line of the failure.
    """
    imports, expression = _expression(make_optimizer)
    names = sorted({type(instruction).__name__ for instruction in program.instructions})
    head = [
        f'"""{textwrap.shorten(why, _WIDTH)}"""',
        *imports,
        "from vfsdp_optim.testing import assert_program_is_exact",
        f"from vfsdp_optim.testing.programs import {', '.join(['Program', *names])}",
    ]
    if "RaggedShard(" in repr(program):
        head.append("from sharding import RaggedShard")
    tail = [
        "",
        f"make_optimizer = {expression}",
        "assert_program_is_exact(make_optimizer, program)",
    ]
    room = MAX_LINES - len(head) - len(tail) - 1
    return "\n".join([*head, "", *_wrapped(f"program = {_code(program)}", room), *tail])


def _code(value: Any) -> str:
    """Return an expression for a program, without the arguments that have their defaults."""
    if isinstance(value, tuple):
        items = ", ".join(_code(item) for item in value)
        return f"({items},)" if len(value) == 1 else f"({items})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = [
        f"{field.name}={_code(getattr(value, field.name))}"
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(given)})"


def _wrapped(code: str, lines: int) -> list[str]:
    """Return an expression in brackets on at most so many lines; breaks at spaces."""
    width = _WIDTH
    while True:
        wrapped = textwrap.wrap(
            code, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        if len(wrapped) <= lines:
            return wrapped
        width += 40


def _expression(make_optimizer: Any) -> tuple[list[str], str]:
    """Return import lines and an expression whose value is the function."""
    if isinstance(make_optimizer, functools.partial):
        given = [repr(x) for x in make_optimizer.args]
        given += [f"{key}={value!r}" for key, value in make_optimizer.keywords.items()]
        if all(_is_literal(x) for x in (*make_optimizer.args, *make_optimizer.keywords.values())):
            imports, name = _expression(make_optimizer.func)
            arguments = ", ".join([name, *given])
            return ["import functools", *imports], f"functools.partial({arguments})"
    module, name = _importable(make_optimizer)
    if module:
        paths = [] if _is_installed(module) else _search_paths()
        return [*_searching(paths), f"from {module} import {name}"], name
    if cloudpickle is None:
        return [], "...  # the function that failed"
    data = base64.b85encode(cloudpickle.dumps(make_optimizer)).decode()
    # What it uses of modules is pickled by their names.
    imports = ["import base64, pickle", *_searching(_search_paths())]
    return imports, f"pickle.loads(base64.b85decode({data!r}))"


def _importable(item: Any) -> tuple[str, str]:
    """Return the module and the name of a function or class; empty if it has none."""
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return "", ""
    if getattr(sys.modules.get(str(module)), name, None) is not item:
        return "", ""
    return str(module), name


def _is_installed(module: str) -> bool:
    file = inspect.getsourcefile(importlib.import_module(module))
    return file is None or file.startswith((sys.prefix, sys.base_prefix))


def _search_paths() -> list[str]:
    """Return the directories that this process searches and another may not."""
    return [
        path
        for path in dict.fromkeys(path or os.getcwd() for path in sys.path)
        if not path.startswith((sys.prefix, sys.base_prefix)) and Path(path).is_dir()
    ]


def _searching(paths: list[str]) -> list[str]:
    return ["import sys", f"sys.path[:0] = {paths!r}"] if paths else []


def _is_literal(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_literal(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
