# Every target sets up what it needs in .venv first; repeated calls only compare the stamp's date. A demo needs no tools.
#
#   make demo        train the demo on four local nodes (fetches model and data once)
#   make test        the tests, on as many processes as WORKERS says: of those with many long cases a sample
#   make test-all    all tests with all their cases
#   make test-transformers-5  the tests on transformers 5, in build/transformers-5; those that need AdapterHub's library are skipped
#   make page-test   the page in a real browser, with pictures: build/page (Chromium; as root it is installed)
#   make faults      any faults on a virtual clock, each node at each place of a real run, links, disks, clocks, half an hour of random ones, in two and a half hours: build/bench/trust.json
#   make cuda        what a GPU has to hold, with executors' and integration tests on it; 77 where torch sees none
#   make promises    what is always true of a run, and which tests hold it
#   make lint        formatting, types, import rules
#   make docs        write docs/job.md, docs/options.md and the drawings from the code, and build the site: build/docs/index.html
#   make proto       regenerate the code of the wire's messages
#   make wheel       build the sdist and from it dist/ringtune-VERSION-py3-none-any.whl, for machines without a checkout
#   make smoke       install the wheel into empty environments, train with it, and load the result without RingTune
#   make arm64       a ring of an emulated 64-bit ARM node and one of this machine (root, Debian; an hour on a busy machine)
#   make bench-ring  measure the ring against one process: build/bench/ring.json
#   make bench-sim   measure predictions against boards of a testbed: build/bench/sim.json
#   make bench-memory  measure what boards need against what the plan says: build/bench/memory.json
#   make bench-predictions  measure how long runs take against what profiles say: build/bench/predictions.json
#   make bench-d2ft-accuracy  train with operations, text and images, in hours: build/bench/d2ft_accuracy.json
#   make bench-llm  compare language models with frozen weights of fewer bits, and with one process: build/bench/llm.json
#   make bench-cola  count what a host of helped blocks holds: build/bench/cola.json
#
#   TORCH    what to install torch from, e.g. TORCH="torch==2.13.0 --index-url URL"
#   PYTHON   the interpreter that .venv is made with (3.11 or newer)
#   PIP_ARGS passed on to pip install, e.g. --no-compile: only what is imported is compiled, then
#   WORKERS  processes that run tests; each runs whole files. Three fill two cores: tests wait for processes of their own
#   TRANSFORMERS_5  folder of transformers 5 with its hub library and tokenizers, made if it is missing
#   ARGS     passed on to pytest, to `ringtune demo` and to the benchmark

TORCH  ?= torch==2.13.0
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARGS   ?=
WORKERS ?= 3
TRANSFORMERS_5 ?= build/transformers-5

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/ringtune.stamp
NODE_STAMP := $(VENV)/node.stamp
PIP   := $(BIN)/python -m pip --disable-pip-version-check --no-input

# Sources are compiled once, and not anew by each of the many processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-transformers-5 page-test cuda faults promises lint proto docs wheel smoke arm64 bench-ring bench-sim bench-memory bench-predictions bench-d2ft-accuracy bench-cola bench-llm clean

help:
	@sed -n 's/^#   make /make /p' Makefile

setup: $(STAMP)

# torch comes first and by itself, so that TORCH can name an index or a file that has nothing else.
# The newest pip finds versions in a third of the seconds of the one that Python 3.11 brings.
define install
test -x $(BIN)/python || $(PYTHON) -m venv --upgrade-deps $(VENV)
@echo "fetching torch and the packages of ringtune[$(1)] into $(VENV), only the first time ..."
$(PIP) install $(PIP_ARGS) $(TORCH)
$(PIP) install $(PIP_ARGS) --quiet -e '.[$(1)]'
endef
comma := ,

$(STAMP): pyproject.toml
	$(call install,node$(comma)web$(comma)dev$(comma)docs)
	touch $@ $(NODE_STAMP)

# What a node needs and the page of a run; an environment that has all of it will do too.
$(NODE_STAMP): pyproject.toml
	$(call install,node$(comma)web)
	touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(NODE_STAMP))
	$(BIN)/ringtune demo $(ARGS)

# A process of the tests that dies ends them: what it had is given to no other, and all would wait for it for ever.
test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder $(ARGS)

# The three packages lie in a folder before those of .venv, which keeps transformers 4 and AdapterHub's library.
test-transformers-5: $(STAMP) $(TRANSFORMERS_5)
	PYTHONPATH=$(abspath $(TRANSFORMERS_5)) $(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder $(ARGS)

$(TRANSFORMERS_5):
	$(PIP) install $(PIP_ARGS) --quiet --no-deps --target $@ 'transformers==5.24.*' 'huggingface_hub==2.4.*' 'tokenizers==0.23.*'

test-all:
	$(MAKE) test ARGS="--all $(ARGS)"

page-test: $(STAMP)
	$(BIN)/python -m tests.page.run $(ARGS)

cuda: $(STAMP)
	$(BIN)/python -m tests.bench.cuda $(ARGS)

faults: $(STAMP)
	$(BIN)/python -m tests.bench.trust $(ARGS)

promises: $(STAMP)
	$(BIN)/python -m tests.support.promises

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: $(STAMP)
	$(BIN)/python proto/generate.py

docs: $(STAMP)
	PYTHONPATH=proto:. $(BIN)/python -m docs.make_job
	PYTHONPATH=proto:. $(BIN)/python -m docs.make_options
	PYTHONPATH=proto:. $(BIN)/python -m docs.make_combinations
	PYTHONPATH=proto:. $(BIN)/python -m docs.make_trust
	PYTHONPATH=proto:. $(BIN)/python -m docs.how.drawings
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs

wheel: $(STAMP)
	$(BIN)/python -m build --outdir dist .

smoke: wheel
	$(BIN)/python -m deploy.smoke dist/ringtune-$$($(BIN)/python -c 'import ringtune; print(ringtune.__version__)')-py3-none-any.whl --torch "$(TORCH)" $(ARGS)

# Exit code 77: this machine can't.
arm64: $(STAMP)
	$(BIN)/python -m deploy.arm64 $(ARGS)

bench-ring: $(STAMP)
	$(BIN)/python -m tests.bench.ring $(ARGS)

bench-sim: $(STAMP)
	$(BIN)/python -m tests.bench.sim $(ARGS)

bench-memory: $(STAMP)
	$(BIN)/python -m tests.bench.memory $(ARGS)

bench-predictions: $(STAMP)
	$(BIN)/python -m tests.bench.predictions $(ARGS)

bench-d2ft-accuracy: $(STAMP)
	$(BIN)/python -m tests.bench.d2ft_accuracy $(ARGS)

bench-cola: $(STAMP)
	$(BIN)/python -m tests.bench.cola $(ARGS)

bench-llm: $(STAMP)
	$(BIN)/python -m tests.bench.llm $(ARGS)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
