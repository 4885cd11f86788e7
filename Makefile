# Two commands do all set-up: `make validate` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BASE ?= HEAD~1
HEAD ?= HEAD
OUT ?= out/validate
# An index that has CPU builds of torch, where pip's own does not.
TORCH_INDEX_URL ?=
PIP := $(VENV)/bin/pip --disable-pip-version-check
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: validate test check lint format types imports schemas policies example clean

validate: $(STAMP)
	rm -rf $(OUT) $(OUT)-report
	$(BIN)/fasttrack validate --tier smoke --policy smoke --base $(BASE) --head $(HEAD) --out $(OUT)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

check: lint types imports schemas policies test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

schemas: $(STAMP)
	$(BIN)/python -m harness.evidence.schemas --check

policies: $(STAMP)
	$(BIN)/fasttrack policy check

# The committed example anew, from a committed tree; wanted when `fasttrack bundle verify` calls it unconfirmed.
example: $(STAMP)
	rm -rf out/example out/example-report
	$(BIN)/fasttrack validate --tier smoke --policy smoke --base $(BASE) --head $(HEAD) --out out/example
	rm -f bundles/examples/smoke.tar.zst
	$(BIN)/fasttrack bundle pack out/example --out bundles/examples/smoke.tar.zst

# Made again when the dependencies change. torch goes first, so that nothing else can pull a CUDA build in.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fasttrack needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python .ci/require_cpu_torch.py $(BIN)/pip constraints.txt $(TORCH_INDEX_URL) || exit 2
	$(PIP) install --quiet -c constraints.txt $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(PIP) install --quiet -c constraints.txt -e '.[cpu,evals,gpu,publish,history,mcp,tune,ray,sigstore,dev]'
	touch $@

clean:
	rm -rf $(VENV) out build dist
