"""A NumPyro model taken apart: its prior, its simulator and its likelihood."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.primitives import _PYRO_STACK, Messenger

from consilience.core.arrays import warn_caller
from consilience.core.types import Data, PRNGKey, Scalar, Theta
from consilience.model.data import Kind, Set, Vector
from consilience.model.fingerprint import describe, describe_briefly
from consilience.model.priors import BARE, Prior, log_prob_in_support, transform_to
from consilience.model.proper import CENSORED, check_draws, is_masked, parts_of, refuse_improper

Sites = dict[str, dict[str, Any]]


def trace_model(
    function: Callable, observed: str | tuple[str, ...] | None, args: tuple, kwargs: dict
) -> tuple[Prior, Callable, Callable, Kind]:
    """The four parts of a `Model`, from a NumPyro model function."""

    def run(key: PRNGKey, values: Theta | None = None) -> Sites:
        traced = handlers.uncondition(function)
        if values is not None:
            traced = handlers.substitute(traced, data=dict(values))
        sites = handlers.trace(handlers.seed(traced, key)).get_trace(*args, **kwargs)
        return {name: site for name, site in sites.items() if site["type"] in ("sample", "plate")}

    wanted = (observed,) if isinstance(observed, str) else tuple(observed or ())
    replaced = _refuse_sites(function, wanted, args, kwargs)
    sites = run(jax.random.key(0))
    sampled = {name: site for name, site in sites.items() if site["type"] == "sample"}
    names = _observed_names(sampled, observed, replaced)
    latent = [name for name in sampled if name not in names]
    if not latent:
        raise ValueError("The NumPyro model has no latent site left: nothing to infer.")
    _refuse_subsampling(sites)
    _warn_of_replaced(replaced, latent)
    texts = _checked_texts(run, sampled, latent)

    def draw(key: PRNGKey) -> Theta:
        sites = run(key)
        return {name: sites[name]["value"] for name in latent}

    def density(theta: Theta) -> Scalar:
        sites = run(jax.random.key(0), theta)
        parts = (_site_log_prob(sites[name], theta[name]) for name in latent)
        return sum(parts, start=jnp.zeros(()))

    def named_theta(theta: Any) -> Theta:
        # A model hands one parameter of this name over as an array.
        return {BARE: theta} if latent == [BARE] and not isinstance(theta, Mapping) else theta

    def simulator(key: PRNGKey, theta: Any) -> Data:
        sites = run(key, named_theta(theta))
        values = {name: sites[name]["value"] for name in names}
        return values[names[0]] if len(names) == 1 else values

    def log_likelihood(theta: Any, x: Any) -> Scalar:
        x = {names[0]: x} if len(names) == 1 else x
        sites = run(jax.random.key(0), {**named_theta(theta), **x})
        parts = (_site_log_prob(sites[name], x[name]) for name in names)
        return sum(parts, start=jnp.zeros(()))

    prior = Prior(
        draw=draw,
        density=density,
        supports={name: sampled[name]["fn"].support for name in latent},
        shapes={name: jnp.shape(sampled[name]["value"]) for name in latent},
        texts=texts,
        former={name: describe(sampled[name]["fn"]) for name in latent},
        earlier={name: describe_briefly(sampled[name]["fn"]) for name in latent},
        identify=lambda: _at_fixed_points(run, sampled, latent),
    )
    return prior, simulator, log_likelihood, _kind(run, sampled, names, latent)


def _site_log_prob(site: dict, value) -> Scalar:
    log_prob = log_prob_in_support(site["fn"], value)
    return log_prob if site["scale"] is None else site["scale"] * log_prob


def _observed_names(sampled: Sites, observed, replaced: list[str]) -> tuple[str, ...]:
    if observed is None:
        found = tuple(n for n, site in sampled.items() if site["infer"].get("was_observed"))
        if not found:
            raise ValueError(
                "The NumPyro model observes nothing when called like this. Name the observed "
                f"site: observed=one of {list(sampled)}."
            )
        return found
    names = (observed,) if isinstance(observed, str) else tuple(observed)
    unknown = [name for name in names if name not in sampled]
    for name in unknown:
        if name in replaced:
            raise ValueError(
                f"The observed site {name!r} is reparametrised (numpyro.handlers.reparam), so that "
                "its likelihood is gone: leave that out."
            )
    if unknown or not names:
        raise ValueError(
            f"observed={list(names)} must name sample sites of the NumPyro model, "
            f"which are {list(sampled)}."
        )
    return names


def _refuse_sites(function: Callable, observed: tuple[str, ...], args: tuple, kwargs: dict):
    """Refuse what changes a density and not the draws, or cannot be drawn.

    `observed`: the names of observed sites; where there are none, those that have data.
    Returns the names of sites that `numpyro.handlers.reparam` replaces by others.
    """
    watched = _Replaced(function)
    seeded = handlers.seed(handlers.substitute(watched, substitute_fn=_improper_as_feasible), 0)
    for name, site in handlers.trace(seeded).get_trace(*args, **kwargs).items():
        if site["type"] != "sample":
            continue
        parts = list(parts_of(site["fn"]))
        seen = name in observed if observed else site["is_observed"]
        if not seen or any(isinstance(part, dist.Unit | dist.ImproperUniform) for part in parts):
            refuse_improper(site["fn"], name)
        elif any(is_masked(part) for part in parts):
            raise ValueError(
                f"The observed site {name!r} is masked: its likelihood leaves masked entries out, "
                "but simulations would have them. Leave the mask out, and observe only what is "
                "there; for rows that may be missing, write a cs.Model with cs.Set(mask=...)."
            )
        elif any(isinstance(part, CENSORED) for part in parts):
            raise ValueError(
                f"The observed site {name!r} is censored in its likelihood, but not in its draws: "
                "write a cs.Model whose simulator censors data as they were."
            )
        if site["scale"] is not None and np.any(np.asarray(site["scale"]) != 1):
            raise ValueError(
                f"The density of {name!r} is scaled (numpyro.handlers.scale, or a plate that "
                "subsamples), which its draws are not: leave the scale out, and give a plate all "
                "of its data."
            )
    return watched.names


class _Replaced(Messenger):
    """Collects the sites that `numpyro.handlers.reparam` computes from others that are sampled."""

    def __init__(self, function: Callable):
        super().__init__(function)
        self.names: list[str] = []
        self.sampled: list[str] = []

    def process_message(self, msg: Any):
        name = str(msg.get("name"))
        if msg["type"] == "sample":
            self.sampled.append(name)
        if msg["type"] == "deterministic" and any(self._is_by(name, one) for one in _PYRO_STACK):
            self.names.append(name)

    def _is_by(self, name: str, handler: Any) -> bool:
        config = getattr(handler, "config", None) if isinstance(handler, handlers.reparam) else {}
        if isinstance(config, Mapping):
            return name in config
        return any(other.startswith(f"{name}_") for other in self.sampled)


def _warn_of_replaced(replaced: list[str], latent: list[str]):
    """Warn that draws will have other parameters than those that the model was written with."""
    if replaced:
        warn_caller(
            f"The sites {replaced} are reparametrised (numpyro.handlers.reparam): the parameters "
            f"of this model are {latent}, and draws will not have {replaced}. Leave the "
            "reparametrisation out to learn the sites themselves, where their supports allow it."
        )


def _improper_as_feasible(site: dict):
    """A value for a site that cannot be drawn, so that it can be named in an error."""
    if site["type"] == "sample" and isinstance(site["fn"], dist.ImproperUniform):
        return site["fn"].support.feasible_like(jnp.zeros(site["fn"].shape()))
    return None


POINTS = (0.5, 1.0, 2.0)
"""How far from zero the free values lie at which the distributions of a model are compared."""


def _at_fixed_points(run: Callable, sampled: Sites, latent: list[str]) -> list[Any]:
    """The distributions of all latent sites, given the others at fixed values.

    No two values are alike: where one parameter stands for another, distributions differ.
    """
    found = []
    for far in POINTS:
        values, used = {}, 0
        for name in latent:
            transform = transform_to(sampled[name]["fn"].support, name)
            shape = transform.inverse_shape(jnp.shape(sampled[name]["value"]))
            free = _scattered(used, math.prod(shape)).reshape(shape)
            values[name], used = transform(jnp.asarray(far * free, float)), used + free.size
        sites = run(jax.random.key(0), values)
        found.append({name: sites[name]["fn"] for name in latent})
    return found


def _scattered(start: int, n: int) -> np.ndarray:
    """Numbers within (-1, 1), all different: the fractions of multiples of the golden ratio."""
    return 2 * ((np.arange(start, start + n) + 1) * 0.6180339887498949 % 1) - 1


def _checked_texts(run: Callable, sampled: Sites, latent: list[str]) -> dict[str, str]:
    """A line about each latent site, once it is seen that all can be drawn and told apart."""
    first, second = run(jax.random.key(1)), run(jax.random.key(2))
    _refuse_moving_supports(first, second, latent)
    texts = {name: _describe_both(sampled[name]["fn"], first[name]["fn"]) for name in latent}
    for name in latent:
        if texts[name] == describe(sampled[name]["fn"]):
            check_draws(sampled[name]["fn"], name)
    _refuse_hidden(run, first, second, list(sampled))
    return texts


def _refuse_subsampling(sites: Sites):
    for name, site in sites.items():
        if site["type"] == "plate" and site["args"][0] != len(np.atleast_1d(site["value"])):
            raise ValueError(f"The plate {name!r} subsamples its data: give it all of them.")


def _refuse_moving_supports(first: Sites, second: Sites, latent: list[str]):
    """A support that depends on other parameters has no one map to real numbers."""
    for name in latent:
        if not first[name]["fn"].support == second[name]["fn"].support:
            raise ValueError(
                f"The support of {name!r} depends on other parameters. Give it a fixed one: "
                "sample a variable on a fixed support and compute this one from it."
            )


def _refuse_hidden(run: Callable, first: Sites, second: Sites, names: list[str]):
    """Refuse sites that do not vary, and random numbers that no site shows."""
    for name in names:
        values = first[name]["value"], second[name]["value"]
        if not first[name]["fn"].support.is_discrete and np.array_equal(*values):
            raise ValueError(
                f"The site {name!r} has the value {np.asarray(values[0])} in every run, as under "
                "numpyro.handlers.substitute: write the value into the model, without that site."
            )
    again = run(jax.random.key(2), {name: first[name]["value"] for name in names})
    for name in names:
        one, other = (sites[name]["fn"].log_prob(first[name]["value"]) for sites in (first, again))
        if not np.allclose(one, other, equal_nan=True):
            raise ValueError(
                f"The distribution of {name!r} depends on random numbers that are no sample site, "
                "from numpyro.prng_key or a site under numpyro.handlers.block: the likelihood "
                "cannot know them. Make them a site of their own."
            )


VALUE = re.compile(r"(?<==)(\[[^]]*\]|<[^>]*>|[^,()]+)")
"""A number, or several, in the text about a distribution."""


def _describe_both(one: dist.Distribution, other: dist.Distribution) -> str:
    """The text about a site, without the numbers that other parameters set."""
    text, second = describe(one), describe(other)
    if text == second:
        return text
    if VALUE.sub("", text) != VALUE.sub("", second):
        return f"{type(one).__name__}(...) given other parameters"
    others = iter(VALUE.findall(second))
    shown = VALUE.sub(lambda found: found[0] if found[0] == next(others) else "...", text)
    return f"{shown} given other parameters"


def _kind(run: Callable, sampled: Sites, names: tuple[str, ...], latent: list[str]) -> Kind:
    sites = [sampled[name] for name in names]
    counts = all(site["fn"].support.is_discrete for site in sites)
    if len(names) > 1 or not sites[0]["cond_indep_stack"]:
        return Vector(counts=counts)
    plates = {frame.name for frame in sites[0]["cond_indep_stack"]}
    local = any(frame.name in plates for n in latent for frame in sampled[n]["cond_indep_stack"])
    if local or len(plates) > 1 or not _identical_rows(run, names[0], latent):
        return Vector(counts=counts)
    return Set(counts=counts)


def _identical_rows(run: Callable, name: str, latent: list[str]) -> bool:
    """Whether each row has the same distribution: regressors make independent rows differ."""
    for seed in range(3):
        theta = {n: site["value"] for n, site in run(jax.random.key(seed)).items() if n in latent}
        site = run(jax.random.key(seed), theta)[name]
        value = jnp.broadcast_to(site["value"][:1], site["value"].shape)
        by_row = np.asarray(site["fn"].log_prob(value)).reshape(value.shape[0], -1)
        if by_row.shape[0] < 2 or not np.allclose(by_row, by_row[:1], equal_nan=True):
            return False
    return True
