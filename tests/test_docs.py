"""The pages under docs/: their code is run as it stands, with stand-ins for a cluster."""

import functools
import logging
import multiprocessing
import re
import subprocess
import sys
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import dask
import jax
import numpy as np
import pytest
from distributed import LocalCluster
from distributed.utils import get_mp_context

import consilience as cs

DOCS = Path(__file__).parent.parent / "docs"
SLURM_ARGUMENTS = """
    queue account walltime job_cpu job_mem cores memory processes nanny protocol security
    interface death_timeout local_directory worker_extra_args job_extra_directives
    job_script_prologue job_directives_skip log_directory shebang python job_name config_name
    n_workers loop shared_temp_directory silence_logs name asynchronous scheduler_options
    scheduler_cls
"""
"""What `SLURMCluster` of dask-jobqueue takes, without what it calls deprecated."""


class LocalSlurm(LocalCluster):
    """`SLURMCluster` with two processes of this machine for its jobs."""

    def __init__(self, **settings):
        assert set(settings) <= set(SLURM_ARGUMENTS.split())
        exports = (line.split(" ", 1) for line in settings["job_script_prologue"])
        named = dict(words[1].split("=", 1) for words in exports if words[0] == "export")
        dask.config.update(dask.config.config, dask.config.collect_env(named))
        super().__init__(
            n_workers=0,
            threads_per_worker=settings["cores"] // settings["processes"],
            processes=True,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        )

    def scale(self, n=None, jobs=0, memory=None, cores=None):
        super().scale(2 if jobs else 0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in; modules in it can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run_page(page, runs=None):
    """All Python of a page, in order; a block that opens with the name of a file becomes one."""
    namespace = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        if runs is not None:
            block = block.replace("2000", str(runs))
        if named := re.match(r"# (\w+\.py)\n", block):
            Path(named[1]).write_text(block)
        else:
            exec(compile(block, page, "exec"), namespace)
    return namespace


@pytest.fixture
def cluster_modules(monkeypatch):
    """Stand-ins for dask-jobqueue and mpi4py."""
    context = multiprocessing.get_context("forkserver")
    executor = functools.partial(ProcessPoolExecutor, 2, mp_context=context)
    for name, parts in {
        "dask_jobqueue": {"SLURMCluster": LocalSlurm},
        "mpi4py": {},
        "mpi4py.futures": {"MPIPoolExecutor": executor},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    options = {
        "distributed.worker.multiprocessing-method": "forkserver",
        "distributed.worker.daemon": True,
    }
    with dask.config.set(options):
        get_mp_context()
        context.set_forkserver_preload(["distributed", "consilience.model.run"])
        yield


def test_the_page_on_clusters(folder, cluster_modules, capsys):
    n = 200
    names = run_page("clusters.md", n)
    names["cluster"].close()
    assert f"{n} of {n} runs are there.\nNone of {n} runs failed." in capsys.readouterr().out
    expected = cs.simulate(names["model"], n, key=jax.random.key(0), progress=False)
    for store in ("outbreaks", "mpi"):
        kept = cs.Simulations.open(folder / "runs" / f"{store}.zarr")
        np.testing.assert_array_equal(kept.x, expected.x)
        np.testing.assert_array_equal(kept.theta["beta"], expected.theta["beta"])
    np.testing.assert_array_equal(names["done"].x.values, expected.x)
    for pool in ("threaded", "pooled"):
        np.testing.assert_array_equal(names[pool].x, expected.x)


def test_the_page_on_commands(folder, capsys):
    (program,) = blocks("command-line-simulators.md", "c")
    Path("colony.c").write_text(program)
    subprocess.run(["cc", "-O2", "-Wall", "-o", "colony", "colony.c", "-lm"], check=True)
    names = run_page("command-line-simulators.md")
    sims, files = names["sims"], names["files"]
    (summary,) = blocks("command-line-simulators.md", "text")
    assert sims.failures.summary() == summary.strip()
    assert f"{len(sims.failures)}\n" in capsys.readouterr().out
    np.testing.assert_array_equal(sims.failures.mask, files.failures.mask)
    good = ~sims.failures.mask
    assert sims.x.shape == (300, 10, 2)
    np.testing.assert_array_equal(files.x["size"][good], sims.x[good, :, 0])
    np.testing.assert_array_equal(files.x["events"][good], sims.x[good, :, 1])
    np.testing.assert_array_equal(names["again"].x[good], sims.x[good])
    # The mean of a birth-death process is known: 20 exp((birth - death) t).
    slow = sims.theta["birth"] < 0.5
    growth = np.exp(sims.theta["birth"][slow] - sims.theta["death"][slow])
    ratio = sims.x[slow, 0, 0] / (20 * growth)
    assert good[slow].all() and abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(len(ratio))
    for line in (names["contained"], names["dockered"]):
        assert cs.Model(names["prior"], line).simulator is line


def test_pages_link_to_pages_that_are_there():
    pages = [*DOCS.glob("*.md"), DOCS.parent / "README.md"]
    links = [
        (page, link) for page in pages for link in re.findall(r"\]\((\S+?)\)", page.read_text())
    ]
    local = [(page, link.split("#")[0]) for page, link in links if "://" not in link]
    assert local and all((page.parent / link).exists() for page, link in local)
