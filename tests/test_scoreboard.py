"""The scoreboard of the SBI benchmark: its classifier, its files, its cells and its page."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from sklearn.model_selection import KFold, cross_val_score
from sklearn.neural_network import MLPClassifier

from consilience.cli import main as cli
from consilience.core import compiling
from consilience.experiments import sbibm
from consilience.experiments.cells import Cell, Choice, read_rows
from consilience.experiments.classifier import c2st
from consilience.experiments.published import best, read_published
from consilience.experiments.sbibm_page import sections
from consilience.tasks.sbibm.registry import TASKS
from tests.conftest import TINY, quick

KEY = jax.random.key(0)


def scikit_learn(reference, draws, seed: int = 1) -> float:
    """The benchmark's test as its settings say, by scikit-learn."""
    loc, scale = reference.mean(axis=0), reference.std(axis=0, ddof=1)
    points = (np.concatenate([reference, draws]) - loc) / scale
    d = points.shape[1]
    network = MLPClassifier((10 * d, 10 * d), max_iter=1000, random_state=seed)
    sides = np.repeat([0, 1], [len(reference), len(draws)])
    folds = KFold(5, shuffle=True, random_state=seed)
    return float(cross_val_score(network, points, sides, cv=folds).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shift", "widen", "d", "n"), [(0.0, 1.0, 2, 1000), (0.4, 1.0, 2, 1000), (0.0, 1.5, 3, 503)]
)
def test_the_classifier_agrees_with_scikit_learns(shift, widen, d, n):
    """Within the noise of their random starts and folds; the last n is no multiple of a batch."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(n, d)), shift + widen * rng.normal(size=(n, d))
    theirs = [scikit_learn(a, b, seed) for seed in (1, 2)]
    ours = [c2st(a, b, key=jax.random.key(seed)) for seed in (1, 2)]
    assert abs(np.mean(ours) - np.mean(theirs)) < 0.025


def test_the_classifier_standardises_by_the_reference():
    """Scales apart by a million would hide a shift from a network that sees them as they are."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(500, 2)), rng.normal([0.0, 3.0], size=(500, 2))
    scale = np.array([1e6, 1.0])
    assert c2st(scale * a, scale * b, key=KEY) > 0.9


def test_the_classifier_refuses_what_it_cannot_compare():
    a = np.zeros((200, 2))
    with pytest.raises(ValueError, match=r"of one dimension, got \(200, 2\) and \(200, 3\)"):
        c2st(a, np.zeros((200, 3)), key=KEY)
    with pytest.raises(ValueError, match="NaN or infinite"):
        c2st(a, np.full((200, 2), np.nan), key=KEY)
    with pytest.raises(ValueError, match="100 draws or more a side, got 200 and 20"):
        c2st(a, a[:20], key=KEY)


PUBLISHED = """task,method,simulations,mean_c2st,cases
two_moons,sbibm NPE,100,0.90,10
two_moons,vetter2025 npe_ensemble/nsf,100,0.80,50
two_moons,vetter2025 TSNPE-PF (read from a figure),100,0.60,
two_moons,sbibm NLE,100,0.55,10
"""


def write_data(folder, published: str = PUBLISHED):
    """Files as the benchmark's: two observations a task."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, task in TASKS.items():
        made = task.observations()
        np.savez(
            folder / f"{name}.npz",
            observations=made.observations[:2],
            parameters=made.parameters[:2],
            reference=np.repeat(made.parameters[:2, None], 1000, axis=1),
        )
    (folder / "published.csv").write_text(published)
    return folder


def test_published_figures_are_amortized_or_not(tmp_path):
    scores = read_published(write_data(tmp_path))
    assert best(scores, "two_moons", 100).method == "vetter2025 npe_ensemble/nsf"
    assert best(scores, "two_moons", 100, amortized=False).mean_c2st == 0.55
    assert best(scores, "two_moons", 1000) is None
    write_data(tmp_path, "task,method\n")
    with pytest.raises(ValueError, match="must have the columns task, method, simulations, mean"):
        read_published(tmp_path)
    write_data(tmp_path, PUBLISHED.replace("0.90", "much"))
    with pytest.raises(ValueError, match=r"published\.csv, line 2: could not convert"):
        read_published(tmp_path)


def test_all_tasks_and_budgets_are_planned_in_two_leagues():
    cells = sbibm.EXPERIMENT.cells()
    assert len(cells) == 6 * 3 * 3 * 3
    assert {cell.variant for cell in cells} == set(TASKS)
    some = sbibm.EXPERIMENT.cells(Choice(budgets=[50], methods=["npe"], seeds=1))
    assert [cell.variant for cell in some] == list(TASKS)


def test_results_of_other_observations_are_not_mixed(tmp_path):
    data, folder = write_data(tmp_path / "data"), tmp_path / "out"
    sbibm.open_data(folder, data)
    sbibm.open_data(folder, data)
    assert len(json.loads((folder / "source.json").read_text())) == 6
    with pytest.raises(ValueError, match="and this run has observations made by this library"):
        sbibm.open_data(folder, None)
    (data / "sir.npz").unlink()
    with pytest.raises(ValueError, match=r"pass the folder that has sir\.npz with --data"):
        sbibm.open_data(tmp_path / "other", data)
    assert not (tmp_path / "other").exists()


@pytest.fixture
def small(monkeypatch):
    """Fits of a second: what a cell measures is the same for any."""

    def small_fit(model, sims, *, key, progress, self_consistency=None):
        assert self_consistency in (None, False) and not progress
        return quick(model, sims, key=key, posterior=TINY)

    monkeypatch.setattr(sbibm, "fit", small_fit)
    monkeypatch.setattr(compiling, "keep_compiled", lambda: None)
    monkeypatch.setattr(sbibm, "c2st", functools.partial(c2st, epochs=20))


def test_a_quick_run_has_all_measures_and_a_page(small, tmp_path, capsys):
    data, out = write_data(tmp_path / "data"), tmp_path / "out"
    command = ["reproduce", "sbibm", "--quick", "--out", str(out), "--data", str(data)]
    assert cli.main(command) == 0
    rows = {row["method"]: row for row in read_rows(out)}
    assert set(rows) == {"default", "NPE", "exact"}
    for method, row in rows.items():
        assert np.isfinite(row["log_density"]) and row["fit_seconds"] >= 0
        assert ("c2st_corrected" in row) == (method == "exact")
        # All draws of the reference are one point: no posterior looks like that.
        assert row["c2st"] == pytest.approx((row["c2st_1"] + row["c2st_2"]) / 2)
        assert row["c2st"] > 0.7
    for file in data.iterdir():
        file.unlink()
    assert cli.main(["report", str(out), "--out", str(tmp_path / "page")]) == 0
    text = (tmp_path / "page" / "sbibm.md").read_text()
    assert "Made by `consilience reproduce sbibm --quick`" in text and "seeds 0 to 0" in text
    assert "1,000 draws a side, means over 2 observations" in text
    assert "Observations and reference draws: the benchmark's files." in text
    assert "0.800 (vetter2025 npe_ensemble/nsf)" in text
    assert "## Without the likelihood" in text and "## With the likelihood" in text
    assert "two_moons: C2ST" not in text and "Not run" not in text
    assert (tmp_path / "page" / "sbibm.csv").read_text().count("\n") > 6
    assert cli.main([*command[:-2]]) == 2
    assert "pass the same files with --data" in capsys.readouterr().err


def test_problems_of_our_own_are_made_once(tmp_path):
    first = sbibm.problem("gaussian_linear", tmp_path, None)
    assert first.reference.shape == (10, 10_000, 10)
    again = sbibm.problem("gaussian_linear", tmp_path, None)
    np.testing.assert_array_equal(first.reference, again.reference)


def test_files_are_for_this_experiment_alone(tmp_path, capsys):
    arguments = ["reproduce", "gmm", "--out", str(tmp_path / "out"), "--data", str(tmp_path)]
    assert cli.main(arguments) == 2
    assert "The experiment gmm takes no files: leave --data out." in capsys.readouterr().err


def row(method: str, seed: int, **numbers: float) -> dict:
    cell = Cell("default", method, "two_moons", 100, 0, seed)
    return {**dataclasses.asdict(cell), **numbers}


def test_the_page_says_what_is_better_and_what_is_worse(tmp_path):
    rows = [
        *(row("default", seed, c2st=0.70 + 0.02 * seed, log_density=1.0) for seed in range(3)),
        *(row("NPE", seed, c2st=0.60, log_density=0.5) for seed in range(3)),
        row("exact", 0, c2st=0.58, c2st_corrected=0.50, log_density=2.0),
    ]
    alone = "\n".join(sections(rows, tmp_path))
    assert "No figures of others are shown" in alone
    assert "reference draws: made by this library." in alone
    assert "| two_moons |  | 0.600 ± 0.000 | 0.720 ± 0.012 | **worse** |" in alone
    write_data(tmp_path)
    text = "\n".join(sections(rows, tmp_path))
    ours = "0.600 ± 0.000 | 0.720 ± 0.012 | better, **worse** |"
    assert f"| 0.800 (vetter2025 npe_ensemble/nsf) | {ours}" in text
    assert "| 0.550 (sbibm NLE) | 0.580 | 0.500 | **worse**, better |" in text
    assert "| two_moons | 0.50 ± 0.00 | 1.00 ± 0.00 | 2.00 |" in text
