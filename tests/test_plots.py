"""Figures: what is drawn is the data, every case can be read, and nothing is cut off."""

import io
import itertools
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_hex
from matplotlib.text import Text
from scipy import stats

from consilience import plots
from consilience.plots import BLUE, ORANGE
from consilience.posterior.history import History

LONG = "log_transition_rate_between_hidden_states"


def history(epochs=40, *, start=None, best=None, **more):
    """Losses that fall; self-consistency from the epoch `start` on."""
    epoch = np.arange(1, epochs + 1)
    posterior = 1.0 + np.exp(-epoch / 8)
    terms = {"loss": posterior, "posterior": posterior, "skipped": np.zeros(epochs)}
    if start is not None:
        terms["consistency"] = np.where(epoch >= start, 2.0 / epoch, 0.0)
        terms["dropped"] = np.full(epochs, 7.0)
    return History(terms | more, best or {"posterior": epochs}, "finished", 1.0, 100)


def posterior(*sizes, observations=None, n=500, seed=0, name="theta"):
    """Standard normal draws of `mu`, a number, and of an array."""
    rng = np.random.default_rng(seed)
    lead, dims = ((1, n), ["chain", "draw"])
    if observations is not None:
        lead, dims = (observations, *lead), ["observation", *dims]
    own = [f"{name}_dim_{i}" for i in range(len(sizes))]
    return xr.Dataset(
        {
            "mu": (dims, rng.normal(size=lead)),
            name: ([*dims, *own], rng.normal(size=(*lead, *sizes))),
        }
    )


def calibration(quantities=2, *, draws=99, simulations=200, outside=()):
    """Uniform ranks, but for the quantities outside, where they heap up at the ends."""
    rng = np.random.default_rng(1)
    shape = np.where(np.isin(np.arange(quantities), outside), 0.4, 1.0)[:, None]
    ranks = np.floor(rng.beta(shape, shape, (quantities, simulations)) * (draws + 1)).astype(int)
    point, level = np.linspace(0.01, 1.0, 100), np.linspace(0.05, 0.95, 19)
    ecdf = (ranks[..., None] <= point * draws).mean(axis=1)
    covered = (np.abs(2 * ranks[..., None] / draws - 1) <= level).mean(axis=1)
    wide, wide_level = (3 * np.sqrt(at * (1 - at) / simulations) for at in (point, level))
    return xr.Dataset(
        {
            "ranks": (("quantity", "simulation"), ranks),
            "ecdf": (("quantity", "point"), ecdf),
            "lower": ("point", point - wide),
            "upper": ("point", point + wide),
            "coverage": (("quantity", "level"), covered),
            "coverage_lower": ("level", level - wide_level),
            "coverage_upper": ("level", level + wide_level),
            "error": ("quantity", np.abs(covered - level).mean(axis=1)),
            "inside": ("quantity", ~np.isin(np.arange(quantities), outside)),
        },
        coords={
            "point": point,
            "level": level,
            "quantity": [f"{LONG}[{i}, 0]" if i == 1 else f"q{i}" for i in range(quantities)],
        },
        attrs={"draws": draws, "simulations": simulations},
    )


def scores(*factors):
    rng = np.random.default_rng(3)
    by_budget = lambda a: {n: list(a / n * rng.uniform(0.5, 2, 4)) for n in (256, 300, 1024, 9000)}  # noqa: E731
    return {f"method {i}": by_budget(a) for i, a in enumerate(factors)}


def labelled(axis, label):
    """What is drawn under that label, which must be one thing."""
    found = [artist for artist in axis.get_children() if artist.get_label() == label]
    assert len(found) == 1, f"{len(found)} artists are labelled {label!r}"
    return found[0]


def legend(axis):
    return [text.get_text() for text in axis.figure.legends[0].get_texts()]


def notes(axis):
    return " ".join(text.get_text() for text in axis.texts)


def values_of(curve):
    return np.asarray(curve.get_xdata()), np.asarray(curve.get_ydata())


RNG = np.random.default_rng(2)
SERIES, ROWS = RNG.normal(size=(100, 30, 3)), RNG.normal(size=(100, 20, 2))
CASES = {
    "side_by_side": lambda: plots.side_by_side(
        {"a": RNG.normal(size=(50, 2)), "b": RNG.normal(size=(50, 2))}, truth=np.zeros(2)
    ),
    "losses, one term": lambda: plots.losses(history()),
    "losses, one epoch": lambda: plots.losses(history(1)),
    "losses, all": lambda: plots.losses(
        history(
            60,
            start=50,
            best={"posterior": 30, "likelihood": 40},
            likelihood=np.linspace(2, 1, 60),
            prior=np.full(60, 0.5),
            unlabeled=np.where(np.arange(60) > 50, 0.1, 0.0),
            validation=np.linspace(3, 2, 60),
        )
    ),
    "pairs, one": lambda: plots.pairs(posterior(2), names=["mu"], truth={"mu": 0.3}),
    "pairs, long names": lambda: plots.pairs(
        posterior(2, name=LONG), reference=posterior(2, name=LONG)
    ),
    "pairs, six": lambda: plots.pairs(
        posterior(5), reference=posterior(5, seed=1), truth={"mu": 0.0, "theta": np.zeros(5)}
    ),
    "recovery": lambda: plots.recovery(
        posterior(2, 2, observations=20, name=LONG),
        {"mu": RNG.normal(size=20), LONG: RNG.normal(size=(20, 2, 2))},
    ),
    **{
        f"{function.__name__}, {n}": lambda function=function, n=n: function(
            calibration(n, outside=[n - 1])
        )
        for function, n in (
            *((plots.ecdf_difference, 10), (plots.rank_histogram, 1)),
            *((plots.rank_histogram, 4), (plots.coverage, 1), (plots.coverage, 10)),
        )
    },
    "predictive, series": lambda: plots.predictive(SERIES[0], SERIES[1:]),
    "predictive, rows": lambda: plots.predictive(ROWS[0], ROWS[1:], kind="rows"),
    "predictive, mixed": lambda: plots.predictive(
        {"count": 4, LONG: SERIES[0]}, {"count": np.arange(99) % 9, LONG: SERIES[1:]}
    ),
    "identity, one": lambda: plots.identity(RNG.normal(size=(1, 200))),
    "identity, fits": lambda: plots.identity(
        {name: RNG.normal(size=(12, 200)) for name in ("NPE", "self-consistent", "a third one")},
        titles=[f"hospital number {i}" for i in range(12)],
    ),
    "budgets": lambda: plots.budgets(scores(1.0, 2.0, 3.0), floor=1e-4),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_cut_off_or_overlaps(case):
    axes = np.atleast_1d(CASES[case]()).ravel()
    figure = axes[0].figure
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO(), format="png")
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) > -0.02 and box.x1 < width + 0.02 and box.y1 < height + 0.02
    shown = [axis for axis in figure.axes if axis.axison]
    texts = [text for axis in shown for text in (axis.title, axis.xaxis.label, axis.yaxis.label)]
    texts += [text for axis in shown for text in axis.texts]
    texts += [text for legend in figure.legends for text in legend.findobj(Text)]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert boxes
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert any(axis.get_xlabel() for axis in shown) and width <= 12


def test_matplotlib_is_imported_when_needed_and_pyplot_never(monkeypatch):
    origins = [getattr(value, "__module__", None) or "" for value in vars(plots).values()]
    assert not any(origin.startswith("matplotlib") for origin in origins)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would now fail
    plots.budgets({"a": {10: [1.0]}}).figure.savefig(io.BytesIO())


def test_ten_panels_fill_three_rows_labelled_on_the_outside():
    axes = plots.coverage(calibration(10))
    assert len(axes) == len(axes[0].figure.axes) == 10
    assert axes[0].get_gridspec().get_geometry() == (3, 4)
    assert [i for i, axis in enumerate(axes) if axis.get_ylabel()] == [0, 4, 8]
    # The last two of the second row have no panel below.
    assert [i for i, axis in enumerate(axes) if axis.get_xlabel()] == [6, 7, 8, 9]
    assert axes[6].xaxis.get_tick_params()["labelbottom"]
    assert axes[0].get_title() == "q0"
    assert axes[1].get_title().replace("\n", "") == f"{LONG}[1, 0]"


def test_losses_are_the_terms_without_counts():
    record = history(validation=np.linspace(2, 1, 40))
    axes = plots.losses(record)
    assert len(axes) == 1
    assert legend(axes[0]) == ["loss", "posterior", "validation"]
    for name in legend(axes[0]):
        x, y = values_of(labelled(axes[0], name))
        np.testing.assert_array_equal(x, np.arange(1, 41))
        np.testing.assert_array_equal(y, record.terms[name])


def test_losses_mark_where_self_consistency_starts():
    record = history(start=17)
    top, below = plots.losses(record)
    assert below.get_yscale() == "log" and top.get_yscale() == "linear"
    drawn = values_of(labelled(below, "consistency"))[1]
    assert np.isnan(drawn[:16]).all()
    np.testing.assert_array_equal(drawn[16:], record.terms["consistency"][16:])
    assert "consistency" not in [line.get_label() for line in top.lines]
    assert legend(top) == ["loss", "posterior", "consistency"]
    for axis in (top, below):
        upright = [line for line in axis.lines if list(line.get_xdata()) == [17, 17]]
        assert len(upright) == 1
    assert notes(top) == "self-consistency on" and top.texts[0].xy[0] == 17


def test_losses_without_self_consistency_have_no_mark():
    (axis,) = plots.losses(history(start=99))
    assert not axis.texts and "consistency" not in legend(axis)


@pytest.mark.parametrize(("epoch", "marked"), [(25, True), (40, False), (0, False)])
def test_losses_mark_the_kept_epoch_unless_it_is_the_last(epoch, marked):
    record = history(best={"posterior": epoch}, validation=np.linspace(3, 2, 40))
    (axis,) = plots.losses(record)
    assert ("kept posterior" in legend(axis)) == marked
    if marked:
        x, y = values_of(labelled(axis, "kept posterior"))
        assert (x[0], y[0]) == (25, record.terms["validation"][24])


def test_losses_keep_the_scale_of_the_late_epochs():
    record = history()
    record.terms["loss"] = record.terms["loss"].copy()
    record.terms["loss"][0] = 1e4
    (axis,) = plots.losses(record)
    assert axis.get_ylim()[1] < 3


def test_pairs_show_draws_reference_and_truth():
    draws, reference = posterior(2), posterior(2, seed=1)
    axes = plots.pairs(
        draws, reference=reference, truth={"mu": 0.5, "theta": jnp.array([1.0, 2.0])}
    )
    assert axes.shape == (3, 3)
    assert [[axis.axison for axis in row] for row in axes] == np.tri(3, dtype=bool).tolist()
    assert [axis.get_xlabel() for axis in axes[-1]] == ["mu", "theta[0]", "theta[1]"]
    assert [axis.get_ylabel() for axis in axes[:, 0]] == ["density", "theta[0]", "theta[1]"]
    x, y = values_of(axes[2, 0].lines[0])
    np.testing.assert_array_equal(x, draws["mu"].values[0])
    np.testing.assert_array_equal(y, draws["theta"].values[0, :, 1])
    star = labelled(axes[2, 0], "truth")
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (0.5, 2.0)
    assert list(axes[1, 1].lines[0].get_xdata()) == [1.0, 1.0]
    assert to_hex(labelled(axes[0, 0], "reference").get_edgecolor()) == ORANGE
    assert legend(axes[0, 0]) == ["draws", "reference", "truth"]


def test_pairs_outlines_hold_their_share_of_the_reference():
    reference = posterior(1, n=20_000)
    axis = plots.pairs(posterior(1), reference=reference)[1, 0]
    points = np.stack([reference["mu"].values[0], reference["theta"].values[0, :, 0]], axis=1)
    (outlines,) = [part for part in axis.collections if hasattr(part, "levels")]
    # The lower level comes first: the wider outline.
    held = [path.contains_points(points).mean() for path in outlines.get_paths()]
    np.testing.assert_allclose(held, [0.95, 0.5], atol=0.03)


def test_pairs_take_all_chains():
    one = posterior(1, n=100)
    both = xr.concat([one, one + 9], dim="chain")
    assert len(plots.pairs(both)[1, 0].lines[0].get_xdata()) == 200


def test_pairs_of_chosen_names():
    draws = posterior(5, 2)
    axes = plots.pairs(draws, names=["theta[4, 1]", "mu"])
    assert [axis.get_xlabel() for axis in axes[-1]] == ["theta[4, 1]", "mu"]
    assert plots.pairs(posterior(2), names=["theta"]).shape == (2, 2)
    with pytest.raises(ValueError, match=r"draws has no thet, it has mu, theta\[0, 0\]"):
        plots.pairs(draws, names=["mu", "thet"])


def test_pairs_refuse_what_they_cannot_show():
    with pytest.raises(ValueError, match=r"choose it with draws.isel\(observation=0\)"):
        plots.pairs(posterior(2, observations=3))
    with pytest.raises(ValueError, match=r"9 components .* choose with names=.* theta\[7\]"):
        plots.pairs(posterior(8))
    with pytest.raises(ValueError, match=r"truth has no mu, it has mu\[0\], theta\[0\]"):
        plots.pairs(posterior(1), truth={"mu": np.zeros(1), "theta": np.zeros(1)})
    with pytest.raises(ValueError, match=r"reference has no theta\[1\]"):
        plots.pairs(posterior(2), reference=posterior(1))


def test_recovery_shows_medians_intervals_and_correlation():
    rng = np.random.default_rng(0)
    draws = posterior(2, observations=30)
    theta = rng.normal(size=(30, 2))
    draws["theta"] = draws["theta"] * 0.1 + theta[:, None, None]
    axes = plots.recovery(draws, {"mu": rng.normal(size=30), "theta": theta})
    assert [axis.get_title() for axis in axes] == ["mu", "theta[0]", "theta[1]"]
    samples = draws["theta"].values[:, 0, :, 1]
    x, y = values_of(axes[2].lines[0])
    np.testing.assert_array_equal(x, theta[:, 1])
    np.testing.assert_allclose(y, np.median(samples, axis=1))
    ends = np.array([segment[:, 1] for segment in axes[2].collections[0].get_segments()])
    np.testing.assert_allclose(ends, np.quantile(samples, (0.025, 0.975), axis=1).T)
    diagonal = values_of(axes[2].lines[1])
    np.testing.assert_array_equal(*diagonal)
    assert notes(axes[2]) == f"r = {np.corrcoef(x, y)[0, 1]:.2f}" == "r = 1.00"
    assert notes(axes[0]) != "r = 1.00"


def test_recovery_of_one_observation_has_no_correlation():
    draws = posterior(1, observations=1)
    axes = plots.recovery(draws, {"mu": np.zeros(1), "theta": np.zeros((1, 1))})
    assert notes(axes[0]) == ""


def test_recovery_refuses_a_truth_that_does_not_fit():
    draws = posterior(2, observations=5)
    with pytest.raises(ValueError, match=r"truth has no theta\[0\], theta\[1\], it has mu"):
        plots.recovery(draws, {"mu": np.zeros(5)})
    with pytest.raises(ValueError, match="draws for 5 observations, but truth has 4"):
        plots.recovery(draws, {"mu": np.zeros(4), "theta": np.zeros((4, 2))})


def test_ecdf_difference_is_the_data_minus_the_diagonal():
    data = calibration(3, outside=[1])
    axes = plots.ecdf_difference(data)
    point = data["point"].values
    for i, axis in enumerate(axes):
        curve = axis.lines[-1]
        np.testing.assert_allclose(values_of(curve)[1], data["ecdf"].values[i] - point)
        assert curve.get_color() == (ORANGE if i == 1 else BLUE)
        # In grey, the line tells them apart.
        assert curve.get_linestyle() == ("--" if i == 1 else "-")
        assert notes(axis) == ("outside" if i == 1 else "")
    band = labelled(axes[0], "simultaneous 95 % band").get_paths()[0].vertices
    assert np.isclose(band[:, 1].max(), (data["upper"].values - point).max())
    assert np.isclose(band[:, 1].min(), (data["lower"].values - point).min())
    # Room for the note above band and curves.
    top = max(band[:, 1].max(), axes[1].lines[-1].get_ydata().max())
    assert axes[0].get_ylim()[1] > 1.2 * top


@pytest.mark.parametrize(("draws", "even"), [(99, True), (1000, True), (100, False), (2, True)])
def test_rank_histogram_counts_all_ranks_in_equal_bins_where_it_can(draws, even):
    data = calibration(2, draws=draws, simulations=400, outside=[0])
    axes = plots.rank_histogram(data)
    bars = axes[1].patches[-1].get_data()
    assert bars.values.sum() == 400
    assert (bars.edges[0], bars.edges[-1]) == (-0.5, draws + 0.5)
    widths = np.diff(bars.edges)
    assert np.ptp(widths) == (0 if even else 1)
    band = labelled(axes[1], "95 % range of a single bar").get_data()
    share = widths / (draws + 1)
    np.testing.assert_array_equal(band.baseline, stats.binom(400, share).ppf(0.025))
    np.testing.assert_array_equal(band.values, stats.binom(400, share).ppf(0.975))
    assert to_hex(axes[0].patches[-1].get_edgecolor()) == ORANGE and notes(axes[0]) == "outside"
    assert to_hex(axes[1].patches[-1].get_edgecolor()) == BLUE and notes(axes[1]) == ""


def test_coverage_is_empirical_against_nominal():
    data = calibration(2, outside=[1])
    axes = plots.coverage(data)
    for i, axis in enumerate(axes):
        x, y = values_of(axis.lines[-1])
        np.testing.assert_array_equal(x, data["level"])
        np.testing.assert_array_equal(y, data["coverage"][i])
        assert axis.lines[-1].get_color() == (ORANGE if i == 1 else BLUE)
        assert f"calibration error {float(data['error'][i]):.3f}" in notes(axis)
        assert ("outside" in notes(axis)) == (i == 1)
    np.testing.assert_array_equal(*values_of(axes[0].lines[0]))
    data["coverage_inside"] = ("quantity", [False, True])
    judged = [axis.lines[-1].get_color() for axis in plots.coverage(data)]
    assert judged == [ORANGE, BLUE], "its own verdict goes before that of the ranks"


def test_predictive_series_show_quantiles_and_the_observation():
    x, draws = SERIES[0], SERIES[1:]
    axes = plots.predictive(jnp.asarray(x), draws)
    assert [axis.get_title() for axis in axes] == ["channel 0", "channel 1", "channel 2"]
    np.testing.assert_allclose(values_of(labelled(axes[1], "observed"))[1], x[:, 1], rtol=1e-6)
    median = values_of(labelled(axes[1], "median"))[1]
    np.testing.assert_allclose(median, np.median(draws[:, :, 1], axis=0))
    for label, share in (("95 %", 0.95), ("50 %", 0.5)):
        heights = labelled(axes[1], label).get_paths()[0].vertices[:, 1]
        ends = np.quantile(draws[:, :, 1], (0.5 - share / 2, 0.5 + share / 2), axis=0)
        np.testing.assert_allclose([heights.min(), heights.max()], [ends.min(), ends.max()])
    (single,) = plots.predictive(x[:, 0], draws[:, :, 0])
    assert single.get_title() == "" and single.get_xlabel() == "index"


def test_predictive_rows_are_pooled_with_the_observed_as_a_rug():
    axes = plots.predictive(ROWS[0], ROWS[1:], kind="rows")
    assert len(axes) == 2 and axes[0].get_xlabel() == "value"
    rug = labelled(axes[1], "observed")
    np.testing.assert_array_equal(rug.get_xdata(), ROWS[0, :, 1])
    assert rug.get_marker() == "|"
    area = sum(bar.get_width() * bar.get_height() for bar in axes[1].patches)
    assert np.isclose(area, 1.0)


def test_predictive_numbers_are_a_histogram_and_a_line():
    counts = np.random.default_rng(0).poisson(5, 300)
    axes = plots.predictive({"count": 7, "y": SERIES[0]}, {"count": counts, "y": SERIES[1:]})
    assert [axis.get_title() for axis in axes] == ["count", "y[0]", "y[1]", "y[2]"]
    assert list(labelled(axes[0], "observed").get_xdata()) == [7, 7]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axes[0].patches]
    np.testing.assert_allclose(centres, np.round(centres))


def test_predictive_refuses_draws_of_another_shape():
    with pytest.raises(ValueError, match=r"got draws of \(99, 30\) for x of \(30, 3\)"):
        plots.predictive(SERIES[0], SERIES[1:, :, 0])
    with pytest.raises(ValueError, match=r"for x of \(30, 3\) in 'y'"):
        plots.predictive({"y": SERIES[0]}, {"z": SERIES[1:]})
    with pytest.raises(ValueError, match="at most two axes"):
        plots.predictive(np.zeros((2, 2, 2)), np.zeros((5, 2, 2, 2)))


def test_identity_shows_spread_mean_and_median_at_zero():
    values = np.random.default_rng(0).gamma(2.0, 1.0, (3, 2000)) + np.array([[0], [50], [-9]])
    (axis,) = plots.identity(values, titles=["a", "b", "c"])
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a", "b", "c"]
    assert axis.get_xlabel() == "log evidence estimate minus its median (nats)"
    assert axis.get_ylim()[0] > axis.get_ylim()[1], "the first is on top"
    points, interval, mean = (values_of(line) for line in axis.lines[3:6])
    centred = values[1] - np.median(values[1])
    assert np.isin(points[0], centred).all() and (np.abs(points[1] - 1) < 0.5).all()
    np.testing.assert_allclose(interval[0], np.quantile(centred, (0.025, 0.975)))
    assert list(interval[1]) == [1, 1] and np.isclose(mean[0][0], centred.mean())
    (raw,) = plots.identity(values, centre=False)
    assert np.isclose(raw.lines[5].get_xdata()[0], values[1].mean())
    assert "median" not in raw.get_xlabel()


def test_identity_of_several_fits_shares_the_axis():
    wide, flat = np.random.default_rng(0).normal(size=(2, 4, 100)) * [[[5.0]], [[0.01]]]
    wide[0, 0], wide[1] = -np.inf, -np.inf
    axes = plots.identity({"NPE": wide, "self-consistent": flat})
    assert [axis.get_title() for axis in axes] == ["NPE (101 not finite)", "self-consistent"]
    assert axes[0].get_xlim() == axes[1].get_xlim()
    assert len(axes[0].lines) == 9 and len(axes[1].lines) == 12


def test_identity_refuses_unequal_numbers_of_datasets():
    with pytest.raises(ValueError, match=r"got \(2, 5\), \(3, 5\) and 2 titles"):
        plots.identity({"a": np.zeros((2, 5)), "b": np.zeros((3, 5))})
    with pytest.raises(ValueError, match=r"got \(2, 5\) and 1 titles"):
        plots.identity(np.zeros((2, 5)), titles=["a"])


def test_budgets_show_means_seeds_and_the_floor():
    results = scores(1.0, 3.0)
    axis = plots.budgets(results, floor=0.001, ylabel="squared MMD")
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("simulations", "squared MMD")
    for name, by_budget in results.items():
        x, y = values_of(labelled(axis, name))
        assert list(x) == [256, 300, 1024, 9000]
        np.testing.assert_allclose(y, [np.mean(by_budget[n]) for n in x])
    seeds = values_of(axis.lines[1])
    assert len(seeds[0]) == 16
    np.testing.assert_array_equal(seeds[1], np.concatenate(list(results["method 0"].values())))
    floor = labelled(axis, "floor")
    assert set(floor.get_ydata()) == {0.001} and floor.get_linestyle() == ":"
    # 256 and 300 would be written over each other.
    assert [text.get_text() for text in axis.get_xticklabels()] == ["256", "1,024", "9,000"]


def test_budgets_with_scores_below_zero_have_a_straight_axis():
    axis = plots.budgets({"a": {256: [0.0, 1.0], 512: [-3.0]}})
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "linear")
    np.testing.assert_allclose(values_of(labelled(axis, "a"))[1], [0.5, -3.0])


def test_budgets_draw_every_method_and_tell_them_apart():
    axis = plots.budgets(scores(*range(1, 10)))
    lines = axis.lines[::2]
    assert len(lines) == 9
    looks = {(line.get_color(), line.get_marker()) for line in lines}
    assert len(looks) == len({look[1] for look in looks}) == len(plots.STYLES)


def test_side_by_side_is_square_and_marks_the_truth():
    samples = {name: RNG.normal(size=(50, 2)) * [1, 4] for name in ("learned", "exact")}
    axes = plots.side_by_side(samples, truth=np.array([0.5, 1.0]))
    assert [axis.get_title() for axis in axes] == ["learned", "exact"]
    assert np.isclose(np.ptp(axes[0].get_xlim()), np.ptp(axes[0].get_ylim()))
    np.testing.assert_array_equal(np.stack(values_of(axes[1].lines[0]), 1), samples["exact"])
    star = axes[0].lines[1]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (0.5, 1.0)


BROKEN = ("$\\frac{a$", "$", "_$^", "$$", "$_^$", "a$b", "$x$ and $", "\\$5$", "$x\n$y")


def test_broken_mathtext_in_a_name_is_shown_as_it_is():
    """A formula that Matplotlib cannot read fails when the figure is drawn, not when it is made."""
    name = BROKEN[0]
    judged = calibration(2).assign_coords(quantity=[name, "other"])
    made = [
        plots.pairs(posterior(2, name=name)),
        plots.recovery(
            posterior(2, observations=5, name=name), {"mu": np.zeros(5), name: np.zeros((5, 2))}
        ),
        plots.coverage(judged),
        plots.predictive({name: SERIES[0]}, {name: SERIES[1:]}),
        plots.identity({name: RNG.normal(size=(2, 50))}, titles=[name, name]),
        plots.budgets({name: {10: [1.0]}}, ylabel=name),
        plots.side_by_side({name: RNG.normal(size=(5, 2))}, names=(name, name)),
    ]
    for axes in made:
        drawn = io.BytesIO()
        np.ravel(axes)[0].figure.savefig(drawn, format="svg")
        assert drawn.getvalue().rstrip().endswith(b"</svg>")


def test_a_name_is_drawn_with_its_dollar_signs():
    axis = plots.budgets({name: {10: [1.0]} for name in BROKEN})
    for i, name in enumerate(BROKEN):
        axis.text(1.0, float(i), plots.literal(name))
    axis.figure.savefig(io.BytesIO(), format="svg")
    assert plots.literal(r"$\theta$ in $\frac{$") == r"\$\theta\$ in \$\frac{\$"
    assert plots.literal(r"$\theta$ [$m$]") == r"$\theta$ [$m$]"
    assert plots.literal("price in $") == "price in $"
