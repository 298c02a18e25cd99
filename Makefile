# make quickstart and make test do all the set-up on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip
PROJECT := pyproject.toml constraints.txt
LOCK := .ci/requirements.txt .ci/first.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: quickstart test test-full mutations lint docs figures bench packaged-model lock

quickstart: .venv/.installed
	$(BIN)/fastweights quickstart

# Prints the lines covered in all and the files with fewest.
test: lint
	$(PYTEST) --cov --cov-report=
	@$(BIN)/coverage report --sort=cover | sed -n '1,14p;$$p'

# The whole product of rule, feature map, normaliser, family and hybrid instead of its pairs.
test-full: lint
	$(PYTEST) -m ''

# Breaks the package on purpose, one edit at a time, and names the test that notices each.
mutations: .venv/.installed-test
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m mutations -o results/mutations.json

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, into site/; it needs no network.
docs: .venv/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Every figure of README.md and docs/ comes from results/: this fills them in.
figures: .venv/.installed
	$(BIN)/python benchmarks/figures.py

bench: .venv/.installed
	$(BIN)/python benchmarks/cpu.py

# A GPU and BOOKS, a text of books as in benchmarks/packaged_model.py, are needed; it took 8 minutes on one H200.
packaged-model: .venv/.installed
	$(BIN)/python benchmarks/packaged_model.py $(BOOKS) --work packaged-model --export fastweights/packaged

# After a change of constraints.txt: the hashes of all its packages, and the page about their licenses. It needs uv.
lock: .venv/.installed-test
	.ci/lock
	$(BIN)/python benchmarks/licenses.py

.venv/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fastweights needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	touch $@

.venv/.installed: .venv/.created $(PROJECT)
	$(PIP) install -q -c constraints.txt -e '.[gguf,peft,plot]'
	touch $@

# Every file that pip downloads here must have a hash in .ci, also the build backends. torch and setuptools come first:
# which build of torch is right depends on the machine, and some packages are built with setuptools. With a CUDA build
# of torch, the last command also fetches NVIDIA's libraries, in the versions that torch names.
.venv/.installed-test: .venv/.created $(PROJECT) $(LOCK)
	$(PIP) download -q --no-deps -c constraints.txt -d .venv/first torch setuptools
	$(PIP) install -q --require-hashes --no-deps --no-index --find-links .venv/first -r .ci/first.txt
	$(PIP) install -q --require-hashes --no-deps --no-build-isolation -r .ci/requirements.txt
	$(PIP) install -q --no-build-isolation -c constraints.txt -e '.[test]'
	rm -r .venv/first
	touch $@ .venv/.installed
