VENV := .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8080
PHOTO := docs/photo/grace_hopper.jpg
PIP := $(VENV)/bin/pip --disable-pip-version-check install --quiet --constraint constraints.txt
CICADA := $(VENV)/bin/cicada

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run image test classifiers lint format types fix bench-http soak screenshots clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\): .*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

run: $(VENV)/.installed ## set up, prepare resnet50 once, serve on PORT (8080)
	@$(CICADA) inspect resnet50 >/dev/null 2>&1 \
	|| $(CICADA) prepare resnet50 --pretrained \
	|| { echo "No pretrained weights: preparing resnet50 with random ones. Its labels mean nothing; its timings do." \
	  && $(CICADA) prepare resnet50 --random 0; }
	@echo "Try: curl -i --data-binary @$(PHOTO) localhost:$(PORT)/predictions/resnet50"
	@exec $(CICADA) serve

image: ## build the container image `cicada`; ARGS="--build-arg TORCH_INDEX=..." and whatever else the build takes
	@docker build --tag cicada --build-arg REVISION="$$(git rev-parse --verify HEAD 2>/dev/null || echo unknown)" \
	  --build-arg CREATED="$$(date -u +%FT%TZ)" $(ARGS) .

test: $(VENV)/.installed-dev ## the whole suite; ARGS="-m 'not matrix'" leaves out the long part
	@$(VENV)/bin/pytest $(ARGS)

classifiers: $(VENV)/.installed-dev ## all of torchvision's classifiers against torchvision's own answers; ARGS="-k regnet" for some
	@$(VENV)/bin/pytest tests/service/test_classifiers.py --every-classifier $(ARGS)

lint: $(VENV)/.installed-dev ## ruff's rules
	@$(VENV)/bin/ruff check

format: $(VENV)/.installed-dev ## ruff's formatter, check only
	@$(VENV)/bin/ruff format --check

types: $(VENV)/.installed-dev ## mypy, strict
	@$(VENV)/bin/mypy

fix: $(VENV)/.installed-dev ## format, and repair what ruff can
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format

soak: $(VENV)/.installed ## load, faults and killed handlers for ten minutes, every answer compared; ARGS="--seconds 60"
	@$(VENV)/bin/python -m bench.soak $(ARGS)

bench-http: $(VENV)/.installed ## requests per second and latency under 1 to 64 clients; ARGS="--json FILE" keeps the figures
	@$(CICADA) bench http $(ARGS)

screenshots: $(VENV)/.installed-dev ## the page, light, dark and on a phone, into docs/page; needs chromium (apt-get install chromium)
	@$(VENV)/bin/pytest --quiet tests/browser/screenshots.py

clean: ## remove the environment and the tools' caches; prepared weights stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/pip:
	@"$(PYTHON)" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 with its venv module is needed: apt-get install python3 python3-venv (or: make PYTHON=/path/to/python3.11)" >&2; \
	  exit 1; }
	@"$(PYTHON)" -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "Installing into $(VENV) (torch is large: one to ten minutes the first time)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "Installing into $(VENV) with the tools for development (torch is large: one to ten minutes the first time)"
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/.installed $@
