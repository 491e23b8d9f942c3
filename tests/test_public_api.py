"""Public names, their signatures and the command line are as the committed list says."""

import pytest

from tests.public_api import FILE, differences, lines

UPDATE = "If that is meant, write the list again with `python -m tests.public_api`."


def test_public_names_and_the_command_line_are_those_of_the_list():
    changed = differences(FILE.read_text().splitlines(), lines())
    assert not changed, "\n".join(["The public interface has changed:", *changed, UPDATE])


@pytest.mark.parametrize(
    "line",
    [
        "cs.Fit.save(self, path)",
        "classmethod cs.Simulations.open(path)",
        "class cs.Constant(value=1.0)",
        "class cs.metrics.Discrepancy(mmd, floor)",
        "cs.tasks.gmm.model()",
        "cs.Model.layout (property)",
        "consilience sample --draws: nargs=None, default=1000, choices=None, required=False",
    ],
)
def test_the_list_has_every_kind_of_entry_and_a_changed_one_is_told(line):
    found = lines()
    assert line in found
    other = [each + " changed" if each == line else each for each in found]
    assert differences(found, other) == [f"- {line}", f"+ {line} changed"]
    assert differences(found, [each for each in found if each != line]) == [f"- {line}"]
