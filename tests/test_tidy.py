"""House rules that a machine can check: who may import whom, how long things may be, nothing left undone."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("services", "kvmanager", "gpu_runner", "kernels")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ALL = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
TEXTS = [
    *ALL,
    *sorted((ROOT / "docs").rglob("*.md")),
    *(
        ROOT / name
        for name in (
            "README.md",
            "ARCHITECTURE.md",
            "Makefile",
            "Dockerfile",
            "compose.yaml",
            "pyproject.toml",
        )
    ),
]

MAX_LINE, MAX_FILE, MAX_FUNCTION = 110, 400, 70

# The import map. What a package may import of the others; itself it may import, of course.
MAY_IMPORT = {
    "services": {f"kvmanager.{name}" for name in ("protocol", "errors", "client", "settings")},
    "kvmanager": set[str](),
    "gpu_runner": {"kernels"}
    | {f"kvmanager.{name}" for name in ("protocol", "errors", "client", "settings", "pool_directory")},
    "kernels": set[str](),
}
NEVER = {
    "services": {"torch", "numba", "triton", "transformers"},
    "kvmanager": {"torch", "numba", "triton", "transformers", "starlette", "uvicorn"},
    "gpu_runner": {"transformers", "starlette", "uvicorn"},
    "kernels": {"transformers", "zmq", "msgspec", "asyncio"},
}
SHELL = {
    "server",
    "client",
    "event_publisher",
    "pool_directory",
    "pool_tool",
    "records",
    "liveness",
    "memory",
    "tier_file",
    "pin_file",
    "disk_tier",
    "paths",
    "stop_signals",
    "settings",
    "config",
    "__main__",
}
"""The manager's modules that do I/O; all others are its core."""
NOT_IN_CORE = {
    "asyncio",
    "time",
    "random",
    "os",
    "logging",
    "socket",
    "threading",
    "subprocess",
    "pathlib",
    "secrets",
}


def named(paths: list[Path]) -> list[object]:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of all modules imported anywhere in a file, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, modules: set[str]) -> bool:
    """Whether `name` is one of `modules` or lies in it."""
    return any(name == module or name.startswith(module + ".") for module in modules)


@pytest.mark.parametrize("path", named(SOURCES))
def test_imports_follow_the_map(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    names = set(imports(ast.parse(path.read_text())))
    ours = {name for name in names if name.split(".")[0] in PACKAGES and name.split(".")[0] != package}
    assert {name for name in ours if not within(name, MAY_IMPORT[package])} == set()
    assert {name for name in names if within(name, NEVER[package])} == set()
    assert {name for name in names if name.split(".")[0] == "tests"} == set()


def core() -> list[Path]:
    return [path for path in sorted((ROOT / "kvmanager").rglob("*.py")) if path.stem not in SHELL]


@pytest.mark.parametrize("path", named(core()))
def test_the_managers_core_does_no_io(path: Path) -> None:
    """Standard library and msgspec only, no clock, no randomness, and none of the shell's modules."""
    names = set(imports(ast.parse(path.read_text())))
    outside = {
        name for name in names if name.split(".")[0] not in {*sys.stdlib_module_names, "msgspec", "kvmanager"}
    }
    assert outside == set()
    assert {name for name in names if name.split(".")[0] in NOT_IN_CORE} == set()
    assert {name for name in names if within(name, {f"kvmanager.{module}" for module in SHELL})} == set()


def test_the_map_itself_is_checked() -> None:
    """The checks see an import in a function, and do not take a longer name for a shorter one."""
    assert set(imports(ast.parse("def f():\n    from kvmanager import core\n    import torch.nn"))) == {
        "kvmanager.core",
        "torch.nn",
    }
    assert within("kvmanager.protocol.Hello", MAY_IMPORT["services"])
    assert not within("kvmanager.protocols", MAY_IMPORT["services"])
    assert not within("kvmanager", MAY_IMPORT["services"])


def test_kernels_can_be_probed_without_loading_anything() -> None:
    """Other libraries look for a package of this name: its top level must stay empty."""
    assert list(imports(ast.parse((ROOT / "kernels/__init__.py").read_text()))) == []


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


@pytest.mark.parametrize("path", named(ALL))
def test_sizes(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= MAX_FILE
    assert [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE] == []
    assert {f.name: length(f) for f in functions(ast.parse(text)) if length(f) > MAX_FUNCTION} == {}


def test_functions_are_short_on_the_whole() -> None:
    lengths = sorted(length(f) for path in SOURCES for f in functions(ast.parse(path.read_text())))
    assert lengths[len(lengths) // 2] < 10


def is_stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A body of `pass`, `...` or a docstring alone (subclasses' duties raise NotImplementedError)."""
    constants = (node for node in function.body if isinstance(node, ast.Expr))
    empty = {node for node in constants if isinstance(node.value, ast.Constant)}
    return all(isinstance(node, ast.Pass) for node in function.body if node not in empty)


def in_protocols(tree: ast.AST) -> set[ast.AST]:
    """The methods of typing.Protocol classes: those have no body by design."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    protocols = [node for node in classes if any("Protocol" in ast.unparse(base) for base in node.bases)]
    return {child for node in protocols for child in ast.walk(node)}


@pytest.mark.parametrize("path", named(SOURCES))
def test_nothing_is_a_stub(path: Path) -> None:
    tree = ast.parse(path.read_text())
    exempt = in_protocols(tree)
    assert [f.name for f in functions(tree) if f not in exempt and is_stub(f)] == []


@pytest.mark.parametrize("path", named(SOURCES))
def test_modules_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or path == ROOT / "kernels/__init__.py", "no docstring at the top"


# Written with a class around one letter each, so that this file itself passes.
FORBIDDEN = re.compile(r"TO[D]O|FIX[M]E|XX[X]|HAC[K]\b|/wor[k]/|pyp[i]\.org|@pytest\.mark\.ski[p]")


@pytest.mark.parametrize("path", named(TEXTS))
def test_nothing_is_left_to_do(path: Path) -> None:
    found = [line for line in path.read_text().splitlines() if FORBIDDEN.search(line)]
    assert found == []
