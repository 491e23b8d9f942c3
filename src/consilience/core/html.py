"""HTML that is always escaped: elements, and how an object shows itself in a notebook.

Whatever is put into an element is escaped unless it is `Html`, which only this module makes:
a name can hold any characters, and a page shows them as they are.
"""

import html
from collections.abc import Iterable
from typing import Any

VOID = {"img", "meta"}
"""Elements without content."""


class Html(str):
    """Markup: text that is safe to put into a page as it is."""


def escaped(part: Any) -> Html:
    """Anything as markup.

    >>> escaped("a < b & c")
    'a &lt; b &amp; c'
    """
    return part if isinstance(part, Html) else Html(html.escape(str(part)))


def joined(parts: Iterable[Any], between: str = "") -> Html:
    """Parts one after another."""
    return Html(between.join(escaped(part) for part in parts))


def element(tag: str, *parts: Any, **attributes: Any) -> Html:
    """An element with its content; an underscore at the end of an attribute's name is cut off.

    >>> element("p", "a < b", class_="note", aria_label='"x"')
    '<p class="note" aria-label="&quot;x&quot;">a &lt; b</p>'
    """
    said = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
    )
    return Html(f"<{tag}{said}>" + ("" if tag in VOID else f"{joined(parts)}</{tag}>"))


def notebook(shown: Any) -> str:
    """An object for a notebook: its text, the first line in bold."""
    first, _, rest = repr(shown).partition("\n")
    below = element("pre", rest, style="margin: 0.2em 0 0; line-height: 1.35") if rest else ""
    return element("div", element("strong", first), below)
