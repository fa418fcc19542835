# Every target sets up what it needs; on a fresh machine `make demo` is the first command to run.
VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.complete
STUDIES := $(basename $(notdir $(wildcard configs/sweeps/*.yml)))

.PHONY: setup demo test check lint types bench docs report neox-smoke sweep clean $(STUDIES)

setup: $(STAMP)

# torch first and alone: with it in place, nothing else looks for another build of it.
$(STAMP): pyproject.toml constraints.txt
	@echo "making the environment $(VENV): a minute or two, longer where torch must be downloaded"
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,dev]'
	touch $@

# Prepare text, train several methods, sweep 512...16384, show table and figures: minutes on a CPU.
demo: setup
	$(RUN) scripts/demo.py $(DEMO)

# A study by its name, as in `make table3` or `make cpu_mini SWEEP="--dry-run"`: train and score all its
# runs, going on where an earlier call ended. `make sweep STUDY=FILE.yml` takes a file of your own.
$(STUDIES): %: configs/sweeps/%.yml setup
	$(RUN) scripts/sweep.py $< $(SWEEP)

sweep: setup
	$(RUN) scripts/sweep.py $(STUDY) $(SWEEP)

test: setup
	$(RUN) -m pytest -q -n 2 --dist loadfile $(TEST)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup
	$(VENV)/bin/mypy

check: lint types test

# Speed and memory, as ratios in one run; minutes each.
bench: setup
	$(RUN) scripts/bench_attention.py
	$(RUN) scripts/bench_training.py
	$(RUN) scripts/bench_checkpoint.py
	$(RUN) scripts/bench_evaluation.py
	$(RUN) scripts/bench_model.py
	$(RUN) scripts/bench_reading.py
	$(RUN) scripts/bench_tokenizing.py

# All rows under results/ as one page, report.html; beside ours, the published data of the same kind.
BESIDE := local_code=github local_prose=openwebtext2 local_latex=arxiv
report: setup
	$(RUN) scripts/report.py $(BESIDE:%=--beside %) $(REPORT)

# The pages of positions, attention and hf from their docstrings: build/api/index.html.
docs: setup
	$(RUN) scripts/api_pages.py build/api

# What a GPT-NeoX checkout needs besides: its tokenizers, and pybind11 for its data helpers.
$(VENV)/.neox: $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,dev,neox]'
	touch $@

# 20 steps of every method in both engines, 1 process to 2, on the CPU: NEOX_HOME names the checkout.
neox-smoke: $(VENV)/.neox
	$(RUN) scripts/check_neox.py
	$(RUN) scripts/neox_smoke.py $(SMOKE)

clean:
	rm -rf $(VENV) build dist *.egg-info
