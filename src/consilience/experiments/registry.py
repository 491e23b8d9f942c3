"""The experiments by name: five of Schmitt et al. (2024, arXiv:2310.04395), and the scoreboard."""

from consilience.experiments import gmm, hes1, sbibm, sir, source, two_moons
from consilience.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (gmm, two_moons, hes1, source, sir, sbibm)
}
