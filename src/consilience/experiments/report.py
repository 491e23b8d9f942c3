"""Results to the paper's tables and figures: Markdown, CSV and PNG."""

import csv
import dataclasses
import io
import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from consilience import plots
from consilience.core.files import write
from consilience.core.panels import INK, STYLES, panels
from consilience.diagnostics.calibration import rank_table
from consilience.experiments.cells import FIELDS, Row, read_arrays, read_rows, write_table
from consilience.experiments.experiment import RANK_DRAWS, Experiment, Table, read_name

Values = dict[str, dict[int, list[float]]]
LABEL_WIDTH = 34
"""Letters in a line of an axis's label: more would be cut."""
PROTOCOL_NOTE = (
    "bold is the best in a column. *paper* is the paper's protocol, *default* is `cs.fit` with "
    "default settings."
)


def report(experiment: Experiment, folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the tables and figures of a folder's results; the path of the page comes back.

    `out`: where to; by default the folder itself.
    """
    folder = Path(folder)
    rows = read_rows(folder)
    if not rows:
        raise ValueError(
            f"There are no results in {folder}: run `consilience reproduce {experiment.name} "
            f"--out {folder}` first."
        )
    out = Path(out or folder)
    out.mkdir(parents=True, exist_ok=True)
    write_table(folder)
    parts = [f"# {experiment.title}", _head(experiment, rows, quick=read_name(folder)[1])]
    tables = [*experiment.tables, _times(rows, experiment.tables[0].across)]
    measured = [(table, values) for table in tables if (values := collect(table, rows))]
    records = [record for table, values in measured for record in to_records(table, values)]
    if experiment.sections is not None:
        parts += experiment.sections(rows, folder)
    else:
        for table, values in measured:
            parts += [f"## {table.title}", to_markdown(table, values)]
        parts += _save_figures(experiment, rows, folder, out)
    parts += _missing(experiment, rows, quick=read_name(folder)[1])
    page = out / f"{experiment.name}.md"
    write(page, ("\n\n".join(parts) + "\n").encode(), shared=True)
    write(out / f"{experiment.name}.csv", _to_csv(records).encode(), shared=True)
    return page


def _save_figures(
    experiment: Experiment, rows: Sequence[Row], folder: Path, out: Path
) -> list[str]:
    """The figures as files, and as Markdown that shows them."""
    shown = []
    for name, axes in draw_figures(experiment, rows, folder).items():
        path = out / f"{experiment.name}-{name}.png"
        np.ravel(axes)[0].figure.savefig(path, dpi=160)
        shown.append(f"![{name.replace('-', ' ')}]({path.name})")
    return shown


def label(row: Row, *, samples: bool = True) -> str:
    """A method as a table names it."""
    k = f", K = {row['samples']}" if samples and row["samples"] else ""
    return f"{row['method']}{k} ({row['protocol']})"


def collect(table: Table, rows: Iterable[Row]) -> Values:
    """The values of a measure by method and column, one for each seed."""
    across_k = table.across == "samples"
    found: Values = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["variant"] in table.variants and table.measure in row:
            name = label(row, samples=not across_k)
            if across_k:
                # Without self-consistency K is zero: the same row, to be read as one.
                name = name.replace("SC-", "")
            found[name][row[table.across]].append(row[table.measure])
    return {name: dict(columns) for name, columns in found.items()}


def to_markdown(table: Table, values: Values) -> str:
    """Means and standard errors over seeds, beside the paper's figures and the limit."""
    columns = sorted({c for row in values.values() for c in row})
    columns = sorted({*columns, *(c for row in table.published for c in row.values)})
    mark = "K = " if table.across == "samples" else ""
    heads = [f"{mark}{column:,}" for column in columns]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for published in table.published:
        cells = [f"{published.values[c]:.2f}" if c in published.values else "" for c in columns]
        lines.append(f"| *{published.label}* | {' | '.join(cells)} |")
    best = {c: _best(table, [row[c] for row in values.values() if c in row]) for c in columns}
    for name, row in values.items():
        cells = [_show(row[c], best[c], table.digits) if c in row else "" for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    note = f"Best possible: {table.limit}. " if table.limit else ""
    better = "Higher is better." if table.higher else "Lower is better."
    return "\n".join(lines) + f"\n\n{note}{better}"


def to_records(table: Table, values: Values) -> list[dict[str, Any]]:
    """The same as tidy rows."""
    return [
        {
            "measure": table.measure,
            "variant": "+".join(table.variants),
            "method": name,
            table.across: column,
            "mean": np.mean(each),
            "standard_error": standard_error(each),
            "seeds": len(each),
        }
        for name, row in values.items()
        for column, each in sorted(row.items())
    ]


def standard_error(values: Sequence[float]) -> float:
    """Of the mean over seeds; not a number for a single one."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def draw_figures(experiment: Experiment, rows: Sequence[Row], folder: Path) -> dict[str, Any]:
    """Every measure against the budget, the spread over test sets, calibration, and draws."""
    figures: dict[str, Any] = {}
    for number, table in enumerate(experiment.tables, 1):
        # A method at a single budget is no curve: the table has it.
        values = {name: row for name, row in collect(table, rows).items() if len(row) > 1}
        if table.across == "budget" and values:
            name = f"{number}-{table.measure.replace('_', '-')}"
            ylabel = textwrap.fill(table.title.split(",")[0], LABEL_WIDTH)
            figures[name] = plots.budgets(values, ylabel=ylabel)
    first = [row for row in rows if row["seed"] == 0]
    figures |= _spread(first, folder) | _calibration(first, folder) | _draws(first, folder)
    return figures | experiment.draw(first, folder)


def _calibration(rows: Sequence[Row], folder: Path) -> dict[str, Any]:
    """The ranks of the truth, for every method at one budget: the one most methods have."""
    tables = {}
    for row in _at_one_budget(rows):
        arrays = read_arrays(folder, row)
        if "ranks" in arrays:
            ranks = dict(zip(map(str, arrays["ranked"]), arrays["ranks"], strict=True))
            tables[_slug(row)] = rank_table(ranks, RANK_DRAWS)
    return {f"ranks-{name}": plots.ecdf_difference(table) for name, table in tables.items()}


def _draws(rows: Sequence[Row], folder: Path) -> dict[str, Any]:
    """The posterior of the first test set, by every method at one budget, and the exact one."""
    shown, exact = {}, None
    for row in _at_one_budget(rows):
        arrays = read_arrays(folder, row)
        if "draws" in arrays:
            shown[label(row)], exact = arrays["draws"], arrays["exact"]
    if exact is None:
        return {}
    return {"draws": plots.side_by_side({**dict(list(shown.items())[:4]), "exact": exact})}


def _at_one_budget(rows: Sequence[Row]) -> list[Row]:
    budgets = Counter(row["budget"] for row in rows)
    most = max(budgets, key=lambda n: (budgets[n], -n))
    return [row for row in rows if row["budget"] == most]


def _slug(row: Row) -> str:
    k = f"-k{row['samples']}" if row["samples"] else ""
    variant = f"-{row['variant']}" if row["variant"] else ""
    return f"{row['protocol']}-{row['method'].lower()}{k}{variant}"


def _spread(rows: Sequence[Row], folder: Path) -> dict[str, Any]:
    """The MMD of every test set by method and budget, as the paper shows the mixture's."""
    found: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for row in rows:
        each = read_arrays(folder, row).get("mmd")
        if each is not None and row["protocol"] == "paper" and row["samples"] in (0, 10):
            found[f"{row['method']} {row['variant']}".strip()][row["budget"]] = each
    methods = {name: each for name, each in found.items() if len(each) > 1}
    if not methods:
        return {}
    axis = panels([""], "simulations", "MMD, each test set", size=(4.8, 3.2))[0]
    budgets = sorted({n for spread in methods.values() for n in spread})
    width = 0.8 / len(methods)
    for number, (name, spread) in enumerate(methods.items()):
        color, shift = STYLES[number][0], (number - (len(methods) - 1) / 2) * width
        axis.boxplot(
            list(spread.values()),
            positions=[budgets.index(n) + shift for n in spread],
            widths=0.8 * width,
            patch_artist=True,
            showfliers=False,
            boxprops={"facecolor": color, "alpha": 0.6},
            medianprops={"color": INK},
        )
        axis.plot([], [], color=color, lw=5, label=name)
    axis.set_xticks(range(len(budgets)), [f"{n:,}" for n in budgets])
    axis.set_yscale("log")
    axis.legend(fontsize=8, frameon=False)
    return {"spread": axis}


def _head(experiment: Experiment, rows: Sequence[Row], *, quick: bool) -> str:
    seeds = len({row["seed"] for row in rows})
    timed = [row["cpu_seconds"] for row in rows if "cpu_seconds" in row]
    spent = f"{sum(timed) / 60:.0f} CPU minutes"
    if len(timed) < len(rows):
        # Cells of older versions have none.
        spent += f" in the {len(timed)} that kept their time"
    command = f"consilience reproduce {experiment.name}{' --quick' * quick}"
    text = (
        f"Made by `{command}` and `consilience report`: "
        f"{len(rows)} cells, seeds 0 to {seeds - 1}, {spent}. Means over seeds with their "
        "standard errors, or one seed where there is none"
    )
    text += "." if experiment.sections else f"; {PROTOCOL_NOTE}"
    return f"{text}\n\n{experiment.notes}".strip()


def _missing(experiment: Experiment, rows: Iterable[Row], *, quick: bool) -> list[str]:
    """What the experiment asks for and was not run: a section, if there is any."""
    done = {tuple(row[name] for name in FIELDS) for row in rows}
    wanted: Counter[str] = Counter()
    absent: Counter[str] = Counter()
    for cell in experiment.cells(quick=quick):
        row = dataclasses.asdict(cell)
        name = label(row) + f", {cell.variant}" * bool(cell.variant)
        wanted[name] += 1
        absent[name] += tuple(row.values()) not in done
    lines = [f"- {name}: {n} of {wanted[name]} cells" for name, n in absent.items() if n]
    return ["## Not run", "\n".join(lines)] if lines else []


def _times(rows: Iterable[Row], across: str) -> Table:
    """A table of what cells cost, whatever their variant."""
    variants = tuple(dict.fromkeys(row["variant"] for row in rows))
    title = "CPU seconds of a cell"
    return Table("cpu_seconds", title, across=across, variants=variants, digits=0)


def _best(table: Table, cells: Sequence[Sequence[float]]) -> float:
    means = [float(np.mean(cell)) for cell in cells]
    return (max if table.higher else min)(means, default=math.nan)


def _show(values: Sequence[float], best: float, digits: int | None) -> str:
    mean, error = float(np.mean(values)), standard_error(values)
    if digits is None:
        digits = 4 if abs(mean) < 0.1 else 3 if abs(mean) < 1 else 2
    text = f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if np.isfinite(error) else "")
    return f"**{text}**" if mean == best else text


def _to_csv(records: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    columns = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
