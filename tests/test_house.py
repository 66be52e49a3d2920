"""The rules of the house that no other tool checks."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import quire
from quire import errors
from quire.errors import QuireError
from quire.support import torch_private

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "quire"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# The reading order. A module imports only from rows below its own, or from its own package.
# `reference` is what tests compare with: it stands above everything, so nothing may import it.
LAYERS = """
    reference
    cli
    serve
    tools
    engine
    integrations
    __init__
    draw
    distributed
    api
    kv
    linear
    operator
    plans
    backends
    runtime
    autograd
    request
    block_mask
    aux_outputs memory mods
    checks
    codegen
    ir
    config support
    results
    errors
"""
OF_THE_SERVER = {"prometheus_client", "pydantic", "ray", "starlette", "uvicorn"}
ROW = {name: row for row, line in enumerate(LAYERS.split("\n")) for name in line.split()}


# Imports


def module_name(path: Path) -> str:
    """`src/quire/ir/ops.py` is `quire.ir.ops`, `src/quire/ir/__init__.py` is `quire.ir`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


class WithoutTypeChecking(ast.NodeTransformer):
    """Drops what only a type checker reads."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else node


def imported_modules(path: Path, *, at_run_time: bool = False) -> set[str]:
    """The modules of quire that a file names in an import, wherever in the file that stands."""
    named: set[str] = set()
    tree: ast.AST = ast.parse(path.read_text())
    for node in ast.walk(WithoutTypeChecking().visit(tree) if at_run_time else tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import in line {node.lineno}"
            # `from quire import draw` is the module draw; `from quire import attention_mask` is
            # a name out of quire/__init__.py.
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= names & SOURCES.keys() or {node.module or ""}
    return {name for name in named if name.split(".")[0] == "quire"}


def layer(module: str) -> str:
    """`quire.ir.ops` belongs to `ir`, `quire` itself to `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


@pytest.mark.parametrize("module", SOURCES)
def test_imports_only_go_down(module: str) -> None:
    here, targets = layer(module), sorted(imported_modules(SOURCES[module]))
    unknown = {here, *map(layer, targets)} - ROW.keys()
    assert not unknown, f"{unknown}: give it a row in LAYERS, its place in the reading order"
    upward = [each for each in targets if layer(each) != here and ROW[layer(each)] <= ROW[here]]
    assert not upward, f"{module} imports {upward}, which stand beside or above it"


def test_a_backend_imports_nothing_of_another() -> None:
    leaves = ("quire.backends.jit", "quire.backends.eager", "quire.backends.inductor")
    for module, path in SOURCES.items():
        mine = next((leaf for leaf in leaves if module.startswith(leaf)), None)
        others = tuple(leaf for leaf in leaves if leaf != mine)
        found = [each for each in imported_modules(path) if each.startswith(others)]
        assert mine is None or not found, f"{module} imports {found}"


def test_no_module_imports_itself_through_others() -> None:
    graph = {
        module: imported_modules(path, at_run_time=True) - {module}
        for module, path in SOURCES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_reference_stands_on_nothing_it_judges() -> None:
    judged = {
        "plans",
        "api",
        "backends",
        "runtime",
        "codegen",
    }
    assert "quire.reference" in SOURCES
    used = {layer(target) for target in imported_modules(SOURCES["quire.reference"])}
    assert not used & judged


@pytest.mark.parametrize("module", SOURCES)
def test_every_file_begins_by_saying_what_it_is(module: str) -> None:
    assert ast.get_docstring(ast.parse(SOURCES[module].read_text()))


# Names


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in SOURCES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {"Request", "Kernel", "Plan"} <= homes.keys()
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert not twice, f"{twice}: give each a name of its own"


def is_importable(module: str) -> bool:
    """Return whether a module can be imported. Only packages of the server may be missing."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if not module.startswith("quire.serve") or missing.name not in OF_THE_SERVER:
            raise
        return False
    return True


def test_nothing_hides_a_module_of_its_name() -> None:
    """`quire.draw` alone is a function and, in `from quire.draw.pages import ...`, a package."""
    imported = [module for module in SOURCES if is_importable(module)]
    named = (module.rpartition(".") for module in imported if "." in module)
    hidden = {
        f"{package}.{name}"
        for package, _, name in named
        if getattr(sys.modules[package], name) is not sys.modules[f"{package}.{name}"]
    }
    assert hidden == {"quire.draw"}


# Messages

PLAIN = re.compile(
    r"quire\.(api|block_mask|checks|distributed|draw|engine|integrations|ir|kv|mods|serve|tools)\b.*"
)


@pytest.mark.parametrize("module", [*filter(PLAIN.fullmatch, SOURCES)])
def test_messages_have_one_form(module: str) -> None:
    """They say "X must be A, but is B. Do C."; PyTorch's own words may come before."""
    tree = ast.parse(SOURCES[module].read_text())
    kinds = (ast.Raise, ast.JoinedStr)  # an f-string may be raised or warned of elsewhere
    texts = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    other = [text for text in texts if re.search(r"\bexpected\b|, got\b", text)]
    assert not other, f"write 'X must be A, but is B. Do C.': {other}"


# Calls and names

MOST_POSITIONAL = 5


def long_calls(*folders: Path) -> dict[str, list[str]]:
    """Return the calls with too many positional arguments, by the first folder or file below."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            where = path.relative_to(folder)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and num_positional(node) > MOST_POSITIONAL:
                    text = f"{where}:{node.lineno}: {ast.unparse(node)}"
                    found.setdefault(where.parts[0].removesuffix(".py"), []).append(text)
    return found


def num_positional(call: ast.Call) -> int:
    """Return the number of positional arguments. `*(a, b)` counts as two, `*values` as one."""
    starred = (argument.value for argument in call.args if isinstance(argument, ast.Starred))
    spelled = (each.elts for each in starred if isinstance(each, ast.Tuple | ast.List))
    return len(call.args) + sum(len(each) - 1 for each in spelled)


def test_calls_have_few_positional_arguments() -> None:
    call = ast.parse("f(1, *(2, 3), *rest, 4, 5)", mode="eval").body
    assert isinstance(call, ast.Call) and num_positional(call) == 6
    found = long_calls(PACKAGE)
    assert not found, f"name the arguments: {found}"


def test_scripts_have_few_positional_arguments() -> None:
    assert not long_calls(ROOT / "benchmarks", ROOT / "examples")


# PyTorch's private names

PYTHONS_OWN = {"_replace", "_asdict", "_fields", "_getframe", "_exit"}


def is_private(name: str) -> bool:
    """`_C` is private. `__name__` is not, and neither is `_`, the name of unused values."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the private names that a file defines, and all private names that it uses."""
    defined, used = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                defined.add(name)
            case ast.ClassDef(name=name):
                defined.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                used.add(name)
            case ast.Import(names=aliases):
                used.update(part for each in aliases for part in each.name.split("."))
            case ast.ImportFrom(module=module, names=aliases):
                used.update((module or "").split("."), (each.name for each in aliases))
            case ast.Constant(value=str(text)) if re.fullmatch(r"torch(\.\w+)+", text):
                used.update(text.split("."))
    return set(filter(is_private, defined)), set(filter(is_private, used)) - PYTHONS_OWN


def test_private_names_of_torch_have_one_home() -> None:
    found = {module: private_names(ast.parse(SOURCES[module].read_text())) for module in SOURCES}
    home = found.pop("quire.support.torch_private")
    for part in ("tracing", "transforms"):
        found.pop(f"quire.support.torch_private.{part}")
    assert {"_ragged_idx", "_metadata_cache"} <= home[1]  # so it does find them
    ours = set().union(*(defined for defined, _ in found.values()))
    foreign = {module: used - ours for module, (_, used) in found.items() if used - ours}
    assert not foreign, f"{foreign}: give each a function in torch_private.py"


# Shapes

PUBLIC = """
    quire quire.kv quire.mods quire.block_mask quire.draw quire.integrations.transformers
"""
HOLDS_NUMBERS = re.compile(r"\b(Tensor|Integers|Tokens|Pages|NDArray)\b")
POSITIONS = {"score", "b", "h", "q_idx", "kv_idx", "batch", "head", "token_q", "token_kv"}


def public_functions() -> dict[str, tuple[Callable[..., object], str]]:
    """Return the public functions and methods by name, each with its docstring.

    The docstring of a class is also read for its methods.
    """
    found = {}
    for module in map(importlib.import_module, PUBLIC.split()):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                found[f"{module.__name__}.{name}"] = (value, value.__doc__ or "")
            ours = [each for each in getattr(value, "__mro__", ()) if "quire" in each.__module__]
            for method in {method for owner in ours for method in vars(owner)}:
                function = getattr(value, method)
                public = method in ("__init__", "__call__") or not method.startswith("_")
                if public and (inspect.isfunction(function) or inspect.ismethod(function)):
                    text = f"{value.__doc__}\n{function.__doc__}"
                    found[f"{module.__name__}.{name}.{method}"] = (function, text)
    return found


def has_shape(parameter: str, docstring: str) -> bool:
    """Return whether a sentence has the parameter and its shape, or says that it is unused.

    Such as: "`key` [B, H, L, D]", "`grad_out` and `grad_lse` have the same shapes".
    """
    families = [parameter[: part.end()] + r"\*" for part in re.finditer("_", parameter)]
    names = "|".join([re.escape(parameter), *families])  # `full_kv_*` is one of the families
    return bool(re.search(rf"(?<!\w)({names})(?!\w)[^.]*?(\[|same\s+shape|unused)", docstring))


def test_docstrings_have_the_shape_of_each_tensor() -> None:
    missing, seen = {}, 0
    for name, (function, docstring) in public_functions().items():
        parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
        tensors = {each.name for each in parameters if HOLDS_NUMBERS.search(str(each.annotation))}
        seen += len(tensors)
        without = [each for each in tensors - POSITIONS if not has_shape(each, docstring)]
        missing |= {name: without} if without else {}
    assert seen > 100
    assert not missing, f"write their shapes, as in `query` [B, Hq, L, D]: {missing}"


# Words

# Written so that this file does not contain what it looks for.
FORBIDDEN = re.compile(
    r"\b[a]gents?\b|(?<!scope=.)\b[s]essions?\b|[/]work/|[/]root/|[/]opt/|\b[i]ssue \d|[#]\d+ of\b"
    r"|\b[p]ypi\.|[p]ythonhosted\.|[d]ownload\.pytorch\.",
    re.IGNORECASE,
)
GENERATED = re.compile(
    r"\.git|\.venv|\.aarch64|\..*_cache|\.hypothesis|__pycache__|build|dist|.*\.egg-info"
)


def texts() -> dict[str, str]:
    """The content of every text file of the repository by its path."""
    found = {}
    for path in sorted(ROOT.rglob("*")):
        relative = path.relative_to(ROOT)
        if path.is_file() and not any(map(GENERATED.fullmatch, relative.parts)):
            try:
                found[str(relative)] = path.read_text()
            except UnicodeDecodeError:
                continue  # a picture
    return found


def test_the_repository_speaks_of_itself_alone() -> None:
    content = texts()
    assert {"pyproject.toml", "Makefile", ".ci/run", "src/quire/errors.py"} <= content.keys()
    hits = [
        f"{path}:{number}: {line.strip()}"
        for path, text in content.items()
        for number, line in enumerate(text.splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert not hits, "\n".join(hits)


# Versions


def test_one_version() -> None:
    assert quire.__version__ == PYPROJECT["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (\S+)", changelog, re.MULTILINE)
    assert quire.__version__ in sections and len(set(sections)) == len(sections), sections
    others = [path for path in (ROOT / "CITATION.cff", ROOT / "docs" / "conf.py") if path.exists()]
    assert not any(f'"{quire.__version__}"' in path.read_text() for path in others)
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text()


def test_every_dependency_is_pinned_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"  # no local part: any build of it will do
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *PYPROJECT["build-system"]["requires"]]
    wanted += [each for extra in project["optional-dependencies"].values() for each in extra]
    missing = {re.split(r"[<>=~!\[; ]", each)[0] for each in wanted} - pins.keys()
    assert not missing


def test_the_matrix_has_every_python_and_torch_that_is_promised() -> None:
    project = PYPROJECT["project"]
    (torch_range,) = (each for each in project["dependencies"] if each.startswith("torch"))
    first, end = map(int, re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch_range).groups())  # type: ignore[union-attr]
    torches = {f"2.{minor}" for minor in range(first, end)}
    pythons = set(re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"])))
    assert project["requires-python"] == ">=" + min(pythons, key=lambda each: int(each[2:]))
    rows = re.findall(
        r"^ +- \{system: (\S+), python: \"(.+)\", torch: \"(.+)\"\}",
        (ROOT / ".github" / "workflows" / "matrix.yml").read_text(),
        re.MULTILINE,
    )
    for system in {system for system, _, _ in rows}:
        assert {torch for where, _, torch in rows if where == system} == torches, system
    assert {python for _, python, _ in rows} == pythons
    for version in torches:
        assert version in torch_private.TESTED


# The tree of exceptions


def drawn_tree() -> dict[str, tuple[str | None, list[str]]]:
    """Name -> (parent, other bases) as the docstring of errors.py draws it.

    QuireError
    ├── BlockMaskError       what it means       RuntimeError, ValueError
    │   └── SlicedMaskError  what it means       (as above)
    """
    tree: dict[str, tuple[str | None, list[str]]] = {}
    path: list[str] = []
    drawing = errors.__doc__.split("\n\n")[1]  # type: ignore[union-attr]
    for line in inspect.cleandoc(drawing).splitlines():
        match = re.fullmatch(r"([│├└─ ]*)(\w+)(?:\s{2,}(.+?))?(?:\s{2,}(.+))?", line)
        assert match, f"cannot read {line!r}"
        indent, name, _meaning, bases = match.groups()
        path[len(indent) // 4 :] = [name]
        parent = path[-2] if len(path) > 1 else None
        tree[name] = (parent, re.findall(r"\w+Error", bases or ""))
    return tree


def real_tree() -> dict[str, tuple[str | None, list[str]]]:
    tree: dict[str, tuple[str | None, list[str]]] = {}
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, QuireError):
            ours = [base.__name__ for base in kind.__bases__ if issubclass(base, QuireError)]
            assert len(ours) == (kind is not QuireError), f"{name} has no one place in the tree"
            others = [base.__name__ for base in kind.__bases__ if base.__name__ not in ours]
            tree[name] = (ours[0], others) if ours else (None, [])
    return tree


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    assert drawn_tree() == real_tree()
    assert list(drawn_tree()) == list(real_tree()), "the classes stand in another order"
