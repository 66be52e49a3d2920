"""Pages of the reference: one for every public name, one for every module, and their index."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from builder import errors_page, results, source
from builder.symbols import TORCH, Symbol, public_modules, related, same_thing, symbols

WIDTH = 88
"""The longest signature in one line."""


def pages() -> dict[str, str]:
    """Return the text of every page by its path, without .md."""
    found = {symbol.page: symbol_page(symbol) for symbol in symbols().values()}
    found |= {f"modules/{name}": module_page(name) for name in source.modules()}
    found |= {"index": index_page(), "modules/index": modules_index()}
    found[errors_page.NAME] = errors_page.page()
    return {f"reference/{name}": text for name, text in found.items()}


# Texts


def markdown(doc: str) -> str:
    """Return a docstring as Markdown: what is indented, or begins with >>>, is shown as code."""
    blocks, out = re.split(r"\n\s*\n", inspect.cleandoc(doc)), []
    for block in blocks:
        parts = re.split(r"(?m)^(?=(?: {4}|>>> ))", block, maxsplit=1)
        prose = "" if len(parts) > 1 and not parts[0].strip() else parts[0]
        if prose:
            out.append(prose.rstrip())
        if len(parts) > 1:
            code, after = _code_and_after(parts[1])
            if out and out[-1].startswith("```") and not prose:
                out[-1] = out[-1].removesuffix("```") + f"\n{code}\n```"
            else:
                out.append(f"```{_language(code)}\n{code}\n```")
            out += [after] if after else []
    return "\n\n".join(out)


def _code_and_after(block: str) -> tuple[str, str]:
    lines = block.splitlines()
    if lines[0].startswith(">>>"):
        return block.rstrip(), ""
    end = next((i for i, line in enumerate(lines) if not line.startswith("    ")), len(lines))
    return textwrap.dedent("\n".join(lines[:end])), "\n".join(lines[end:]).strip()


def _language(code: str) -> str:
    if code.startswith(">>>"):
        return "pycon"
    try:
        compile(code, "", "exec")
    except SyntaxError:
        return "text"
    return "text" if re.fullmatch(r"[\d\s.\-]+", code) else "python"


def shapes(doc: str) -> dict[str, str]:
    """Return the shape of each name that a docstring gives one: `key` [B, Hkv, S, D]."""
    found: dict[str, str] = {}
    text = " ".join(doc.split())
    for names, shape in re.findall(
        r"((?:`?\w+`?,? (?:and )?)*`?\w+`?)(?: is| are| as a tensor)? (\[[^\]]*\])", text
    ):
        if not re.fullmatch(r"\[[\w\s,.+*\-]*\]", shape):
            continue
        for name in re.findall(r"`(\w+)`", names) or re.findall(r"\w+$", names):
            found.setdefault(name, shape)
    return found


def signature(name: str, value: Any, doc: str = "") -> str:
    """Return a signature with one parameter in a line, and the shapes of tensors."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    known = shapes(doc)
    lines, star = [], False
    for each in found.parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            star = True
            lines.append("    *,")
        star = star or each.kind is each.VAR_POSITIONAL
        text = _without_quotes(str(each))
        shape = f"  # {known[each.name]}" if each.name in known else ""
        lines.append(f"    {text},{shape}")
    result = found.return_annotation
    gives = "" if result is found.empty else f" -> {_annotation(result)}"
    short = f"{name}({' '.join(line.strip() for line in lines).rstrip(',')}){gives}"
    if len(short) <= WIDTH and "#" not in short:
        return short
    return "\n".join([f"{name}(", *lines, f"){gives}"])


def _annotation(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


def _without_quotes(text: str) -> str:
    text = re.sub(r"ForwardRef\('([^']*)'(?:, [^)]*)?\)", r"\1", text)
    text = re.sub(r": '([^']*)'", r": \1", text)
    return re.sub(r"<(?:function|class|Mask) ([\w.']+)[^>]*>", r"\1", text)


# One name


def symbol_page(symbol: Symbol) -> str:
    """Return the page of a public name."""
    parts = [
        f"# {symbol.name}",
        f"[Reference](index.md) · [{symbol.home}](modules/{symbol.home}.md)",
        directive(_kind(symbol), symbol.name),
        f"```python\n{_head(symbol)}\n```",
        markdown(symbol.doc),
        f"## Example\n\n```python\n{symbol.example}```",
        *_methods(symbol),
        _design(symbol),
        _performance(symbol),
        _safety(symbol),
        _related(symbol),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def directive(kind: str, name: str) -> str:
    """Return what puts a name into the index of names and into the search."""
    return f"```{{py:{kind}}} {name}\n:no-typesetting:\n```"


def _kind(symbol: Symbol) -> str:
    return "class" if symbol.is_class else "function" if callable(symbol.value) else "data"


def _head(symbol: Symbol) -> str:
    if inspect.isclass(symbol.value) and issubclass(symbol.value, Exception):
        return f"class {symbol.short}({', '.join(b.__name__ for b in symbol.value.__bases__)})"
    if inspect.isfunction(symbol.value) or symbol.is_class or callable(symbol.value):
        if symbol.home and symbol.short in source.modules()[symbol.home].stated:
            return f"{symbol.short} = {_alias(symbol.value)}"
        return signature(symbol.short, symbol.value, symbol.doc)
    return f"{symbol.short} = {_alias(symbol.value)}"


def _alias(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    text = re.sub(r"\b(collections\.abc|typing|torch)\.", "", text)
    return repr(text) if isinstance(value, str) else text


def _methods(symbol: Symbol) -> list[str]:
    """Return a section for each public method and property that quire defines."""
    if not symbol.is_class or symbol.home is None:
        return []
    found: dict[str, str] = {}
    for owner in symbol.value.__mro__:
        if not owner.__module__.startswith("quire") or issubclass(owner, Exception):
            continue
        for name, value in vars(owner).items():
            text = inspect.getdoc(getattr(symbol.value, name, None)) or ""
            if name in found or name.startswith("_") or not text:
                continue
            call = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if inspect.isfunction(call):
                kind, head = "method", signature(name, call, f"{symbol.doc}\n{text}")
            elif isinstance(value, property):
                kind, head = "property", name
            else:
                continue
            entry = directive(kind, f"{symbol.name}.{name}")
            found[name] = f"### {name}\n\n{entry}\n\n```python\n{head}\n```\n\n{markdown(text)}"
    return ["## Methods", *found.values()] if found else []


def _design(symbol: Symbol) -> str:
    if symbol.home is None:
        return ""
    below = [name for name in source.stands_on(symbol.home) if name != "quire"]
    lines = [f"It is defined in {module_link(symbol.home)}."]
    if below:
        lines.append(f"That module stands on {', '.join(map(module_link, below))}.")
    if other := same_thing(symbol):
        lines.append(f"It is also known as {', '.join(f'`{each.name}`' for each in other)}.")
    if replaced := TORCH.get(symbol.name) or next(
        (TORCH[each.name] for each in other if each.name in TORCH), None
    ):
        lines.append(f"In PyTorch: `{replaced}`.")
    return "## Design\n\n" + "\n".join(lines)


UNMEASURED = "No figure that is kept measures it by itself. [All figures](../figures.md)."


def module_link(name: str) -> str:
    """Return a link to the page of a module, from a page of a name."""
    return f"[`{name}`](modules/{name}.md)"


def _performance(symbol: Symbol) -> str:
    rows = results.rows_about(symbol.home, symbol.short)
    if not rows:
        return f"## Performance\n\n{UNMEASURED}"
    lines = [
        f"| {row['case']} | {row['figure']:.3g} {row['unit']} | {part.label} | `{part.command}` |"
        for part, row in rows
    ]
    head = "| case | figure | processor | command |\n|---|---|---|---|"
    intro = f"Some figures of benchmarks that use it. The rest of the rows: {rest(rows)}."
    return f"## Performance\n\n{intro}\n\n{head}\n" + "\n".join(lines)


def rest(rows: list[tuple[results.Part, dict[str, Any]]]) -> str:
    """Return links to all rows of the parts that some rows are of, on the page of figures."""
    parts = dict.fromkeys((part.title, part.anchor) for part, _ in rows)
    return ", ".join(f"[{title}](../figures.md#{anchor})" for title, anchor in parts)


def _safety(symbol: Symbol) -> str:
    errors = [each for each in errors_page.raised_by(symbol) if each.meaning]
    if symbol.home == "quire.errors":
        return f"## The tree of errors\n\n{errors_page.tree()}"
    if not errors:
        return "## Safety\n\nNeither it nor what it calls raises an error of quire."
    lines = [
        f"| {errors_page.link(each.name)} | {each.meaning} | "
        f"{each.bases.replace('(as above)', '')} |"
        for each in errors
    ]
    return (
        "## Safety\n\nErrors that it, or what it calls, can raise. Each is a "
        "[QuireError](quire.QuireError-class.md) and also derives from the built-in types named "
        "here. A refused call changes nothing.\n\n| error | when | also a |\n|---|---|---|\n"
        + "\n".join(lines)
    )


def _related(symbol: Symbol) -> str:
    found = related(symbol)
    if not found:
        return ""
    return "## Related\n\n" + ", ".join(f"[`{each.name}`]({each.page}.md)" for each in found)


# Modules


def module_page(name: str) -> str:
    """Return the page of a module: what it is, what it defines, what it stands on, who uses it."""
    module = source.modules()[name]
    public = [each for each in symbols().values() if name in (each.home, each.module)]
    parts = [f"# {name}", f"`{module.path.relative_to(source.ROOT)}`", markdown(module.doc)]
    if public:
        links = ", ".join(f"[`{each.name}`](../{each.page}.md)" for each in public)
        parts.append(f"Public names: {links}.")
    if definitions := list(_definitions(module)):
        parts.append(
            "## What it defines\n\n| name | what it is |\n|---|---|\n" + "\n".join(definitions)
        )
    for title, names in (
        ("What it stands on", source.stands_on(name)),
        ("Who uses it", source.used_by(name)),
    ):
        if names:
            parts.append(f"## {title}\n\n" + ", ".join(f"[`{each}`]({each}.md)" for each in names))
    return "\n\n".join(parts) + "\n"


def _definitions(module: source.Module) -> Iterator[str]:
    for name, node in module.definitions.items():
        text = (ast.get_docstring(node) or "").split("\n\n")[0]
        if not name.startswith("_") and text:
            yield f"| `{name}` | {_cell(text)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def modules_index() -> str:
    """Return the list of all modules."""
    lines = [
        f"| [`{name}`]({name}.md) | {_cell(module.doc.split(chr(10) * 2)[0])} |"
        for name, module in source.modules().items()
    ]
    return "# All modules\n\n| module | what it is |\n|---|---|\n" + "\n".join(lines) + "\n"


def index_page() -> str:
    """Return the start page of the reference: all public names by module."""
    parts = [
        "# Reference",
        "Every public name has a page: its signature with the shapes of tensors, an example that "
        "tests run, where it is defined, how fast it is, what it raises, and which name of PyTorch "
        "it takes the place of. The {ref}`index <genindex>` lists all names; "
        "[all modules](modules/index.md) are described, too.",
    ]
    for module, content in public_modules().items():
        own = [each for each in symbols().values() if each.module == module]
        first = " ".join((content.__doc__ or "").split("\n\n")[0].split())
        rows = "\n".join(
            f"| [`{each.short}`]({each.page}.md) | {_cell(each.summary)} |" for each in own
        )
        table = f"| name | what it is |\n|---|---|\n{rows}"
        parts.append(f"## {module}\n\n[{first}](modules/{content.__name__}.md)\n\n{table}")
    parts.append(
        f"## quire.errors\n\n[All errors]({errors_page.NAME}.md), and when each is raised."
    )
    return "\n\n".join(parts) + "\n"
