"""What the parts of the self-consistency loss may adapt to, and how they do it."""

from typing import Any, NamedTuple, TypeVar

from consilience.model.data import Kind

Part = TypeVar("Part")


class Setting(NamedTuple):
    """The problem that a fit is made for.

    `kind`: of the data. `exact`: whether the model's own likelihood is taken, not a learned one.
    `wide`: whether the likelihood is learned and one of many numbers. `atomic`: whether the
    posterior learns to tell a run's theta from others, as after a proposal.
    """

    kind: Kind
    exact: bool
    wide: bool = False
    atomic: bool = False


def resolved(part: Part, setting: Setting) -> Part:
    """A part with its open choices made: `part.resolved(setting)` where it has this method."""
    method: Any = getattr(part, "resolved", None)
    return part if method is None else method(setting)
