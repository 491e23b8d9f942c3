"""The training loop of one network: one compiled scan runs each epoch, the best epoch is kept."""

import logging
import time

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from tqdm.auto import tqdm

from consilience.core.compiling import on_device
from consilience.core.devices import replicate, to_one_device
from consilience.core.types import PRNGKey
from consilience.identity.batches import Example
from consilience.identity.learned import Networks
from consilience.identity.schedules import Schedule
from consilience.networks.layers import random_key
from consilience.posterior.history import History, Stopped
from consilience.training.batches import Streamed, Whole
from consilience.training.epochs import (
    ADAM,
    State,
    TrainingError,
    long_epoch,
    short_epoch,
    validate,
)

logger = logging.getLogger(__name__)

SHORT = 500
"""A fit of at most this many steps ends before faster steps make up for longer compilation."""


def train(
    networks: Networks,
    loss,
    source: Whole | Streamed,
    held_out: Example | None,
    *,
    key: PRNGKey,
    rng: np.random.Generator,
    epochs: int,
    learning_rate: float,
    schedule: Schedule,
    optimizer: optax.GradientTransformation | None,
    patience: int | None,
    mesh: Mesh | None,
    progress: bool,
) -> tuple[Networks, History]:
    arrays = eqx.filter(networks, eqx.is_inexact_array)
    size = sum(leaf.size for leaf in jax.tree.leaves(arrays))
    flat = on_device(np.zeros(size))
    opt_state = ADAM.init(flat) if optimizer is None else optimizer.init(arrays)
    state = State(networks, opt_state, np.zeros((), np.int32))
    # Arrays, so that another value does not trigger recompilation.
    total, rate = on_device(source.steps * epochs), on_device(learning_rate)
    state, held_out, loss = replicate((state, held_out, loss), mesh)
    run_epoch = short_epoch if source.steps * epochs <= SHORT else long_epoch
    settings = {"loss": loss, "optimizer": optimizer, "schedule": schedule, "mesh": mesh}
    record: list[dict[str, float]] = []
    best = _Best(networks, loss.groups)
    stopped: Stopped = "finished"
    start = time.perf_counter()
    bar = tqdm(total=epochs, desc="fit", unit="epoch", disable=None if progress else True)
    try:
        for epoch in range(1, epochs + 1):
            parts = []
            for examples, order in source.epoch(rng):
                key = random_key(rng, key)
                state, info = run_epoch(state, examples, order, key, total, rate, **settings)
                parts.append(jax.device_get(info))
            info = jax.tree.map(lambda *values: np.concatenate(values), *parts)
            row = _summarise(info, epoch, source.steps)
            judged = None
            if held_out is not None:
                scores = validate(state.networks, held_out, loss)
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
        simulations=len(source) + (0 if held_out is None else len(held_out.u)),
    )
    return to_one_device(best.networks, mesh), history


class _Best:
    """The best networks so far: each group by its own held-out loss, or simply the last."""

    def __init__(self, networks: Networks, groups: tuple[tuple[str, ...], ...]):
        self.networks = networks
        there = [tuple(name for name in group if getattr(networks, name)) for group in groups]
        self.groups = [group for group in there if group]
        self.scores = dict.fromkeys(self.groups, np.inf)
        self.epochs = {name: 0 for group in self.groups for name in group}

    def update(self, networks: Networks, scores: dict[str, float] | None, epoch: int):
        for group in self.groups:
            score = -np.inf if scores is None else sum(scores[name] for name in group)
            if score < self.scores[group] or scores is None:
                fields = (*group, *(["summary"] if "posterior" in group else []))
                pick = lambda tree, fields=fields: [getattr(tree, f) for f in fields]  # noqa: E731
                self.networks = eqx.tree_at(pick, self.networks, pick(networks))
                self.scores[group] = score
                self.epochs.update(dict.fromkeys(group, epoch))


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
    invalid = info.pop("invalid", np.zeros(1)).sum()
    if invalid:
        raise TrainingError(
            f"log_likelihood(theta, x) was NaN or plus infinity for {invalid:.0f} datasets of "
            f"epoch {epoch}. It must be finite, or minus infinity where theta is impossible: look "
            "for logarithms and roots of negative numbers, and for 0 / 0."
        )
    means = {name: float(values[ok].mean()) for name, values in info.items()}
    return {**means, "skipped": float(len(bad))}
