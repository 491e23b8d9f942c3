"""The experiments: their cells can be stopped and resumed, and a quick run of each works."""

import csv

import numpy as np
import pytest
from scipy import stats

from consilience.cli import main as cli
from consilience.core import compiling
from consilience.experiments.cells import (
    Block,
    Cell,
    Choice,
    Found,
    plan,
    read_arrays,
    read_rows,
    run_cells,
)
from consilience.experiments.experiment import Experiment, Published, Table
from consilience.experiments.registry import EXPERIMENTS
from consilience.experiments.report import collect, report, standard_error, to_markdown

BLOCKS = (Block("NPE", (64, 128)), Block("SC-NPE", (64, 128), (10, 20), ("paper",)))


def count(cell: Cell) -> Found:
    """A cell that takes no time: its numbers say which it is."""
    value = cell.budget + cell.samples / 100 + cell.seed / 10
    return Found({"mmd": value}, {"mmd": np.full(3, value)})


def test_a_plan_holds_every_cell_once():
    cells = plan([*BLOCKS, Block("NPE", (128, 256))], Choice(), seeds=2)
    assert len(cells) == len(set(cells)) == 2 * (2 * 3 + 4)
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    assert all(cell.samples == 0 for cell in cells if cell.method == "NPE")


def test_a_choice_replaces_what_it_names():
    choice = Choice(budgets=[32], samples=[5], methods=["sc-npe"])
    assert plan(BLOCKS, choice, seeds=1) == [Cell("paper", "SC-NPE", "", 32, 5, 0)]
    only = plan(BLOCKS, Choice(protocols=["default"]), seeds=1)
    assert {(cell.method, cell.protocol) for cell in only} == {("NPE", "default")}


def test_a_method_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no method 'ABC' here, only NPE, SC-NPE"):
        plan(BLOCKS, Choice(methods=["ABC"]), seeds=1)
    with pytest.raises(ValueError, match="at least one seed, got 0"):
        plan(BLOCKS, Choice(), seeds=0)
    with pytest.raises(ValueError, match="K must be 2 or more, got 0"):
        plan(BLOCKS, Choice(samples=[10, 0]), seeds=1)


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path):
    cells, asked = plan(BLOCKS, Choice(), seeds=1), []

    def stops_at_the_third(cell):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(cell)
        return count(cell)

    with pytest.raises(KeyboardInterrupt):
        run_cells(cells, stops_at_the_third, tmp_path, progress=False)
    assert len(read_rows(tmp_path)) == 2
    again = []
    rows = run_cells(
        cells, lambda cell: again.append(cell) or count(cell), tmp_path, progress=False
    )
    assert again == cells[2:]
    assert len(rows) == len(cells)
    assert run_cells(cells, pytest.fail, tmp_path, progress=False) == rows
    with (tmp_path / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["mmd"]) for row in table] == [row["mmd"] for row in rows]
    assert list(table[0])[-2:] == ["seconds", "cpu_seconds"]
    np.testing.assert_array_equal(read_arrays(tmp_path, rows[0])["mmd"], rows[0]["mmd"])


TABLE = Table("mmd", "MMD", limit="0", published=(Published("published", {64: 0.5}),))
SOME = Experiment("some", "Some", BLOCKS, BLOCKS, lambda cell, folder, quick: count(cell), (TABLE,))


def test_a_report_has_means_and_standard_errors(tmp_path):
    rows = SOME.reproduce(tmp_path, Choice(seeds=3, protocols=["paper"]), progress=False)
    text = report(SOME, tmp_path, tmp_path / "report").read_text()
    values = collect(TABLE, rows)["NPE (paper)"][64]
    assert values == [64.0, 64.1, 64.2]
    np.testing.assert_allclose(standard_error(values), 0.1 / np.sqrt(3))
    assert "| *published* | 0.50 |  |" in text
    assert "| NPE (paper) | **64.10 ± 0.06** | **128.10 ± 0.06** |" in text
    assert "| SC-NPE, K = 20 (paper) | 64.30 ± 0.06 |" in text
    assert "Best possible: 0. Lower is better." in to_markdown(TABLE, collect(TABLE, rows))
    assert "| SC-NPE, K = 20 (paper) | **0 ± 0** |" in text
    assert "- NPE (default): 6 of 6 cells" in text and "(paper):" not in text
    assert "18 cells, seeds 0 to 2, 0 CPU minutes. Means" in text
    assert (tmp_path / "report" / "some-1-mmd.png").stat().st_size > 10_000
    with (tmp_path / "report" / "some.csv").open() as file:
        assert {row["seeds"] for row in csv.DictReader(file)} == {"3"}


def test_a_report_on_all_cells_misses_none_and_says_which_kept_their_time(tmp_path):
    rows = SOME.reproduce(tmp_path, progress=False)
    path = next((tmp_path / "cells").glob("*.json"))
    path.write_text(path.read_text().replace("cpu_seconds", "other_seconds"))
    text = report(SOME, tmp_path).read_text()
    assert "Not run" not in text
    assert f"0 CPU minutes in the {len(rows) - 1} that kept their time" in text


def test_a_folder_holds_one_experiment(tmp_path):
    choice = Choice(budgets=[64], methods=["NPE"])
    SOME.reproduce(tmp_path, choice, progress=False)
    with pytest.raises(ValueError, match="holds results of some: pass another folder for some q"):
        SOME.reproduce(tmp_path, choice, quick=True, progress=False)


def test_a_report_of_nothing_says_what_to_do(tmp_path, capsys):
    with pytest.raises(ValueError, match="run `consilience reproduce some"):
        report(SOME, tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "holds no results of an experiment" in capsys.readouterr().err


def test_every_experiment_has_tables_of_what_it_measures():
    for experiment in EXPERIMENTS.values():
        variants = {block.variant for block in experiment.blocks}
        assert {v for table in experiment.tables for v in table.variants} == variants
    assert set(EXPERIMENTS) == {"gmm", "two-moons", "hes1", "source", "sir", "sbibm"}


@pytest.fixture
def cache(monkeypatch):
    """The command line keeps nothing in the user's folder for caches."""
    monkeypatch.setattr(compiling, "keep_compiled", lambda: None)


def test_the_command_says_what_it_can_do(capsys, cache, tmp_path):
    for arguments in (["--help"], ["reproduce", "--help"]):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("--budgets", "--samples", "--quick", *EXPERIMENTS))
    with pytest.raises(SystemExit) as end:
        cli.main(["reproduce", "nothing"])
    assert end.value.code == 2
    out = tmp_path / "results"
    assert cli.main(["reproduce", "gmm", "--methods", "ABC", "--out", str(out)]) == 2
    assert "only NPE, SC-NPE" in capsys.readouterr().err
    assert not out.exists()


def run_quick(name: str, folder) -> dict[str, dict]:
    """A quick run from the command line, its report, and the rows by method."""
    assert cli.main(["reproduce", name, "--quick", "--out", str(folder)]) == 0
    assert cli.main(["report", str(folder)]) == 0
    return {row["method"]: row for row in read_rows(folder)}


@pytest.mark.slow
def test_quick_mixture_self_consistency_helps(cache, tmp_path):
    rows = run_quick("gmm", tmp_path)
    assert rows["SC-NPE"]["mmd"] < 0.7 * rows["NPE"]["mmd"]
    assert (tmp_path / "gmm-draws.png").exists()
    assert (tmp_path / "gmm-ranks-paper-npe.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["source", "two-moons", "hes1", "sir"])
def test_quick_runs_end_with_numbers(name, cache, tmp_path):
    rows = run_quick(name, tmp_path)
    assert set(rows) == {block.method for block in EXPERIMENTS[name].quick}
    for row in rows.values():
        if name == "hes1":
            # The negative entropy of the prior: whoever learns something is below it.
            gammas = stats.gamma([2, 10, 2, 2], scale=[1, 1, 0.02, 0.02])
            assert row["loss"] < gammas.entropy().sum()
        else:
            assert 0.0 < row["mmd"] < 5.0
        assert "(paper) |" in (tmp_path / f"{name}.md").read_text()
