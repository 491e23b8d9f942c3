"""HTML: text that is always escaped, and the parts of a page that needs nothing from outside.

Whatever is put into an element is escaped unless it is `Html`, which only this module makes:
a name can hold any characters, and a page shows them as they are.
"""

import base64
import io
import math
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from consilience.core.html import Html, element


def text(*parts: Any, **attributes: Any) -> Html:
    """A paragraph."""
    return _kept_together(element("p", *parts, **attributes))


def _kept_together(part: Html) -> Html:
    """A sign of percent stays with its number."""
    return Html(part.replace(" %", "\N{NO-BREAK SPACE}%"))


def code(part: Any) -> Html:
    return element("code", part)


def number(value: Any) -> str:
    """A number to three digits, or whole, as people write it.

    >>> number(-0.12345), number(12345.6), number(1e-7), number(float("nan")), number(250)
    ('−0.123', '12,346', '1e−07', 'not known', '250')
    """
    value = float(value)
    if math.isnan(value):
        return "not known"
    if abs(value) < 1e6 and (abs(value) >= 1e3 or value.is_integer()):
        shown = f"{value:,.0f}"
    else:
        shown = f"{value:.3g}".replace("inf", "∞")
    return shown.replace("-", "−")


def listed(parts: Sequence[Any]) -> str:
    """Names in a row: a, b and c."""
    words = [str(part) for part in parts]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def facts(pairs: Iterable[tuple[Any, Any]], **attributes: Any) -> Html:
    """Names and what they stand for."""
    rows = (element("div", element("dt", name), element("dd", value)) for name, value in pairs)
    return element("dl", *rows, **attributes)


def table(caption: str, head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Html:
    """A table whose first column names its rows; a wide one scrolls within itself."""
    top = element("tr", *(element("th", name, scope="col") for name in head))
    body = (
        element(
            "tr", element("th", first, scope="row"), *(element("td", value) for value in values)
        )
        for first, *values in rows
    )
    whole = element(
        "table", element("caption", caption), element("thead", top), element("tbody", *body)
    )
    return _scrolling(_kept_together(whole), f"Table: {caption}", "table")


def figure(axes: Any, alt: str, caption: str) -> Html:
    """A Matplotlib figure, by any of its axes, as an image in the page itself."""
    made = axes.flat[0].figure if hasattr(axes, "flat") else axes.figure
    source = f"data:image/svg+xml;base64,{base64.b64encode(_svg(made)).decode()}"
    width, height = (round(96 * inches) for inches in made.get_size_inches())
    image = element(
        "img", src=source, alt=alt, width=width, height=height, style=f"--width: {width}px"
    )
    frame = _scrolling(image, f"Figure: {caption}", "card")
    return element("figure", frame, element("figcaption", text(caption)))


def _svg(made: Any) -> bytes:
    """The same figure, the same bytes: no date, and names that do not depend on chance."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "consilience", "svg.fonttype": "path"}):
        made.savefig(file, format="svg", dpi=200, metadata={"Date": None, "Creator": None})
    return file.getvalue()


def _scrolling(part: Html, label: str, kind: str) -> Html:
    # A keyboard scrolls only what it can reach.
    return element("div", part, class_=f"scroll {kind}", role="group", aria_label=label, tabindex=0)


def section(name: str, title: str, *parts: Any) -> Html:
    heading = element("h2", title, id=f"{name}-title")
    return element("section", heading, *parts, id=name, aria_labelledby=f"{name}-title")


def page(title: str, lead: Any, first: Html, sections: dict[str, tuple[str, Html]]) -> str:
    """A whole page: what matters most, then the sections by name, with titles and links to them."""
    style = files("consilience.report").joinpath("report.css").read_text("utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(style)),
    )
    links = (
        element("li", element("a", said, href=f"#{name}")) for name, (said, _) in sections.items()
    )
    parts = (section(name, said, content) for name, (said, content) in sections.items())
    body = element(
        "body",
        element("a", "Skip to the report", href="#report", class_="skip"),
        element("header", element("h1", title), element("p", lead, class_="lead")),
        element(
            "main",
            first,
            element("nav", element("h2", "Contents"), element("ul", *links), aria_label="Contents"),
            *parts,
            id="report",
            tabindex=-1,
        ),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"
