"""The scoreboard as Markdown: two leagues, each beside the published figures."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from consilience.experiments.cells import Row
from consilience.experiments.published import Score, best, read_published
from consilience.tasks.sbibm.registry import TASKS

SOURCE_FILE = "source.json"
"""In a folder of results: the benchmark's files that made them, by task; none for our own."""
NOT_OURS = (
    "Figures of others are those of the `published.csv` that `--data` had. Best amortized: the "
    "lowest of the methods that have a posterior for any observation. *better* and *worse*: by "
    "the means."
)
NO_FIGURES = (
    "No figures of others are shown: `consilience reproduce sbibm --data DIR` takes them from "
    "`published.csv` in DIR, and the benchmark's own observations beside it."
)

Values = dict[tuple[str, int, str], list[float]]
"""What the seeds measured, by method, budget and task."""


def sections(rows: Sequence[Row], folder: Path) -> list[str]:
    """The sections of the page on the cells of a folder."""
    published = read_published(folder)
    plain, corrected = collect(rows, "c2st"), collect(rows, "c2st_corrected")
    parts = [_origin(rows, folder), NOT_OURS if published else NO_FIGURES]
    free = [_free(plain, published, n) for n in _budgets(plain, "default", "NPE")]
    if free:
        parts += ["## Without the likelihood", *free]
    given = [_given(plain, corrected, published, n) for n in _budgets(plain, "exact")]
    if given:
        parts += ["## With the likelihood", *given]
    parts += _measures(rows, "log_density", "Mean held-out log density, in nats", 2)
    return parts + _measures(rows, "fit_seconds", "Seconds of the fit", 0)


def collect(rows: Sequence[Row], measure: str) -> Values:
    """The values of a measure by method, budget and task, one for each seed."""
    found: Values = defaultdict(list)
    for row in rows:
        if measure in row:
            found[row["method"], row["budget"], row["variant"]].append(row[measure])
    return dict(found)


def _origin(rows: Sequence[Row], folder: Path) -> str:
    """What the figures were measured on."""
    path = folder / SOURCE_FILE
    filed = path.exists() and json.loads(path.read_text())
    made = "the benchmark's files" if filed else "made by this library"
    draws = " or ".join(sorted({f"{row['draws']:,.0f}" for row in rows if "draws" in row}))
    each = " or ".join(sorted({str(_observations(row)) for row in rows}))
    return (
        f"Observations and reference draws: {made}. {draws} draws a side, means over {each} "
        "observations."
    )


def _observations(row: Row) -> int:
    """How many observations a cell has the C2ST of."""
    return sum(name.startswith("c2st_") and name[5:].isdigit() for name in row)


def _budgets(values: Values, *methods: str) -> list[int]:
    return sorted({budget for method, budget, _ in values if method in methods})


def _free(values: Values, published: Sequence[Score], budget: int) -> str:
    lines = [
        "| task | best amortized | plain NPE | default | default against both |",
        "|---" * 5 + "|",
    ]
    for task in TASKS:
        plain, ours = (values.get((method, budget, task)) for method in ("NPE", "default"))
        if plain or ours:
            known = best(published, task, budget)
            verdict = _verdict(ours, known.mean_c2st if known else None, _mean(plain))
            lines.append(f"| {task} | {_cite(known)} | {show(plain)} | {show(ours)} | {verdict} |")
    return f"### {budget:,} runs: C2ST\n\n" + "\n".join(lines)


def _given(values: Values, corrected: Values, published: Sequence[Score], budget: int) -> str:
    lines = [
        "| task | best of any method | draws | corrected draws | draws, corrected |",
        "|---" * 5 + "|",
    ]
    for task in TASKS:
        place = ("exact", budget, task)
        if place in values:
            known = best(published, task, budget, amortized=False)
            figure = known.mean_c2st if known else None
            pairs = [values.get(place), corrected.get(place)]
            verdicts = ", ".join(_verdict(each, figure) for each in pairs)
            cells = " | ".join(show(each) for each in pairs)
            lines.append(f"| {task} | {_cite(known)} | {cells} | {verdicts} |")
    note = "Published methods did not have the likelihood."
    return f"### {budget:,} runs: C2ST\n\n" + "\n".join(lines) + f"\n\n{note}"


def _verdict(ours: Sequence[float] | None, *figures: float | None) -> str:
    """Better or worse than each figure, by the mean."""
    if not ours:
        return ""
    mean = float(np.mean(ours))
    words = ["" if f is None else "better" if mean < f else "**worse**" for f in figures]
    return ", ".join(word for word in words if word)


def _mean(values: Sequence[float] | None) -> float | None:
    return float(np.mean(values)) if values else None


def _cite(score: Score | None) -> str:
    return f"{score.mean_c2st:.3f} ({score.method})" if score else ""


def show(values: Sequence[float] | None, digits: int = 3) -> str:
    """The mean over seeds with its standard error, where there are several."""
    if not values:
        return ""
    text = f"{np.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}"
    return text


def _measures(rows: Sequence[Row], measure: str, title: str, digits: int) -> list[str]:
    """A table of a measure: tasks down, methods and budgets across."""
    values = collect(rows, measure)
    columns = sorted({(method, budget) for method, budget, _ in values})
    if not columns:
        return []
    heads = " | ".join(f"{method}, {budget:,}" for method, budget in columns)
    lines = [f"| task | {heads} |", "|---" * (len(columns) + 1) + "|"]
    for task in TASKS:
        cells = [show(values.get((*column, task)), digits) for column in columns]
        if any(cells):
            lines.append(f"| {task} | {' | '.join(cells)} |")
    return [f"## {title}", "\n".join(lines)]
