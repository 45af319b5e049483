# Every target sets the project up first (see .ci/setup): PYTHON and TORCH choose the interpreter
# and the torch build. ARGS is passed on, e.g. make test ARGS="-k planner", make train ARGS="--steps 50".

python := .venv/bin/python
export PYTHON TORCH

.PHONY: help setup train plan test deep soak docs check direction format lint types fmt bench benchplan clean

help:
	@sed -n 's/^\([a-z]*\):.*## /make \1	/p' $(MAKEFILE_LIST)

setup: ## make .venv and install (instant when nothing changed)
	@.ci/setup

train: setup ## train a GPT on real text, about 4 minutes on 2 cores
	$(python) examples/train_gpt.py $(ARGS)

plan: setup ## print the layout of that training and leave
	$(python) examples/train_gpt.py --plan $(ARGS)

test: setup ## the whole suite and the doctests, two files at a time
	$(python) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

deep: setup ## the property tests alone, with 2000 examples each (hours)
	HYPOTHESIS_PROFILE=deep $(python) -m pytest -q -m hypothesis -o faulthandler_timeout=0 $(ARGS)

soak: setup ## training through random faults for MINUTES=5, compared bit by bit
	$(python) tests/faults/soak.py --minutes $(or $(MINUTES),5) $(ARGS)

docs: setup ## write docs/fsdp2-calls.md and docs/faults.md anew from the tests that make them
	VFSDP_WRITE_DOCS=1 $(python) -m pytest -q tests/docs/test_fsdp2_calls.py tests/faults

check: direction format lint types ## import direction, formatting, lint, types

direction: setup
	$(python) -m pytest -q tests/test_architecture.py

format: setup
	$(python) -m ruff format --check .

lint: setup ## ruff
	$(python) -m ruff check .

types: setup ## mypy on both packages and on a user's script
	$(python) -m mypy

fmt: setup ## format and repair what ruff can
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

bench: setup ## one training step against FSDP2 and DDP
	$(python) benchmarks/fsdp_step.py $(ARGS)

benchplan: setup ## padding of real models against other layouts, and time of a plan
	$(python) benchmarks/planner.py $(ARGS)

clean: ## remove caches and builds; .venv stays
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find sharding vfsdp_optim tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
