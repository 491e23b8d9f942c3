"""Docstrings and signatures as the site shows them.

A line that opens with a name in quotes and a colon says what that name means: it becomes an
entry of a list. Examples become code blocks. The shapes of jaxtyping keep their quotes, which
Griffe would take for those of a forward reference, and a module's aliases of them are written out.
"""

import ast
import copy
import re

import griffe

ENTRY = re.compile(r'[`"][^`"]+[`"](, `[^`]+`)*( \([^)]*\))?: ')
SECTION = re.compile(
    r"^(Args|Example|Raises|Returns):\n((?: {4}.*(?:\n|$)|\n(?= {4}))+)", re.MULTILINE
)
NAMED = re.compile(r"^(\w+): ", re.MULTILINE)
TYPED = {"Bool", "Float", "Int", "Key", "Shaped"}


class Entries(griffe.Extension):
    """Makes Markdown of every docstring."""

    def on_module_node(self, *, node, agent, **_):
        shapes = {
            part.target.id: part.value
            for part in node.body
            if isinstance(part, ast.AnnAssign) and _is_shape(part.value)
        }
        for part in ast.walk(node):
            if isinstance(part, ast.arg) and getattr(part.annotation, "id", "") in shapes:
                part.annotation = copy.deepcopy(shapes[part.annotation.id])
        for part in ast.walk(node):
            if _is_shape(part):
                for word in ast.walk(part.slice):
                    if isinstance(word, ast.Constant) and isinstance(word.value, str):
                        word.value = repr(word.value.strip())

    def on_object(self, *, obj, loader, **_):
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def _is_shape(node) -> bool:
    """Whether a node of the syntax tree is an array type of jaxtyping."""
    return isinstance(node, ast.Subscript) and getattr(node.value, "id", "") in TYPED


def to_markdown(text: str) -> str:
    """Entries and examples of a docstring as lists and code blocks.

    >>> print(to_markdown("Adds.\\n`a`: one,\\nor two."))
    Adds.
    <BLANKLINE>
    - `a`: one,
      or two.
    """
    text = SECTION.sub(_unindented, text)
    lines: list[str] = []
    listed = shown = False
    for line in text.splitlines():
        if shown and not line.strip():
            lines.append("```")
            shown = False
        if line.startswith(">>> ") and not shown:
            lines += [""] * bool(lines and lines[-1]) + ["```pycon"]
            shown, listed = True, False
        if not shown:
            if ENTRY.match(line):
                lines += [""] * bool(not listed and lines and lines[-1])
                listed, line = True, f"- {line}"
            elif listed and line.strip():
                line = f"  {line}"
            else:
                listed = False
        lines.append(line)
    return "\n".join([*lines, "```"] if shown else lines)


def _unindented(section: re.Match) -> str:
    """A section as its title and its text; names of arguments and exceptions in quotes."""
    title, body = section[1], re.sub(r"^ {4}", "", section[2], flags=re.MULTILINE)
    if title in ("Args", "Raises"):
        body = NAMED.sub(r"`\1`: ", body)
    return f"**{title}**\n\n{body}"
