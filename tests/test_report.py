"""The report on a fit: an exact posterior, whose page must say so, with names that are markup."""

import base64
import dataclasses
import re
import shutil
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import consilience as cs
from consilience.core import html
from consilience.core.provenance import Origin, key_name, versions
from consilience.report import findings, observation, page
from consilience.report.sections import make_page
from tests.conftest import ROWS
from tests.gaussian import exact_log_evidence, exact_mean, exact_sd, gaussian_fit

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(5)
SCRIPT, AND = "<script>alert(1)</script>", r"a&b$\frac{$"
SECTIONS = {
    *("model", "training", "calibration", "recovery", "posterior", "predictions", "evidence"),
    *("verdict", "origin"),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def _both(theta):
    return jnp.stack([theta[SCRIPT], theta[AND]])


def _simulate(key, theta):
    return _both(theta) + jax.random.normal(key, (ROWS, 2))


PRIOR = {SCRIPT: dist.Normal(0.0, 1.0), AND: dist.Normal(0.0, 1.0)}
LIKELIHOOD = cs.PerRow(lambda theta, row: jnp.sum(dist.Normal(_both(theta), 1.0).log_prob(row)))


@pytest.fixture(scope="module")
def model():
    return cs.Model(PRIOR, _simulate, LIKELIHOOD)


@pytest.fixture(scope="module")
def held_out(model):
    return cs.simulate(model, 220, key=jax.random.key(1))


@pytest.fixture(scope="module")
def x(held_out):
    return held_out.x[7]


@pytest.fixture(scope="module")
def fit(model, held_out):
    """The exact posterior, with a record of training as `cs.fit` leaves it."""
    exact = gaussian_fit(model, held_out)
    epochs = np.linspace(2.0, 1.0, 12)
    history = cs.History(
        {"posterior": epochs, "loss": epochs}, {"posterior": 12}, "finished", 3.0, 260
    )
    settings = {
        "epochs": 12,
        "batch_size": 32,
        "validation": 0.1,
        "learning_rate": 1e-3,
        "schedule": "Cosine()",
        "optimizer": "Adam",
        "self_consistency": {"samples": 10, "weight": "Step(at=0.15)"},
        "exact": True,
        "unlabeled": 0,
    }
    origin = Origin(
        key_name(jax.random.key(11)), key_name(jax.random.key(22)), 300, settings, versions()
    )
    return dataclasses.replace(exact, history=history, origin=origin)


def gather(fit, x, simulations, **options) -> findings.Findings:
    settings = {"n": 260, "predictive": 50, "statistics": None, "step": lambda name: None}
    return findings.collect(fit, x, KEY, simulations, **{**settings, "progress": False, **options})


@pytest.fixture(scope="module")
def found(fit, x, held_out):
    return gather(fit, x, held_out)


@pytest.fixture(scope="module")
def written(fit, x, held_out, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "deep" / "report.html"
    return fit.report(path, x, key=KEY, simulations=held_out, predictive=50, progress=False)


@pytest.fixture
def bare_figures(monkeypatch):
    """Figures that are made but not drawn, which takes most of the time of a page."""
    monkeypatch.setattr(page, "_svg", lambda made: b"<svg/>")


class Parsed(HTMLParser):
    """Tags, attributes and the text of every section of a page."""

    def __init__(self, content: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.sections: dict[str, str] = {}
        self.heads: list[str] = []
        self._open: list[str] = []
        self._section, self._head = "top", False
        self.feed(content)
        self.close()
        assert not self._open, "every element ends"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in html.VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = dict(attributes).get("id", "first")
        if ("scope", "row") in attributes:
            self._head = True
            self.heads.append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        if tag in ("p", "th", "td", "dt", "dd", "caption"):
            self.sections[self._section] += " "
        if tag == "th":
            self._head = False

    def handle_data(self, data):
        said = data.replace("\N{NO-BREAK SPACE}", " ")
        self.sections[self._section] = self.sections.get(self._section, "") + said
        if self._head:
            self.heads[-1] += data

    def values(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


@pytest.fixture(scope="module")
def parsed(written):
    return Parsed(written.read_text("utf-8"))


def numbers(said: str) -> list[float]:
    return [float(part) for part in re.findall(r"-?\d+\.?\d*", said.replace("−", "-"))]


# What the page says.


def test_an_exact_posterior_is_said_to_be_one(parsed, x):
    first = parsed.sections["first"]
    assert "Use as is" in first
    assert "within its bands" in first
    assert "260; 40 more failed" in first
    value, low, high = numbers(first.split("95 % interval")[1])
    assert value == pytest.approx(exact_log_evidence(x).sum(), abs=0.01)
    assert low <= value <= high
    posterior = parsed.sections["posterior"]
    for name, mean in zip((SCRIPT, AND), exact_mean(x), strict=True):
        row = numbers(posterior.rsplit(name, 1)[1])
        assert row[0] == pytest.approx(float(mean), abs=0.03)
        assert row[1] == pytest.approx(exact_sd(), rel=0.1)


def test_every_section_is_there_and_none_is_missing(parsed, found):
    assert set(parsed.sections) >= SECTIONS
    assert not found.missing
    assert set(parsed.values("href")) == {"#report", *(f"#{name}" for name in SECTIONS)}
    assert "missing" not in parsed.values("class")


def test_recovery_and_calibration_are_those_of_the_runs(parsed, found, fit, held_out):
    same = cs.calibrate(fit, key=jax.random.key(0), simulations=held_out)
    np.testing.assert_allclose(found.calibration.table["error"], same.table["error"], atol=0.02)
    truth = held_out.theta[AND]
    means = found.drawn[AND].values[:, 0].mean(axis=1)
    r = np.corrcoef(truth, means)[0, 1]
    assert f"{AND} {r:.3f}" in parsed.sections["recovery"]


def test_keys_versions_and_the_recipe_are_told(parsed):
    origin = parsed.sections["origin"]
    for seed in (22, 11, 5, 1):
        assert f"jax.random.key({seed})" in origin
    for name, version in versions().items():
        assert f"{name} {version} {version}" in origin
    assert "Step(at=0.15)" in parsed.sections["model"]
    assert "Normal(loc=0, scale=1)" in parsed.sections["model"]


def test_the_same_key_gives_the_same_page(written, found):
    assert make_page(found, None) == written.read_text("utf-8")


# What it is made of.


def test_nothing_comes_from_outside(parsed, written):
    sources = parsed.values("src")
    assert len(sources) == 6
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert all(link.startswith("#") for link in parsed.values("href"))
    plain = re.sub(r"base64,[\w+/=]+", "", written.read_text("utf-8"))
    for outside in ("http:", "https:", "url(", "@import", "<link", "<iframe", "<script"):
        assert outside not in plain
    assert not any(name.startswith("on") for _, found in parsed.tags for name in found)
    for source in sources:
        drawn = base64.b64decode(source.split(",")[1]).decode()
        assert all(link.startswith(("#", "data:")) for link in re.findall(r'href="([^"]*)', drawn))


def test_names_are_shown_and_never_become_markup(parsed, written):
    content = written.read_text("utf-8")
    assert SCRIPT not in content
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in content
    assert "script" not in [tag for tag, _ in parsed.tags]
    assert parsed.heads.count(SCRIPT) == parsed.heads.count(AND) == 4
    assert any(SCRIPT in alt for alt in parsed.values("alt"))


def test_titles_and_quotes_are_escaped():
    title, content = '"><b>A & B</b>', page.table("<i>", ["<u>"], [("<s>", "</td>")])
    whole = page.page(title, "<p>", content, {})
    assert whole.count("&quot;&gt;&lt;b&gt;A &amp; B&lt;/b&gt;") == 2
    for markup in ("<b>", "<i>", "<u>", "<s>", "<p></p>"):
        assert markup not in whole
    assert html.element("img", alt='" onload="x').count('"') == 2


# What cannot be made says why.


def test_without_an_observation_the_fit_is_judged_alone(fit, held_out, bare_figures):
    alone = Parsed(make_page(gather(fit, None, held_out), None))
    assert "No verdict" in alone.sections["first"]
    assert "within its bands" in alone.sections["first"]
    for name in ("posterior", "predictions", "evidence", "verdict"):
        assert "No observation was given" in alone.sections[name]
    assert len(alone.values("src")) == 4


def test_without_a_simulator_held_out_runs_serve(fit, x, held_out, bare_figures):
    silent = dataclasses.replace(fit, model=cs.Model(PRIOR, data=cs.Set()), origin=None)
    with_runs = gather(silent, x, held_out)
    assert set(with_runs.missing) == {"predictions", "evidence"}
    assert with_runs.check.verdict == "use as is"
    without = gather(silent, x, None)
    assert set(without.missing) == {*with_runs.missing, "calibration", "recovery", "verdict"}
    said = Parsed(make_page(without, None)).sections
    for name in set(without.missing) - {"evidence"}:
        assert "no simulator" in said[name]
    assert "not judged" in said["first"]
    assert "not kept by the version that made this fit" in said["origin"]


def test_a_learned_likelihood_is_told(found, fit):
    learned = dataclasses.replace(fit, model=cs.Model(PRIOR, _simulate, data=cs.Set()))
    said = observation.log_evidence(dataclasses.replace(found, fit=learned))
    assert "The likelihood is learned" in said
    assert "The likelihood is learned" not in observation.log_evidence(found)


def test_few_runs_judge_what_they_can(fit, x, held_out):
    some = gather(fit, x, held_out[:50])
    assert set(some.missing) == {"verdict", "predictions"}
    assert (
        "takes 200 runs or more that the fit has not seen, and there are 50"
        in (some.missing["verdict"])
    )
    assert some.calibration.table.attrs["simulations"] == 50
    assert some.evidence["log_evidence"].values == pytest.approx(
        exact_log_evidence(x).sum(), abs=0.01
    )
    few = gather(fit, None, held_out[:10])
    assert "takes 20 runs or more" in few.missing["recovery"]


def decay(rng, **theta):
    if theta[AND] > 1.0:
        raise ArithmeticError("no solution")
    return rng.normal(size=(ROWS, 2)) + np.array([theta[SCRIPT], theta[AND]])


@pytest.mark.slow
def test_a_simulator_outside_jax_without_a_likelihood(fit, bare_figures):
    """Runs that fail are left out; there is no evidence to estimate."""
    outside = cs.Model(PRIOR, cs.external(decay), data=cs.Set())
    x = np.stack([np.zeros(ROWS), np.linspace(0.6, 1.2, ROWS)], axis=1).astype(np.float32)
    found = gather(dataclasses.replace(fit, model=outside), x, None, predictive=60)
    assert 20 < found.invalid < 80
    said = Parsed(make_page(found, None)).sections
    assert f"({found.invalid} more failed or were not finite)" in said["calibration"]
    assert "outside JAX: decay" in said["model"]
    made, lost = numbers(said["predictions"])[:2]
    assert made + lost == 60 and lost > 5
    assert "no log-likelihood, and none was learned" in said["evidence"]
    assert "Log evidence, 95 % interval not known" in said["first"]
    assert "The identity cannot be evaluated" in said["verdict"]


def test_runs_of_the_training_key_are_suspected(fit, held_out, bare_figures):
    same = dataclasses.replace(fit.origin, runs_key=held_out.key)
    found = gather(dataclasses.replace(fit, origin=same), None, held_out)
    assert "with the key of the runs that the fit was trained on" in make_page(found, None)


def test_what_cannot_be_reported_is_refused(fit, x, held_out, tmp_path):
    with pytest.raises(ValueError, match="one observation, got a batch"):
        fit.report(tmp_path / "a.html", held_out.x[:2], key=KEY)
    with pytest.raises(ValueError, match="is a folder"):
        fit.report(tmp_path, x, key=KEY)
    narrow = cs.Simulations(held_out.theta, held_out.x[:, :5])
    with pytest.raises(
        ValueError, match=r"x of shape \(10, 2\), but the simulations have \(5, 2\)"
    ):
        fit.report(tmp_path / "a.html", x, key=KEY, simulations=narrow)
    assert not list(tmp_path.iterdir())


# Notebooks.


def test_notebooks_show_the_text_escaped(fit, found, model, held_out):
    for shown in (fit, fit.history, model, held_out, found.check, found.calibration):
        content = shown._repr_html_()
        assert SCRIPT not in content
        assert "".join(Parsed(content).sections.values()) == repr(shown).replace("\n", "", 1)
        assert len(repr(shown).splitlines()) < 12 and "array(" not in repr(shown)


# In a browser.


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.fail(
            f"No browser to look at the report with: none of {', '.join(BROWSERS)} is there. "
            "Install Chromium, on Debian and Ubuntu with `apt-get install chromium`."
        )
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def visits(browser, written):
    """The page without scripts and with them; what it asked for and what was complained of."""
    found = []
    for scripts in (False, True):
        window = browser.new_context(java_script_enabled=scripts).new_page()
        asked, wrong = [], []
        window.on("request", lambda request, asked=asked: asked.append(request.url))
        window.on("console", lambda said, wrong=wrong: wrong.append(said.text))
        window.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
        window.goto(written.as_uri())
        found.append((window, asked, wrong))
    return found


@pytest.fixture
def window(visits):
    return visits[1][0]


@pytest.mark.parametrize("scripts", [False, True])
def test_a_browser_asks_for_nothing_else(visits, written, scripts):
    _, asked, wrong = visits[scripts]
    assert [url for url in asked if not url.startswith("data:")] == [written.as_uri()]
    assert wrong == []


@pytest.mark.parametrize(("width", "scripts"), [(375, False), (375, True), (1280, True)])
def test_a_browser_shows_all_of_it(visits, width, scripts):
    window, _, _ = visits[scripts]
    window.set_viewport_size({"width": width, "height": 800})
    images = window.locator("img")
    assert images.count() == 6
    for image in images.all():
        box = image.bounding_box()
        assert box["width"] > 200 and box["height"] > 100
        assert re.search(r"\d", image.get_attribute("alt"))
    for name in SECTIONS:
        assert window.locator(f"#{name} h2").is_visible()
    if scripts:
        natural = window.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth])")
        assert all(complete and across > 300 for complete, across in natural)
        wide = window.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide[0] <= wide[1] == width
    else:
        assert window.locator("body").bounding_box()["width"] <= width


def test_a_keyboard_reaches_everything(window):
    focused = "document.activeElement"
    window.keyboard.press("Tab")
    assert window.evaluate(f"{focused}.textContent") == "Skip to the report"
    assert window.locator(".skip").bounding_box()["x"] >= 0
    window.keyboard.press("Enter")
    assert window.url.endswith("#report") and window.evaluate(f"{focused}.id") == "report"
    reached = []
    stops = window.locator("main a, main .scroll").count()
    for _ in range(stops):
        window.keyboard.press("Tab")
        reached.append(window.evaluate(f"{focused}.getAttribute('href') || {focused}.ariaLabel"))
    assert reached[:9] == [f"#{name}" for name in window.evaluate(LINKED)]
    assert all(label.startswith(("Figure: ", "Table: ")) for label in reached[9:])
    assert len(set(reached)) == stops == 9 + 6 + 8
    window.locator("nav a").nth(2).press("Enter")
    assert window.url.endswith("#calibration")


LINKED = "[...document.querySelectorAll('main > section[id]')].map(s => s.id)"

CONTRAST = """() => {
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const share = [0.2126, 0.7152, 0.0722];
  const light = c => c.slice(0, 3).reduce((sum, v, i) => sum + share[i] * linear(v / 255), 0);
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  return [...document.body.querySelectorAll("*")]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
    .map(e => [light(rgb(getComputedStyle(e).color)), light(behind(e))])
    .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
}"""
"""The ratio of contrast of every text, by WCAG 2."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(window, scheme):
    window.emulate_media(color_scheme=scheme)
    ratios = window.evaluate(CONTRAST)
    assert len(ratios) > 100 and min(ratios) >= 4.5
    card = window.locator(".card").first
    assert card.evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"
    assert window.evaluate("document.documentElement.lang") == "en"


def test_paper_has_the_figures_and_no_navigation(window):
    window.set_viewport_size({"width": 700, "height": 990})
    window.emulate_media(media="print", color_scheme="dark")
    assert not window.locator("nav").is_visible()
    assert all(image.is_visible() for image in window.locator("img").all())
    # All of a wide table is on the paper.
    cut = "list => list.some(e => getComputedStyle(e).overflowX != 'visible')"
    assert not window.locator(".scroll").evaluate_all(cut)
    paper = window.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")
    assert paper == "rgb(255, 255, 255)"
