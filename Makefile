# make setup   an environment in .venv with everything for work on the project
# make demo    train on the paper's Gaussian mixture and show the result
# make examples      run every example; figures go to out/ (minutes)
# make test    all tests but the slowest, docstring and README examples included
# make test-all      the slowest too
# make docs    the documentation, in site/: open site/index.html
# make figures       the figures of the documentation, in docs/figures/ (two minutes)
# make wheels  build sdist and wheel, and test the wheel on PYTHONS, each in a clean environment
# make browser Chromium for the tests of the HTML report, where apt has it and it is missing
# make lint    formatter, linter and type checker
# make consistency   every figure of docs/results/consistency.md (hours; can be resumed)
# make results the paper's five experiments and their pages (hours; goes on from results/)
# make scoreboard DATA=DIR       the SBI benchmark and its page (hours; goes on from results/)
# make diagnostics   every figure of docs/results/diagnostics.md (minutes)
# make campaigns     every figure of docs/results/campaigns.md (minutes)
# make bench   time and accuracy beside BayesFlow, sbi and sbijax (installs them apart)

PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo examples test test-all docs figures lint bench consistency results scoreboard diagnostics \
  campaigns wheels browser clean

setup: .venv/ready

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --no-compile -e .
	touch $@

.venv/ready: .venv/installed
	$(INSTALL) -e ".[dev,docs]"
	touch $@

demo: .venv/installed
	$(BIN)/python examples/demo.py

EXAMPLES := examples/mixture.py examples/numpyro_model.py examples/hes1.py \
	examples/epidemics.py examples/blackbox.py

examples: setup
	for example in $(EXAMPLES); do $(BIN)/python $$example || exit 1; done

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-all: setup
	$(BIN)/python -m pytest -n auto --dist worksteal

docs: setup
	$(BIN)/mkdocs build --strict
	$(BIN)/python docs/check_site.py site

figures: setup
	$(BIN)/python docs/figures.py

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/run.py

consistency: setup
	$(BIN)/python benchmarks/consistency.py

EXPERIMENTS := gmm two-moons hes1 source sir

results: setup
	for name in $(EXPERIMENTS); do \
	  $(BIN)/consilience reproduce $$name --out results/$$name && \
	  $(BIN)/consilience report results/$$name --out docs/results || exit 1; \
	done

scoreboard: setup
	$(BIN)/consilience reproduce sbibm --out results/sbibm $(if $(DATA),--data $(DATA))
	$(BIN)/consilience report results/sbibm --out docs/results

diagnostics: setup
	$(BIN)/python benchmarks/diagnostics.py

campaigns: setup
	$(BIN)/python benchmarks/campaigns.py

PYTHONS ?= $(PYTHON)
wheels: setup
	.ci/wheels $(PYTHONS)

browser:
	@command -v chromium chromium-browser google-chrome || \
	  (root=$$([ $$(id -u) = 0 ] || echo sudo); \
	   $$root apt-get update && $$root apt-get install -y --no-install-recommends chromium)

clean:
	rm -rf .venv .bench out dist site
