"""The page of a report: the verdict, the model, its training, and where the fit comes from."""

from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr

from consilience import plots
from consilience.core.html import Html, element, joined
from consilience.core.provenance import KeyName, versions
from consilience.diagnostics.check import HEAVY
from consilience.diagnostics.verdicts import AS_IS, CORRECTED, MCMC, MODEL
from consilience.model.model import Model, short
from consilience.report.assessment import calibration, outside, recovery
from consilience.report.findings import Findings
from consilience.report.observation import bridge, log_evidence, posterior, predictions, reasons
from consilience.report.page import code, facts, figure, listed, number, page, table, text

TONES = {AS_IS: "good", CORRECTED: "fair", MCMC: "bad", MODEL: "bad"}


def make_page(found: Findings, title: str | None) -> str:
    """The page of what was found."""
    fit = found.fit
    names = listed(fit.posterior.parameters.names)
    what = "one observation" if found.draws is not None else "any observation"
    lead = f"A posterior for {what}, learned from {number(fit.history.simulations)} simulations."
    parts: dict[str, tuple[str, Callable[[Findings], Html]]] = {
        "model": ("Model and budget", _model),
        "training": ("Training", _training),
        "calibration": ("Calibration", calibration),
        "recovery": ("Recovery", recovery),
        "posterior": ("Posterior of the observation", posterior),
        "predictions": ("Posterior predictions", predictions),
        "evidence": ("Log evidence", log_evidence),
        "verdict": ("Reasons for the verdict", reasons),
        "origin": ("How it was made", _origin),
    }
    made = {
        name: (
            said,
            text(found.missing[name], class_="missing")
            if name in found.missing
            else content(found),
        )
        for name, (said, content) in parts.items()
    }
    return page(title or f"Posterior of {names}", lead, _verdict(found), made)


def _verdict(found: Findings) -> Html:
    """The first thing to read."""
    if found.check is None:
        tone, word = "plain", "No verdict"
        said = [text(found.missing["verdict"])]
    else:
        verdict = found.check.verdict
        tone, word = TONES[verdict], verdict[0].upper() + verdict[1:]
        said = [text(found.check.table["reason"].item()), _advice(found, verdict)]
    short_facts = [
        ("Simulations", _budget(found)),
        ("Calibration", _calibrated(found)),
        ("Log evidence, 95 % interval", _or_unknown(found.evidence)),
    ]
    heading = element("h2", "Verdict", id="first-title")
    return element(
        "section",
        heading,
        element("p", word, class_="word"),
        *said,
        facts(short_facts, class_="short"),
        class_=f"verdict {tone}",
        aria_labelledby="first-title",
    )


def _advice(found: Findings, verdict: str) -> Html:
    if verdict == AS_IS:
        return text("Draw from it with ", code("fit.sample(x, key=key)"), ".")
    if verdict == CORRECTED:
        return text("Draw with ", code('fit.sample(x, key=key, method="corrected")'), ".")
    if verdict == MCMC and found.fit.has_joint:
        return text("Run chains with ", code('fit.sample(x, key=key, method="nuts")'), ".")
    return text("The draws below are shown for the record.")


def _budget(found: Findings) -> str:
    used = found.fit.history.simulations
    failed = 0 if found.fit.origin is None else found.fit.origin.tried - used
    return f"{number(used)}; {number(failed)} more failed" if failed else f"{number(used)}"


def _or_unknown(evidence: xr.Dataset | None) -> str:
    if evidence is None:
        return "not known"
    return bridge(evidence) + ("" if evidence["pareto_k"] < HEAVY else ", not to be trusted")


def _calibrated(found: Findings) -> str:
    if found.calibration is None:
        return "not judged"
    beyond = outside(found.calibration.table)
    every = found.calibration.table.sizes["quantity"]
    return f"{len(beyond)} of {every} quantities outside" if beyond else "within its bands"


def _model(found: Findings) -> Html:
    fit, model = found.fit, found.fit.model
    layout = fit.posterior.data.layout
    shapes = model.prior.shapes
    priors = table(
        "Parameters and their priors",
        ("Parameter", "Shape", "Prior"),
        [
            (name, "number" if shapes[name] == () else shapes[name], said)
            for name, said in model.prior.texts.items()
        ],
    )
    given = "given" if model.likelihood is not None else "not given"
    learned = ", learned" if fit.likelihood is not None else ""
    if fit.likelihood is not None and fit.likelihood.validity is not None:
        learned += ", with the probability that a run gives data"
    rows: list[tuple[Any, Any]] = [
        ("Data", f"{layout.show(layout.shapes)}, {short(layout.kind)}"),
        ("Simulator", _simulator(model)),
        ("Log-likelihood", given + learned),
        ("Simulations", _budget(found)),
        ("Summary network", code(_described(fit.recipe.summary))),
        ("Posterior", code(_described(fit.recipe.posterior))),
    ]
    for name, spec in (("Likelihood", fit.recipe.likelihood), ("Prior", fit.recipe.prior)):
        rows += [] if spec is None else [(f"{name}, learned", code(_described(spec)))]
    return joined([priors, facts([*rows, *_recipe(found)])])


def _simulator(model: Model) -> str:
    if model.simulator is None:
        return "none: runs come from elsewhere"
    return f"{'in' if model.external is None else 'outside'} JAX: {model.simulator_name}"


def _described(spec: Any) -> str:
    """A description of the library's own; of the user's, its type."""
    return repr(spec) if type(spec).__module__.startswith("consilience") else type(spec).__name__


def _recipe(found: Findings) -> list[tuple[Any, Any]]:
    """How it was trained, as far as that is kept."""
    if found.fit.origin is None:
        return [("Recipe", "not kept by the version that made this fit")]
    said = found.fit.origin.settings
    if "effort" in said:
        return [
            ("Effort", said["effort"]),
            ("Networks in an ensemble", number(said["members"])),
            ("Batch size", number(said["batch_size"])),
        ]
    rate = f"{said['optimizer']}, learning rate {said['learning_rate']}, {said['schedule']}"
    rows: list[tuple[Any, Any]] = [
        ("Epochs", number(said["epochs"])),
        ("Batch size", number(said["batch_size"])),
        ("Held out in training", f"{100 * said['validation']:.3g} % of the simulations"),
        ("Optimizer", said["optimizer"] if said["learning_rate"] is None else rate),
    ]
    consistent = said["self_consistency"]
    if consistent is None:
        return [*rows, ("Self-consistency", "none: maximum likelihood alone")]
    which = "the model's own likelihood" if said["exact"] else "the learned likelihood"
    labels = {
        "samples": "K, values of theta",
        "weight": "Lambda, over training",
        "maximum_likelihood": "Weight of maximum likelihood",
        "criterion": "Measure of spread",
        "proposal": "Proposal of theta",
        "augmentation": "Query datasets",
        "limit": "Limit",
    }
    rows.append(("Self-consistency", f"with {which}"))
    rows += [
        (label, code(consistent[name])) for name, label in labels.items() if name in consistent
    ]
    if said["unlabeled"]:
        rows.append(("Unlabelled datasets", number(said["unlabeled"])))
    return rows


def _training(found: Findings) -> Html:
    h = found.fit.history
    if h.tried:
        return _competition(found)
    loss = h.terms["loss"]
    kept = listed([f"{name} of epoch {epoch}" for name, epoch in h.best_epochs.items()])
    ended = {"finished": "ran to its end", "early": "stopped early"}.get(h.stopped, "was stopped")
    skipped = int(np.nansum(h.terms.get("skipped", np.zeros(1))))
    lost = f" {number(skipped)} steps were not finite and were skipped." if skipped else ""
    said = f"Training {ended} after {number(len(loss))} epochs and {h.seconds:.0f} s. "
    ends = ", ".join(
        f"{name} from {number(values[0])} to {number(values[-1])}"
        for name, values in h.terms.items()
        if name not in plots.COUNTS
    )
    return joined(
        [
            text(f"{said}Kept: {kept}.{lost}"),
            figure(
                plots.losses(h),
                f"Losses over {len(loss)} epochs: {ends}. Kept: {kept}.",
                "The loss and its terms, epoch by epoch.",
            ),
        ]
    )


def _competition(found: Findings) -> Html:
    """The recipes that competed, and why each was kept or dropped."""
    h = found.fit.history
    best = max(h.tried, key=lambda one: one.weight)
    rows = [
        (
            one.name,
            f"{one.score:.3f}",
            number(one.runs),
            f"{one.weight:.2f}",
            number(one.members),
            f"{one.seconds:.0f}",
            one.decision,
        )
        for one in h.tried
    ]
    ended = "was stopped" if h.stopped == "interrupted" else "ended"
    return joined(
        [
            text(
                f"Recipes competed by the log density of runs that they were not trained on; "
                f"training {ended} after {h.seconds:.0f} s. The posterior is their mixture with "
                "these weights."
            ),
            table(
                "Recipes",
                ("Recipe", "Held-out log density", "Runs", "Weight", "Networks", "s", "Decision"),
                rows,
            ),
            figure(
                plots.losses(h),
                f"Losses of one network of the recipe {best.name}, epoch by epoch.",
                f"One network of the recipe with the largest weight: {best.name}.",
            ),
        ]
    )


def _origin(found: Findings) -> Html:
    origin, held_out = found.fit.origin, found.held_out
    keys: list[tuple[Any, Any]] = []
    if origin is None:
        lost = "not kept by the version that made this fit"
        keys += [("Simulations", lost), ("Training", lost)]
    else:
        keys += [("Simulations", _key(origin.runs_key)), ("Training", _key(origin.key))]
    if held_out is not None and not found.new:
        keys.append(("Held-out runs", _key(held_out.key)))
    keys.append(("This report", _key(found.key)))
    now = versions()
    then = {} if origin is None else origin.versions
    rows = [(name, then.get(name, "not kept"), now.get(name, "")) for name in {**now, **then}]
    return joined(
        [
            text("The same keys, versions and kind of machine give the same numbers."),
            facts([(f"Key: {name.lower()}", said) for name, said in keys]),
            table("Versions", ("Package", "Fit", "Report"), rows),
        ]
    )


def _key(name: KeyName | None) -> Any:
    if name is None:
        return "not known: the runs were made elsewhere, or in several calls"
    kind, *words = name
    said = f"{kind} {', '.join(map(str, words))}"
    if kind != "threefry2x32" or any(words[:-1]):
        return said
    return joined([said, ", ", code(f"jax.random.key({words[-1]})")])
