"""The documentation: its code is run, its commands are parsed, its pages are built and checked."""

import dataclasses
import doctest
import html
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import consilience as cs
from consilience import metrics, plots
from consilience.cli.main import _parser
from consilience.model.data import Vector, make_layout
from consilience.tasks import gmm, two_moons
from consilience.training import defaults
from consilience.training.candidates import as_markdown
from consilience.training.defaults import default_plan

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def fences(page: str) -> list[tuple[str, str, str]]:
    """The language, the rest of the first line and the text of every code block of a page."""
    return FENCE.findall((DOCS / page).read_text())


class Raising(doctest.DebugRunner):
    """Ends at the first example that gives something else than the page says."""

    def report_unexpected_output(self, out, test, example, got):
        raise AssertionError(
            f"{test.name}, line {example.lineno + 1}:\n{example.source}"
            f"the page says\n{example.want}and it is\n{got}"
        )


_begun: dict[tuple[str, ...], dict] = {}
"""The names after the first blocks of a page: pages that begin alike train once."""


def run(page: str) -> dict:
    """All Python of a page, in order and in one namespace; that of other libraries is compiled."""
    names: dict = {"__name__": "__main__"}
    so_far: tuple[str, ...] = ()
    for language, rest, block in fences(page):
        if language == "pycon":
            so_far = (*so_far, block)
            if so_far not in _begun:
                test = doctest.DocTestParser().get_doctest(block, names, page, page, 0)
                assert test.examples
                Raising(optionflags=FLAGS).run(test, clear_globs=False)
                _begun[so_far] = dict(test.globs)
            names = dict(_begun[so_far])
        elif language == "python" and "title=" in rest:
            compile(block, page, "exec")
        elif language == "python" and (named := re.match(r"# (\w+\.py)\n", block)):
            Path(named[1]).write_text(block)
        elif language == "python":
            exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_first_page(folder):
    names = run("index.md")
    assert (folder / "fit.safetensors").exists()
    assert names["fit"].history.simulations == 128


@pytest.mark.parametrize("page", ["models", "choices", "costly", "extending", "migrate", "cite"])
def test_a_page(folder, page):
    run(f"{page}.md")


def test_the_page_on_small_budgets(folder):
    rounds = run("small-budgets.md")["rounds"]
    assert (folder / "rounds" / "round-1.fit").exists()
    first, second = (each.simulations.theta["mu"] for each in rounds)
    # The prior is N(0, 3), the posterior about N(2, 0.3).
    assert first.std() > 2 and abs(second.mean() - 2) < 0.5


def test_the_page_on_unlabelled_data(folder):
    names = run("unlabeled.md")
    assert 4 * names["error"](names["aware"]) < names["error"](names["fit"])


def test_the_page_on_evidence(folder):
    names = run("evidence.md")
    assert names["table"]["probability"].sel(model="narrow") > 0.8


def test_the_page_on_trust(folder):
    names = run("trust.md")
    exact = 10 / 11 * float(np.mean(names["x"]))
    for draws in (names["better"], names["chains"]):
        assert abs(float(draws["mu"].std()) - 11**-0.5) < 0.05
        assert abs(float(draws["mu"].mean()) - exact) < 0.1


def cells(page: str, row: str) -> list[str]:
    """The cells of the table row of a page that begins with a word."""
    (line,) = [
        line for line in (DOCS / page).read_text().splitlines() if line.startswith(f"| {row} |")
    ]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def settings_in(cell: str) -> list:
    """The objects that the code of a cell makes."""
    return [eval(code, {"cs": cs}) for code in re.findall(r"`(cs\.[^`]*)`", cell)]


def keywords_in(cell: str) -> dict[str, float]:
    """The settings that the code of a cell names alone."""
    return {name: float(value) for name, value in re.findall(r"`(\w+)=([^`,()]+)`", cell)}


def numbers_in(text: str) -> list[float]:
    """The numbers of a text, in its order, but those of its code."""
    plain = re.sub(r"`[^`]*`", "", text)
    return [
        float(n.replace(",", ""))
        for n in re.findall(r"(?<![A-Za-z\d.])\d+(?:,\d{3})*(?:\.\d+)?", plain)
    ]


@pytest.fixture(scope="module")
def plans():
    """The default plans that the page on choices describes, for 1,000 runs if not said."""
    sets, vectors = gmm.model(), two_moons.model(likelihood=False)
    rows = {size: make_layout({"data": (size,)}, Vector(), True) for size in (2, 4, 21)}
    alone = {"self_consistency": False}
    return {
        "exact": default_plan(sets, sets.layout, 2, 128),
        "plain": default_plan(sets, sets.layout, 2, 128, **alone),
        "vector": default_plan(two_moons.model(), rows[2], 2, 1000),
        "tandem": default_plan(vectors, rows[2], 2, 1000),
        "curve": default_plan(vectors, rows[4], 2, 1000),
        "wide": default_plan(vectors, rows[21], 2, 1000),
        "small": default_plan(vectors, rows[2], 2, 64),
        "few": default_plan(vectors, rows[2], 2, 128, **alone),
        "many": default_plan(vectors, rows[2], 2, 5000, **alone),
    }


def test_the_recipes_on_a_page_are_those_of_the_library():
    """If not, the tables are those of `python -c` with `candidates.as_markdown()`."""
    assert as_markdown() in (DOCS / "choices.md").read_text()


def test_the_weights_that_a_page_names_are_those_of_the_library(plans):
    usual, wide = plans["exact"].self_consistency, plans["wide"].self_consistency
    (first, then), (late, full) = usual.schedules, wide.schedules
    assert (late, full) == (cs.Step(0.5, after=0.1), cs.Constant())
    shown = numbers_in(cells("choices.md", "K, λ")[0])
    expected = [usual.samples, first.before, 100 * first.at, first.after, defaults.WIDE_DATA]
    assert shown == [*expected, late.before, late.after]
    shown = [numbers_in(cell) for cell in cells("choices.md", "weight of maximum likelihood")]
    expected = [then.before, 100 * then.at, then.after, defaults.WIDE_DATA, full.value]
    assert shown == [expected, [cs.Constant().value]]
    jitters = {
        name: plans[name].self_consistency.augmentation for name in ("exact", "vector", "tandem")
    }
    expected = {"exact": 0.1, "vector": 0.5, "tandem": 0.1}
    assert jitters == {name: cs.Bootstrap(size) for name, size in expected.items()}


def test_the_networks_that_a_page_names_are_those_of_the_library(plans):
    recipes = {name: plan.recipe for name, plan in plans.items()}
    consistent, alone = cells("choices.md", "posterior")
    assert settings_in(consistent) == [recipes["exact"].posterior]
    assert recipes["exact"].posterior == cs.Coupling(layers=4, depth=3, l2=1e-5)
    assert numbers_in(consistent) == [recipes["tandem"].posterior.layers] == [6]
    named = keywords_in(alone)
    dropout = named.pop("dropout")
    assert settings_in(alone) == [
        cs.Coupling(**{n: int(v) if v >= 1 else v for n, v in named.items()})
    ]
    assert set(named) == {"depth", "l2"} and cs.Coupling() == cs.Coupling(
        layers=4, depth=2, l2=1e-3
    )
    assert recipes["plain"].posterior == cs.Coupling(dropout=dropout) == cs.Coupling(dropout=0.2)
    assert recipes["few"].posterior == cs.Coupling(dropout=0.05)
    assert recipes["many"].posterior == cs.Coupling(dropout=25 / 5000)
    rate, most = recipes["many"].posterior.dropout * 5000, recipes["few"].posterior.dropout
    assert numbers_in(alone) == [cs.Coupling().layers, defaults.MOST_DROPPED, rate, most]
    assert [settings_in(cell) for cell in cells("choices.md", "summary of a set")] == [
        [recipes["exact"].summary],
        [recipes["plain"].summary],
    ]
    assert recipes["exact"].summary == cs.DeepSet(width=128, blocks=3)
    assert recipes["plain"].summary == cs.DeepSet()


def test_the_likelihoods_that_a_page_names_are_those_of_the_library(plans):
    learned = [plans[name].recipe.likelihood for name in ("tandem", "curve", "wide")]
    cell = cells("choices.md", "learned likelihood")[0]
    usual = cs.Coupling().l2
    assert settings_in(cell) == [dataclasses.replace(flow, l2=usual) for flow in learned]
    assert learned[0] == cs.Coupling(layers=6, depth=3, l2=1.5 / 1000)
    assert learned[1] == cs.Coupling(cs.Affine(), layers=1, frame=3, df=5.0, l2=5 / 1000)
    inverse = [flow.l2 * 1000 for flow in learned[:2]]
    most = plans["small"].recipe.likelihood.l2
    assert numbers_in(cell) == pytest.approx([defaults.WIDE_DATA, *inverse, most])


def length(**said: bool) -> defaults.Length:
    names = ("consistent", "jointly", "smooth", "many", "unguarded", "patient", "slow")
    return defaults._length(**{**dict.fromkeys(names, False), **said})


def test_the_steps_that_a_page_names_are_those_of_the_library(plans):
    consistent, alone = (numbers_in(cell) for cell in cells("choices.md", "steps"))
    usual, tandem = length(consistent=True), length(consistent=True, jointly=True)
    smooth = length(consistent=True, jointly=True, smooth=True)
    many = length(consistent=True, jointly=True, many=True)
    expected = [*usual[:3], tandem.most, tandem.least, *smooth[:3], many.epochs, defaults.WIDE_DATA]
    assert consistent == expected
    series, dropped, patient = length(slow=True), length(unguarded=True), length(patient=True)
    assert alone == [length().most, *series[:3], *dropped[:3], patient.most]
    assert numbers_in(cells("choices.md", "least")[0]) == [usual.least]
    exact, jointly = plans["exact"], plans["tandem"]
    assert exact.epochs * (128 // exact.batch_size) == 2000
    assert jointly.epochs * (1000 // jointly.batch_size) == pytest.approx(12_000, rel=0.01)
    held_out = [plans[name].validation for name in ("exact", "plain", "few")]
    assert held_out == [0.0, 0.0, 0.1]


def results(page: str, title: str) -> dict[str, list[str]]:
    """The rows of the table below a title of a page of results, by their first cell."""
    text = (DOCS / "results" / page).read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def test_numbers_of_the_pages_are_those_of_the_results():
    budgets = results("consistency.md", "The default recipe")
    found = [budgets[n][1:3] for n in ("64", "256", "1024")]
    page = (DOCS / "small-budgets.md").read_text()
    for name, column in (("draws", 0), ("corrected draws", 1)):
        numbers = " | ".join(row[column] for row in found)
        assert f"| {name} | {numbers} |" in page
    shifted = results("consistency.md", "Unlabelled data")
    labels = ("self-consistent", "with unlabelled data", "NPE")
    without, aware, plain = (float(shifted[name][1]) for name in labels)
    (said,) = [
        part
        for part in (DOCS / "unlabeled.md").read_text().split("\n\n")
        if "(results/consistency.md)" in part and numbers_in(part)
    ]
    assert {round(value, 2) for value in (without, aware, plain)} <= set(numbers_in(said))


def test_the_figures_of_the_readme_are_those_of_the_experiments():
    text = (ROOT / "README.md").read_text().split("## The paper's experiments\n")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    shown = [row for row in rows if len(row) == 5][2:]
    nats = "1,000 tests (nats)"
    tables = [
        ("two-moons.md", "Posterior MMD, 100 tests"),
        ("two-moons.md", f"Log likelihood of the data at the true parameters, {nats}"),
        ("two-moons.md", f"Evidence sharpness: width of the central 95 %, {nats}"),
        ("source.md", "Posterior MMD, logarithm of the intensity"),
    ]
    ours = [row for row in shown if "paper" not in row[0]]
    theirs = [row for row in shown if "paper" in row[0]]
    assert len(ours) == len(tables) and len(theirs) == 3
    published = []
    for (_, *cells), (page, title) in zip(ours, tables, strict=True):
        found = results(page, title)
        label = next(name for name in found if re.fullmatch(r"SC-NPL?E, K = 10 \(default\)", name))
        columns = [found[""].index(head) for head in ("512", "1,024", "2,048", "4,096")]
        assert cells == [found[label][column].strip("*") for column in columns]
        theirs_here = [row for name, row in found.items() if name.startswith("*paper's SC")]
        published += [[row[column] for column in columns] for row in theirs_here]
    assert [cells for _, *cells in theirs] == published


def test_commands_of_the_pages_are_those_of_the_library():
    lines = [
        line.split("#")[0].strip()
        for page in DOCS.glob("*.md")
        for language, _, block in fences(page.name)
        if language == "sh"
        for line in block.splitlines()
    ]
    made = [line for line in lines if line.startswith("make ")]
    called = [line for line in lines if line.startswith("consilience ")]
    assert len(made) + len(called) == len(lines) and made and called
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert all(line.split()[1] in targets for line in made)
    for line in called:
        options = _parser().parse_args(shlex.split(line)[1:])
        assert callable(options.command)


def test_figures_of_the_pages_are_made_by_the_script():
    shown = {
        name
        for page in DOCS.glob("*.md")
        for name in re.findall(r"\]\(figures/(\S+?)\)", page.read_text())
    }
    assert shown == {path.name for path in (DOCS / "figures").iterdir()}
    made = re.findall(r'save\(.*"(\S+)"\)', (DOCS / "figures.py").read_text())
    assert set(made) == shown


def test_the_reference_has_every_public_name():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    named = re.findall(r"^::: consilience\.(\S+)$", text, re.MULTILINE)
    assert len(named) == len(set(named))
    assert {name for name in named if "." not in name} == set(cs.__all__)
    for module in (metrics, plots):
        short = module.__name__.rpartition(".")[2]
        public = {
            name
            for name, part in vars(module).items()
            if callable(part)
            and getattr(part, "__module__", "") == module.__name__
            and name[0] != "_"
        }
        assert {name for name in named if name.startswith(f"{short}.")} == {
            f"{short}.{name}" for name in public
        }


BEHIND = {
    "identity.batches.Batch",
    "identity.setting.Setting",
    "identity.terms.View",
    "model.data.Layout",
    "model.external.External",
    "simulation.settings.Executor",
}
"""What parts of a user's own implement or receive, beside the names of the package itself."""


def test_the_reference_has_what_parts_of_a_users_own_implement_or_receive():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    named = set(re.findall(r"^::: consilience\.(\S+)$", text, re.MULTILINE))
    public = {"metrics", "plots", "tasks"}
    assert {n for n in named if "." in n and n.split(".")[0] not in public} == BEHIND
    for name in BEHIND:
        module, _, cls = name.rpartition(".")
        assert getattr(importlib.import_module(f"consilience.{module}"), cls).__doc__


def module_at(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_is_whole_and_needs_no_network(tmp_path):
    site = tmp_path / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*words, "--site-dir", str(site)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check = module_at(DOCS / "check_site.py")
    assert list(check.problems(site)) == []
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")}
    built = {page.relative_to(site) for page in site.rglob("*.html")}
    assert built == pages | {Path("404.html")}
    reference = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    assert all(f'id="consilience.{name}"' in reference for name in BEHIND)
    assert "&gt;&gt;&gt;" not in re.sub(r"<pre>.*?</pre>", "", reference, flags=re.DOTALL)
    plain = html.unescape(re.sub(r"<[^>]+>", "", reference))
    assert 'a: Float[Array | ndarray, "*batch n d"]' in plain
    # Formulas that a script would have to set.
    plain = re.sub(r"<[^>]+>", "", re.sub(r"<pre>.*?</pre>", "", reference, flags=re.DOTALL))
    assert not re.search(r"\$\S[^$]*\$|\\(theta|mathcal|sum|frac)", plain)


def test_the_check_of_the_site_finds_what_is_wrong(tmp_path):
    check = module_at(DOCS / "check_site.py")
    (tmp_path / "b.html").write_text('<h1 id="top">b</h1>')
    (tmp_path / "style.css").write_text("@import url('https://fonts.example/x.css');")
    (tmp_path / "a.html").write_text(
        '<link href="style.css"><script src="https://cdn.example/x.js"></script>'
        '<img src="lost.png"><a href="b.html#top">b</a><a href="b.html#end">b</a>'
        '<a href="c.html">c</a><a href="https://example.org">out</a>'
    )
    found = list(check.problems(tmp_path))
    assert [line.partition(": ")[2] for line in found[:4]] == [
        "loads https://cdn.example/x.js from outside",
        "loads lost.png, which is not there",
        "links to b.html#end, an anchor that is not there",
        "links to c.html, which is not there",
    ]
    assert len(found) == 5 and found[4].startswith("style.css: ")
    assert list(check.problems(tmp_path / "none")) != []


def test_docstrings_become_lists_and_code_blocks():
    entries = module_at(DOCS / "entries.py")
    assert doctest.testmod(entries) == (0, 1)
    text = 'Adds.\n\n`a`, `b`: one,\nor two.\n"both" (or `a`): all.\n\n>>> 1 + 1\n2\n\nMore.'
    assert entries.to_markdown(text) == (
        'Adds.\n\n- `a`, `b`: one,\n  or two.\n- "both" (or `a`): all.\n\n'
        "```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    )
    text = "Calls.\n\nArgs:\n    fn: one,\n        or two.\n    n: many.\n\nReturns:\n    A future."
    assert entries.to_markdown(text) == (
        "Calls.\n\n**Args**\n\n- `fn`: one,\n      or two.\n- `n`: many.\n\n"
        "**Returns**\n\nA future."
    )
    assert entries.to_markdown("One.\n\nExample:\n    >>> 1 + 1\n    2") == (
        "One.\n\n**Example**\n\n```pycon\n>>> 1 + 1\n2\n```"
    )
