"""The training loop: `fit` prepares, one compiled scan runs each epoch, `Fit` comes out."""

import logging
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from tqdm.auto import tqdm

from consilience.approximators import LearnedPrior, Likelihood, Networks, Posterior
from consilience.data import DataSpace, data_space
from consilience.fitted import Fit, History, Recipe
from consilience.flows import Coupling
from consilience.losses import Example, MaximumLikelihood
from consilience.model import Model
from consilience.preparation import (
    build_networks,
    check_simulations,
    default_batch,
    default_epochs,
    split,
    standardise,
    take,
)
from consilience.schedules import Cosine, Schedule
from consilience.simulations import Simulations
from consilience.spaces import ParameterSpace, parameter_space
from consilience.summaries import Summary, default_summary
from consilience.types import PRNGKey

logger = logging.getLogger(__name__)

ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
"""The default optimizer, before its learning rate. One object, so that it compiles once."""

VALIDATION_BLOCK = 256


class TrainingError(RuntimeError):
    """Training cannot go on: too many steps gave a loss or a gradient that is not finite."""


def fit(
    model: Model,
    simulations: Simulations,
    *,
    key: PRNGKey,
    posterior: Coupling | None = None,
    likelihood: Coupling | None = None,
    prior: Coupling | None = None,
    summary: Summary | eqx.Module | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    learning_rate: float = 1e-3,
    schedule: Schedule | None = None,
    optimizer: optax.GradientTransformation | None = None,
    validation: float = 0.1,
    patience: int | None = None,
    progress: bool = True,
) -> Fit:
    """Learn the posterior of a model from its simulations.

    `posterior`: the flow of the posterior; by default four spline layers.
    `likelihood`: a flow, to learn the likelihood in tandem (NPLE).
    `prior`: a flow, to learn the prior's density where it can only be sampled.
    `summary`: a summary network; by default one that fits the shape of the data.
    `epochs`, `batch_size`: by default from the number of simulations.
    `learning_rate`, `schedule`: Adam's rate at the start, and its course over training.
    `optimizer`: any Optax optimizer in place of Adam, with a learning rate of its own.
    `validation`: the share of simulations held out, whose loss picks the best epoch; 0 for
    none, then the last epoch counts.
    `patience`: stop after so many epochs without a better validation loss.

    Ctrl-C ends training and returns the best fit so far. The same key gives the same fit.

    >>> import consilience as cs, numpyro.distributions as dist
    >>> model = cs.Model(dist.Normal(0, 1), lambda key, t: t + jax.random.normal(key, (3,)))
    >>> sims = cs.simulate(model, 128, key=jax.random.key(0))
    >>> small = cs.Coupling(layers=1, width=16)
    >>> result = cs.fit(model, sims, key=jax.random.key(1), posterior=small, epochs=2)
    >>> result.history.stopped
    'finished'
    """
    check_simulations(model, simulations)
    parameters = parameter_space(model.prior, simulations.theta)
    data = data_space(simulations.x, model.data)
    k_split, k_build, k_train = jax.random.split(key, 3)
    train, held_out = split(len(simulations), validation, k_split)
    batch_size = default_batch(len(train)) if batch_size is None else batch_size
    if not 1 <= batch_size <= len(train):
        raise ValueError(
            f"batch_size must be between 1 and the {len(train)} training simulations "
            f"({len(held_out)} more are held out for validation), got {batch_size}."
        )
    epochs = default_epochs(len(train), batch_size) if epochs is None else epochs
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}.")
    if patience is not None and not len(held_out):
        raise ValueError("patience needs held-out simulations: pass validation > 0 with it.")

    recipe = Recipe(
        posterior=posterior or Coupling(),
        likelihood=likelihood,
        prior=prior,
        summary=summary or default_summary(data.layout),
    )
    networks = build_networks(recipe, parameters, data, k_build)
    examples = standardise(parameters, data, simulations)
    networks, history = _train(
        networks,
        MaximumLikelihood(data),
        take(examples, train),
        take(examples, held_out) if len(held_out) else None,
        key=k_train,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        schedule=schedule or Cosine(),
        optimizer=optimizer,
        patience=patience,
        progress=progress,
    )
    return assemble(model, parameters, data, networks, recipe, history)


def assemble(
    model: Model,
    parameters: ParameterSpace,
    data: DataSpace,
    networks: Networks,
    recipe: Recipe,
    history: History,
) -> Fit:
    """Trained networks and their spaces as a `Fit`."""
    likelihood, prior = networks.likelihood, networks.prior
    return Fit(
        model=model,
        posterior=Posterior(networks.summary, networks.posterior, parameters, data),
        likelihood=None if likelihood is None else Likelihood(likelihood, parameters, data),
        prior=None if prior is None else LearnedPrior(prior, parameters),
        recipe=recipe,
        history=history,
    )


class _State(NamedTuple):
    networks: Networks
    opt_state: Any
    step: Any


def _train(
    networks: Networks,
    loss,
    examples: Example,
    held_out: Example | None,
    *,
    key: PRNGKey,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    schedule: Schedule,
    optimizer: optax.GradientTransformation | None,
    patience: int | None,
    progress: bool,
) -> tuple[Networks, History]:
    steps = len(examples.u) // batch_size
    params, _ = _pack(eqx.filter(networks, eqx.is_inexact_array), optimizer)
    opt_state = (optimizer or ADAM).init(params)
    state = _State(networks, opt_state, jnp.zeros((), int))
    # Arrays, not numbers: another value of these compiles nothing anew.
    total, rate = jnp.asarray(float(steps * epochs)), jnp.asarray(learning_rate, float)
    record: list[dict[str, float]] = []
    best, stopped = _Best(networks, loss.parts), "finished"
    start = time.perf_counter()
    bar = tqdm(total=epochs, desc="fit", unit="epoch", disable=None if progress else True)
    try:
        for epoch in range(1, epochs + 1):
            state, info = _epoch(
                state,
                examples,
                jax.random.fold_in(key, epoch),
                total,
                rate,
                loss=loss,
                optimizer=optimizer,
                schedule=schedule,
                batch_size=batch_size,
            )
            row = _summarise(jax.device_get(info), epoch, steps)
            judged = None
            if held_out is not None:
                scores = _validate(state.networks, held_out, state.step / total, loss)
                judged = {name: float(score) for name, score in scores.items()}
                row["validation"] = sum(judged.values())
            record.append(row)
            best.update(state.networks, judged, epoch)
            bar.update()
            bar.set_postfix({name: f"{value:.3f}" for name, value in row.items() if value})
            if patience is not None and epoch - max(best.epochs.values()) >= patience:
                stopped = "early"
                break
    except KeyboardInterrupt:
        if not record:
            raise
        stopped = "interrupted"
        logger.warning("Interrupted after %d of %d epochs: keeping the best.", len(record), epochs)
    finally:
        bar.close()
    history = History(
        terms={name: np.array([row.get(name, np.nan) for row in record]) for name in record[0]},
        best_epochs=best.epochs,
        stopped=stopped,
        seconds=time.perf_counter() - start,
        simulations=len(examples.u) + (0 if held_out is None else len(held_out.u)),
    )
    return best.networks, history


class _Best:
    """The best networks so far: each part by its own held-out loss, or simply the last."""

    def __init__(self, networks: Networks, parts: dict[str, tuple[str, ...]]):
        self.networks = networks
        self.parts = {
            name: fields for name, fields in parts.items() if getattr(networks, fields[-1])
        }
        self.scores = dict.fromkeys(self.parts, np.inf)
        self.epochs = dict.fromkeys(self.parts, 0)

    def update(self, networks: Networks, scores: dict[str, float] | None, epoch: int):
        for part, fields in self.parts.items():
            score = -np.inf if scores is None else scores[part]
            if score < self.scores[part] or scores is None:
                fresh = [getattr(networks, field) for field in fields]
                where = lambda n, fields=fields: [getattr(n, field) for field in fields]  # noqa: E731
                self.networks = eqx.tree_at(where, self.networks, fresh)
                self.scores[part], self.epochs[part] = score, epoch


def _summarise(info: dict[str, np.ndarray], epoch: int, steps: int) -> dict[str, float]:
    """Mean losses over the finite steps of an epoch; an error where most were not."""
    ok = info.pop("ok")
    bad = np.flatnonzero(~ok)
    if len(bad) > 0.2 * steps:
        first = (epoch - 1) * steps + int(bad[0]) + 1
        raise TrainingError(
            f"The loss or its gradient was not finite in {len(bad)} of the {steps} steps of epoch "
            f"{epoch}, first at step {first}. Such steps are skipped, but these are too many: "
            "look for extreme values in the simulations, or lower the learning rate."
        )
    means = {name: float(values[ok].mean()) for name, values in info.items()}
    return {**means, "skipped": float(len(bad))}


def _pack(arrays, optimizer: optax.GradientTransformation | None):
    """Weights as the optimizer takes them, and the way back.

    Adam works on one long vector: it compiles and runs faster than on many arrays. An
    optimizer of the user's own may look at the arrays, so it gets them.
    """
    return ravel_pytree(arrays) if optimizer is None else (arrays, lambda tree: tree)


@eqx.filter_jit
def _epoch(
    state: _State, examples: Example, key, total, rate, *, loss, optimizer, schedule, batch_size
):
    n = examples.u.shape[0]
    k_order, k_loss = jax.random.split(key)
    order = jax.random.permutation(k_order, n)[: n // batch_size * batch_size]
    arrays, static = eqx.partition(state.networks, eqx.is_inexact_array)
    params, unpack = _pack(arrays, optimizer)

    def batch_loss(params, batch: Example, key, progress):
        networks = eqx.combine(unpack(params), static)
        keys = jax.random.split(key, batch_size)
        each = lambda example, k: loss(networks, example, k, progress)  # noqa: E731
        terms = jax.tree.map(jnp.mean, jax.vmap(each)(batch, keys))
        return sum(terms.values()) + networks.penalty(), terms

    def step(carry, index):
        params, opt_state, number = carry
        progress = number / total
        (value, terms), gradient = jax.value_and_grad(batch_loss, has_aux=True)(
            params, take(examples, index), jax.random.fold_in(k_loss, number), progress
        )
        squares = sum(jnp.sum(part**2) for part in jax.tree.leaves(gradient))
        ok = jnp.isfinite(value) & jnp.isfinite(squares)
        updates, new_opt_state = (optimizer or ADAM).update(gradient, opt_state, params)
        if optimizer is None:
            updates = -rate * schedule(progress) * updates
        new = (optax.apply_updates(params, updates), new_opt_state)
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, (params, opt_state))
        return (params, opt_state, number + 1), {"loss": value, **terms, "ok": ok}

    start = (params, state.opt_state, state.step)
    (params, opt_state, number), info = jax.lax.scan(step, start, order.reshape(-1, batch_size))
    return _State(eqx.combine(unpack(params), static), opt_state, number), info


@eqx.filter_jit
def _validate(networks: Networks, held_out: Example, progress, loss):
    def one(example: Example):
        return loss(networks, example, None, progress)

    each = jax.lax.map(one, held_out, batch_size=VALIDATION_BLOCK)
    return jax.tree.map(jnp.mean, each)
