"""The recipes that compete in a fit, as a table: what each is, and why it is there.

Nothing here depends on the number of runs or on the shape of the data, but for what needs them
to exist at all: which recipe is right is left to runs that it has not seen.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import equinox as eqx

from consilience.model.data import Layout
from consilience.model.model import short
from consilience.networks.density import ConditionalDensity
from consilience.networks.flow import Coupling
from consilience.networks.summary import Summary, default_summary
from consilience.networks.transforms import Affine

# Only type checkers refuse other words by the annotation: at run time an error says what to pass.
if TYPE_CHECKING:
    Effort = Literal["quick", "standard", "thorough"]
else:
    Effort = str


class Work(NamedTuple):
    """What an effort allows.

    `members`: of each ensemble. `steps`: the most of one member, for each of its networks.
    `candidates`: how many of the table compete, from its top.
    """

    members: int
    steps: int
    candidates: int


EFFORTS: dict[Effort, Work] = {
    "quick": Work(members=3, steps=3000, candidates=3),
    "standard": Work(members=5, steps=8000, candidates=5),
    "thorough": Work(members=10, steps=24_000, candidates=7),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A recipe that may be chosen.

    `likelihood`: a density that is learned first and emulates the simulator for the posterior;
    None where the posterior learns from the runs alone.
    `ridge`: whether the posterior starts at ridge regression; a likelihood always does.
    `rate`: the initial learning rate of the posterior, `likelihood_rate` that of the likelihood.
    `large`: whether the summary network is the large one, for what cannot overfit.
    `jointly`: whether posterior and likelihood are then trained together, by self-consistency.
    `independent`: whether the likelihood takes the rows of a set as independent, where the user
    has not declared it; None for as it is.
    """

    name: str
    why: str
    posterior: ConditionalDensity
    likelihood: ConditionalDensity | None = None
    ridge: bool = True
    rate: float = 1e-3
    likelihood_rate: float = 1e-3
    large: bool = False
    jointly: bool = False
    independent: bool | None = None
    summary: Summary | eqx.Module | None = None

    def summary_for(self, layout: Layout) -> Summary | eqx.Module:
        return self.summary or default_summary(layout, large=self.large)


_EMULATED = Coupling(layers=4, depth=3, l2=1e-5)

CANDIDATES = (
    Candidate(
        "NPE",
        "the runs alone, with no assumption about the likelihood",
        Coupling(),
        ridge=False,
    ),
    Candidate(
        "linear NPE",
        "starts at ridge regression, with small networks: few runs, many parameters",
        Coupling(Affine(), layers=2, width=64, l2=1e-4),
        rate=5e-4,
    ),
    Candidate(
        "emulator: mean and noise",
        "a likelihood of a mean network plus Gaussian noise, learned first",
        _EMULATED,
        Coupling(Affine(), layers=1, frame=2, width=64, l2=1e-4),
        likelihood_rate=5e-4,
        large=True,
    ),
    Candidate(
        "emulator: splines",
        "a likelihood of any shape, learned first",
        _EMULATED,
        Coupling(layers=4, frame=2, l2=1e-4),
        large=True,
    ),
    Candidate(
        "emulator: linear mean",
        "a likelihood with a linear mean and correlated noise, learned first",
        _EMULATED,
        Coupling(Affine(), layers=1, width=32, depth=1, l2=1e-4),
        likelihood_rate=5e-4,
        large=True,
    ),
    Candidate(
        "NPE with dropout",
        "the runs alone, regularised by dropout",
        Coupling(dropout=0.2, l2=1e-4),
        rate=5e-4,
    ),
    Candidate(
        "emulator, then self-consistency",
        "after the emulator of splines, both networks are trained to agree",
        Coupling(layers=6, depth=3, l2=1e-5),
        Coupling(layers=6, depth=3, l2=1e-4),
        large=True,
        jointly=True,
    ),
)
"""In the order in which they are tried."""


def candidates_for(
    effort: Effort,
    *,
    emulate: bool,
    rows_open: bool = False,
    posterior: ConditionalDensity | None = None,
    likelihood: ConditionalDensity | None = None,
    summary: Summary | eqx.Module | None = None,
) -> list[Candidate]:
    """The candidates of an effort, narrowed to what the user gave.

    `emulate`: whether a likelihood may be learned; without, the posterior learns from runs alone.
    `rows_open`: data were found to be a set, and whether its rows are independent is open: a
    likelihood of each row and one of all rows compete.
    """
    chosen = [c for c in CANDIDATES[: EFFORTS[effort].candidates] if emulate or not c.likelihood]
    found: list[Candidate] = []
    for candidate in chosen:
        given: dict[str, Any] = {"posterior": posterior, "summary": summary}
        if candidate.likelihood is not None:
            given["likelihood"] = likelihood
        kept = {name: part for name, part in given.items() if part is not None}
        candidate = dataclasses.replace(candidate, **kept)
        # Those that differ in nothing but what the user has given are one.
        if not any(_networks(candidate) == _networks(other) for other in found):
            found.append(candidate)
            if rows_open and candidate.likelihood is not None:
                name = f"{candidate.name}, rows together"
                found.append(dataclasses.replace(candidate, name=name, independent=False))
    return found


def _networks(candidate: Candidate) -> tuple:
    part = candidate
    return part.posterior, part.likelihood, part.summary, part.large, part.jointly


def as_markdown() -> str:
    """The recipes and the efforts as the tables of the page on choices."""

    def code(spec: ConditionalDensity | None) -> str:
        return "none" if spec is None else f"`cs.{short(spec).replace('=Affine', '=cs.Affine')}`"

    recipes = [
        "| recipe | why it is there | posterior | likelihood |",
        "|---|---|---|---|",
        *(
            f"| {c.name} | {c.why} | {code(c.posterior)} | {code(c.likelihood)} |"
            for c in CANDIDATES
        ),
    ]
    efforts = [
        "| `effort` | recipes, from the top | networks in each | most steps of a network |",
        "|---|---|---|---|",
        *(
            f'| `"{name}"` | {work.candidates} | {work.members} | {work.steps:,} |'
            for name, work in EFFORTS.items()
        ),
    ]
    return "\n".join([*recipes, "", *efforts])
