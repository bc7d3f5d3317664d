"""The reference pages that come from the code: every command with its options, and the Python API.

`docs/site/stage.py` writes them into the site; they are not kept in the repository, so they cannot be out of date.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import typer

MODULES = {
    "fulcrum": "What most programs need.",
    "fulcrum.data": "Data sets, tables, partitions and samples ([own data](../own-data.md)).",
    "fulcrum.data.tasks": "What is predicted, and how it is scored ([own data](../own-data.md)).",
    "fulcrum.clipping": "Clipping rules ([own rule](../own-rule.md)).",
    "fulcrum.gradients": "Per-example gradients ([own layer](../own-layer.md)).",
    "fulcrum.integrations": "Private training loops ([own loop](../own-loop.md)).",
    "fulcrum.integrations.parts": "Every part alone; `from fulcrum import parts` is shorter ([parts](../parts.md)).",
    "fulcrum.errors": "Every error that Fulcrum raises on purpose ([errors](../errors.md)).",
}


def make_command_pages() -> dict[str, str]:
    """One page per command, and an index, by file name."""
    from fulcrum.cli import app

    root: Any = typer.main.get_command(app)
    pages = {f"{'-'.join(path)}.md": make_command_page(path, command) for path, command in walk_commands(root, ())}
    lines = [
        "# Commands",
        "",
        "Generated from the command line's own words.",
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    for path, command in walk_commands(root, ()):
        words = get_summary(command)
        lines.append(f"| [`fulcrum {' '.join(path)}`]({'-'.join(path)}.md) | {escape_cell(words)} |")
    return {"index.md": "\n".join(lines) + "\n", **pages}


def walk_commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The commands below one, with their paths; groups come before what they hold."""
    if path:
        yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from walk_commands(inner, (*path, name))


def make_command_page(path: tuple[str, ...], command: Any) -> str:
    """The page of one command: usage, what it does, its arguments and options."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join(
        ["fulcrum", *path, *(["[OPTIONS]"] if options else []), *(get_metavar(argument) for argument in arguments)]
    )
    lines = [f"# fulcrum {' '.join(path)}", "", dedent_help(command.help or ""), "", "```text", usage, "```", ""]
    inner = [(name, each) for name, each in getattr(command, "commands", {}).items() if not each.hidden]
    if inner:
        lines += ["| command | what it does |", "|---|---|"]
        lines += [
            f"| [`{name}`]({'-'.join((*path, name))}.md) | {escape_cell(get_summary(each))} |" for name, each in inner
        ]
        lines.append("")
    if arguments:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{get_metavar(each)}` | {escape_cell(getattr(each, 'help', '') or '')} |" for each in arguments]
        lines.append("")
    if options:
        lines += ["| option | default | meaning |", "|---|---|---|"]
        lines += [make_option_row(each) for each in options]
        lines.append("")
    return "\n".join(lines)


def make_option_row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f" {get_value_word(option)}"
    default = option.default
    shown = "" if default in (None, False, "", (), []) or callable(default) else f"`{default}`"
    shown = "" if "Sentinel" in shown else shown
    return f"| {names}{value} | {shown} | {escape_cell(option.help or '')} |"


def get_value_word(option: Any) -> str:
    """What stands for the value: the option's own word, else its kind."""
    annotation = str(getattr(getattr(option, "type_descriptor", None), "annotation", ""))
    kinds = {"Path": "PATH", "float": "NUMBER", "int": "NUMBER"}
    kind = next((word for name, word in kinds.items() if name in annotation), "TEXT")
    return escape_cell(str(option.metavar or kind))


def get_metavar(argument: Any) -> str:
    word = argument.metavar or argument.name.upper()
    return word if argument.required else f"[{word}]"


def get_summary(command: Any) -> str:
    return dedent_help(command.help or "").split("\n\n")[0].replace("\n", " ")


def dedent_help(words: str) -> str:
    return inspect.cleandoc(words.replace("\b", ""))


def escape_cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|").replace("<", "&lt;")


def make_api_pages() -> dict[str, str]:
    """One page per public module, and an index, by file name."""
    lines = [
        "# Python API",
        "",
        "Generated from the docstrings of what the modules offer.",
        "",
        "| module | what it holds |",
    ]
    lines += ["|---|---|", *(f"| [`{name}`]({name}.md) | {words} |" for name, words in MODULES.items())]
    return {"index.md": "\n".join(lines) + "\n", **{f"{name}.md": make_module_page(name) for name in MODULES}}


def make_module_page(name: str) -> str:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [
        key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == name
    ]
    parts = [f"# {name}", "", MODULES[name], ""]
    for each in names:
        if not each.startswith("__"):
            parts += [*describe_object(each, getattr(module, each)), ""]
    return "\n".join(parts)


def describe_object(name: str, value: Any) -> Iterator[str]:
    """A name with its signature, its words, and, of a class, its fields and methods."""
    yield f"## {name}"
    yield ""
    if not callable(value):
        yield f"A value of type `{type(value).__name__}`."
        if hasattr(value, "names"):
            names = value.names() if callable(value.names) else value.names
            yield f"Names: {', '.join(f'`{each}`' for each in names)}."
        return
    yield "```python"
    yield wrap_signature(show_signature(name, value))
    yield "```"
    yield ""
    yield from format_docstring(inspect.getdoc(value) or "")
    if not inspect.isclass(value):
        return
    if dataclasses.is_dataclass(value) and dataclasses.fields(value):
        yield ""
        yield "| field | type | default |"
        yield "|---|---|---|"
        for field in dataclasses.fields(value):
            kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
            default = "" if field.default is dataclasses.MISSING else f"`{str(field.default)[:60]}`"
            yield f"| `{field.name}` | `{' '.join(kind.split())}` | {' '.join(default.split())} |"
    for key, inner in vars(value).items():
        if key.startswith("_") or not (inspect.isfunction(inner) or isinstance(inner, property | classmethod)):
            continue
        plain: Any = inner.fget if isinstance(inner, property) else getattr(inner, "__func__", inner)
        words = inspect.getdoc(plain)
        if words:
            yield ""
            yield f"**`{key if isinstance(inner, property) else show_signature(key, plain)}`**"
            yield ""
            yield from format_docstring(words)


def show_signature(name: str, value: Any) -> str:
    """name(parameters) -> result, without quotes around types and without long defaults."""
    try:
        words = f"{name}{inspect.signature(value)}"
    except (TypeError, ValueError):
        return name
    words = re.sub(r"'([^']*)'", r"\1", words)
    words = re.sub(r"<factory>|<object object at [^>]*>|<[^<>]*\bat 0x[^<>]*>", "...", words)
    return words if len(words) < 900 else f"{name}(...)"


def wrap_signature(words: str, width: int = 84) -> str:
    """A long signature with one parameter per line."""
    start, end = words.find("("), words.rfind(")")
    if len(words) <= width or start < 0:
        return words
    depth, parts = 0, [""]
    for letter in words[start + 1 : end]:
        depth += letter in "([{"
        depth -= letter in ")]}"
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    inside = "".join(f"    {part.strip()},\n" for part in parts)
    return f"{words[: start + 1]}\n{inside}{words[end:]}"


def format_docstring(words: str) -> Iterator[str]:
    """A docstring as Markdown: indented lines become code, the rest stays."""
    block: list[str] = []
    for line in [*words.splitlines(), ""]:
        indented = line.startswith("    ")
        if indented or (block and not line.strip()):
            block.append(line)
            continue
        if block:
            yield from ("", "```text", textwrap.dedent("\n".join(block)).strip("\n"), "```", "")
            block = []
        yield line.replace("<", "&lt;") if "`" not in line else line
    if block:
        yield from ("", "```text", textwrap.dedent("\n".join(block)).strip("\n"), "```")
