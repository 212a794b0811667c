# The commands of a fresh clone: `make demo`, `make test`. Each installs what it needs once, into .venv: the demo the package
# without extras, the others the development tools too.
PYTHON ?= python3
BIN := .venv/bin
PACKAGE := .venv/.installed
STAMP := .venv/.installed-dev

.PHONY: demo test short test-all test-torch test-oldest check format fuzz fuzz-cuda faults learning study-figures run-figures play-figure docs docs-serve package clean

demo: $(PACKAGE)
	@echo "make: training CartPole by examples/demo.yaml, which takes seconds"
	$(BIN)/rl8x train -f examples/demo.yaml

# In whole files, ordered by tests/conftest.py; one worker more than cores, for the tests that wait. What takes many seconds
# by itself is marked `long`.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j2 check short

short: $(STAMP)
	$(BIN)/python -m pytest -m "not long" -n 3 --dist loadfile --max-worker-restart=0 --durations=30

# All tests with every extra: those of `make test`, then those that it skipped, where a package that is missing is a failure,
# then the long ones, among them those of MLflow's page in a browser, where there is one.
test-all: test
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test-all]'
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart=0 --durations=10 --skipped
	$(BIN)/python -m pytest -m long -n 3 --dist loadfile --max-worker-restart=0 --durations=10

# The tests, or those in TESTS, with another torch such as TORCH=2.15.0, or another Python by PYTHON=python3.13 too, in an
# environment of its own, by WORKERS processes.
WORKERS ?= 2
TORCH_BIN = .venv-torch-$(TORCH)/bin
test-torch:
	@test -n "$(TORCH)" || { echo "TORCH is missing: make test-torch TORCH=2.15.0"; exit 2; }
	test -x $(TORCH_BIN)/python || $(PYTHON) -m venv .venv-torch-$(TORCH)
	$(TORCH_BIN)/python -m pip install --quiet torch==$(TORCH)
	grep -vE '^(torch|tensordict)==' constraints.txt > .venv-torch-$(TORCH)/constraints.txt
	$(TORCH_BIN)/python -m pip install --quiet -c .venv-torch-$(TORCH)/constraints.txt torch==$(TORCH) -e '.[dev]'
	$(TORCH_BIN)/python -m pip list | grep -E '^(torch|tensordict|numpy|mlflow) '
	$(TORCH_BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

# The same with the oldest packages that pyproject.toml admits: the lower bounds are what passed here.
OLDEST_BIN = .venv-oldest/bin
test-oldest:
	test -x $(OLDEST_BIN)/python || $(PYTHON) -m venv .venv-oldest
	sed -nE 's/^    "([A-Za-z]+)>=([0-9.]+).*/\1==\2/p' pyproject.toml > .venv-oldest/constraints.txt
	$(OLDEST_BIN)/python -m pip install --quiet -c .venv-oldest/constraints.txt torch
	$(OLDEST_BIN)/python -m pip install --quiet -c .venv-oldest/constraints.txt -e '.[dev]'
	$(OLDEST_BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not long" $(TESTS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m benchmarks.pages --check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Random runs of features combined, for so many minutes; prints each new fault with the run that shows it. For minutes they
# are one test, which the limit of a test that hangs would end.
fuzz: $(STAMP)
	$(if $(CASES),RL8X_FUZZ_CASES=$(CASES),RL8X_FUZZ_MINUTES=$(or $(MINUTES),30)) $(BIN)/python -m pytest tests/combinations -s $(if $(CASES),,-k 0 -o faulthandler_timeout=0)

# The same on a simulated CUDA device, where there is no GPU.
fuzz-cuda: $(STAMP)
	$(BIN)/python -m tests.simulated_cuda.fuzz $(or $(MINUTES),10)

# Runs that are killed, and whose disks and servers fail, for so many minutes; prints a line of counts for each kind.
faults: $(STAMP)
	$(BIN)/python -m tests.faults --minutes $(or $(MINUTES),60)

# The tasks of docs/learning.md anew, and the pages that quote them: hours.
learning: $(STAMP)
	$(BIN)/python -m benchmarks.learning
	$(BIN)/python -m benchmarks.pages

# The study of docs/studies.md: its figures, its table, and screenshots of MLflow's page where there is a Chromium.
study-figures: $(STAMP)
	$(BIN)/python -m benchmarks.figures study
	$(BIN)/python -m benchmarks.pages

# Screenshots of MLflow's page on two runs, for README.md and docs/tracking.md; needs a Chromium.
run-figures: $(STAMP)
	$(BIN)/python -m benchmarks.figures runs

# The film of a policy in README.md and docs/playing.md.
play-figure: $(STAMP)
	$(BIN)/python -m benchmarks.figures play

# The site, into site/: open site/index.html, or `make docs-serve` for its search too, and while pages are written.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# A wheel and an sdist in dist/, and the demo of the sdist by an installed wheel, in a folder outside of the repository.
package:
	rm -rf dist
	$(PYTHON) -m venv --clear .venv-package
	.venv-package/bin/python -m pip install --quiet build twine
	.venv-package/bin/python -m build
	.venv-package/bin/python -m twine check --strict dist/*
	set -e; away=$$(mktemp -d); trap 'rm -rf "$$away"' EXIT; \
	$(PYTHON) -m venv "$$away/venv"; \
	"$$away/venv/bin/python" -m pip install --quiet torch==2.13.0; \
	"$$away/venv/bin/python" -m pip install --quiet -c constraints.txt dist/*.whl; \
	tar -xzf dist/*.tar.gz -C "$$away" --strip-components=1; \
	rm -rf "$$away/src"; cd "$$away"; unset PYTHONPATH; \
	venv/bin/rl8x doctor; \
	venv/bin/rl8x train -f examples/demo.yaml

clean:
	rm -rf dist site .venv .venv-package .venv-torch-* .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch first and by itself: any other package that asks for torch would choose the build. pip says what it downloads.
$(PACKAGE): constraints.txt pyproject.toml
	@echo "make: an environment in .venv"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "make: installing torch, the largest download: minutes the first time"
	$(BIN)/python -m pip install torch==2.13.0
	@echo "make: installing rl8x and what it needs, MLflow most of all: a minute or two"
	$(BIN)/python -m pip install -c constraints.txt -e .
	touch $@

$(STAMP): $(PACKAGE)
	@echo "make: installing the development tools (pytest, ruff, mypy, ...): some minutes"
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@
