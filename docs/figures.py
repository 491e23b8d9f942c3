"""The figures of the documentation: `make figures` writes them to docs/figures/.

One parameter, so that all can be seen: theta ~ N(0, 1), and a number x ~ N(theta^2, 0.5^2). At
x = 1 the posterior has two modes. The other figures are of the paper's Gaussian mixture.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro.distributions as dist

import consilience as cs
from consilience.core.panels import BLUE, GREY, INK, ORANGE, panels
from consilience.plots import identity, side_by_side
from consilience.tasks import gmm

OUT = Path(__file__).parent / "figures"
RUNS, NOISE, OBSERVED = 64, 0.5, np.array([1.0])
GRID = np.linspace(-2.2, 2.2, 441)
MIXTURE_EPOCHS = 200


def model() -> cs.Model:
    def simulator(key, theta):
        return theta**2 + NOISE * jax.random.normal(key, (1,))

    def log_likelihood(theta, x):
        return dist.Normal(theta**2, NOISE).log_prob(x).sum()

    return cs.Model(dist.Normal(0.0, 1.0), simulator, log_likelihood)


def exact(problem: cs.Model) -> tuple[np.ndarray, float]:
    """The log joint density on the grid, and the log evidence, by the trapezoidal rule."""
    wide = np.linspace(-8.0, 8.0, 16001)

    def joint(theta):
        named = {"theta": theta}
        return problem.prior.log_prob(named) + problem.log_likelihood(named, OBSERVED)

    values = np.asarray(jax.vmap(joint)(jnp.asarray(wide)))
    return np.asarray(jax.vmap(joint)(jnp.asarray(GRID))), float(
        np.log(np.trapezoid(np.exp(values), wide))
    )


def constant(rows: dict[str, np.ndarray], log_joint: np.ndarray, log_evidence: float):
    """Densities on the left, the identity at every theta on the right; a row for each."""
    axes = panels([""] * 2 * len(rows), "theta", "", columns=2, size=(3.6, 1.7), share="x")
    right = log_joint - log_evidence
    for (title, log_q), pair in zip(rows.items(), axes.reshape(-1, 2), strict=True):
        pair[0].fill_between(GRID, np.exp(right), color=GREY, alpha=0.3, lw=0)
        pair[0].plot(GRID, np.exp(log_q), color=BLUE, lw=1.8)
        pair[1].axhline(log_evidence, color=GREY, lw=4, alpha=0.4)
        pair[1].plot(GRID, log_joint - log_q, color=ORANGE, lw=1.8)
        pair[0].set_title(title, fontsize=9, color=INK, loc="left")
        pair[0].set(ylabel="density", ylim=(0, 1.3))
        pair[1].set(ylabel="nats", ylim=(log_evidence - 2.2, log_evidence + 2.2))
    axes[1].set_title("log p(theta) + log p(x | theta) - log q(theta | x)", fontsize=9, loc="left")
    return axes[0].figure


def pictures():
    problem = model()
    sims = cs.simulate(problem, RUNS, key=jax.random.key(0))
    log_joint, log_evidence = exact(problem)
    rows = {"the exact posterior": log_joint - log_evidence}
    for name, choice in {"maximum likelihood": False, "self-consistent": None}.items():
        fit = cs.fit(problem, sims, key=jax.random.key(1), self_consistency=choice, progress=False)
        rows[f"{name}, {RUNS} runs"] = fit.log_prob({"theta": GRID}, OBSERVED)
    save(constant(rows, log_joint, log_evidence), "constant.svg")
    for name, log_q in rows.items():
        mass = np.exp(log_joint) > 0.01 * np.exp(log_joint).max()
        ends = np.ptp((log_joint - log_q)[mass])
        print(f"{name}: the identity differs by up to {ends:.2f} nats")


def mixtures():
    problem = gmm.model()
    sims = cs.simulate(problem, 128, key=jax.random.key(2))
    tests = cs.simulate(problem, 8, key=jax.random.key(3))
    drawn, values = {}, {}
    for name, choice in {"maximum likelihood": False, "self-consistent": None}.items():
        fit = cs.fit(
            problem,
            sims,
            key=jax.random.key(4),
            self_consistency=choice,
            epochs=MIXTURE_EPOCHS,
            progress=False,
        )
        draws = fit.sample(tests.x, 1000, key=jax.random.key(5))
        theta = draws["theta"].values[:, 0]
        joint = jax.vmap(jax.vmap(fit.joint.log_prob, in_axes=(0, None)))
        log_joint = joint({"theta": jnp.asarray(theta)}, jnp.asarray(tests.x))
        values[name] = np.asarray(log_joint) - fit.log_prob(draws, tests.x)[:, 0]
        drawn[name] = theta[0]
    drawn["exact"] = np.asarray(gmm.exact_sample(tests.x, jax.random.key(6)))[0]
    axes = side_by_side(drawn, truth=tests.theta["theta"][0])
    save(axes[0].figure, "mixture.png")
    save(identity(values)[0].figure, "spread.png")


def save(figure, name: str):
    # The same figure gives the same file.
    stamp = {"Date": None} if name.endswith("svg") else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "consilience"}):
        figure.savefig(OUT / name, dpi=130, metadata=stamp)


def main():
    OUT.mkdir(exist_ok=True)
    pictures()
    mixtures()


if __name__ == "__main__":
    main()
