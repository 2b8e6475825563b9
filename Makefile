# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BASE   := $(VENV)/.base
NATIVE := $(VENV)/.native
RUN    ?= runs/demo

.PHONY: demo test lint bench bench-full bench-baseline bench-compare clean install chromium picture fuzz faults soak

# Installed again only when what is to be installed has changed. The demo needs one extra.
$(BASE): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[report]'
	touch $@

# Built again when its sources change. Without a compiler everything works, more slowly.
$(NATIVE): $(BASE) $(wildcard distmon/native/*.cpp distmon/native/*.h) distmon/native/compiling.py \
    csrc_triton/row_layout.py csrc_triton/address_layout.py
	$(BIN)/python -m distmon.native || true
	touch $@

$(STAMP): $(BASE)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,bench]'
	touch $@

install: $(STAMP) $(NATIVE)

demo: $(BASE) $(NATIVE)
	$(BIN)/torchrun --nproc-per-node 2 -- launch/train.py --monitor --steps 600 \
	    --monitor.run-dir $(RUN)
	$(BIN)/distmon show $(RUN)
	$(BIN)/distmon report $(RUN)
	@echo "see it:  $(RUN)/report.html in a browser, or $(BIN)/distmon watch $(RUN) here"
	@echo "next:    $(BIN)/distmon run examples/nanogpt.py     an unmodified script under the monitor"
	@echo "         $(BIN)/distmon run launch/train.py --monitor --monitor.interval 5 --inject nan"
	@echo "         $(BIN)/distmon rules                       what it looks for"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tests of the pages need a browser; without one they are skipped.
chromium:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	    { apt-get install -y -qq --no-install-recommends chromium || \
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }; } >/dev/null 2>&1; } || \
	    echo "no Chromium here, and none could be installed: the tests of the pages are skipped"

test: lint chromium $(NATIVE)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

picture: $(STAMP) chromium
	test -d $(RUN) || $(MAKE) demo
	$(BIN)/python docs/report_picture.py $(RUN) docs/report.png

bench: $(STAMP) $(NATIVE)
	$(BIN)/python -m benchmarks.overhead --quick --out runs/bench
	$(BIN)/python -m benchmarks.inside_cost --quick --out runs/bench
	$(BIN)/python -m benchmarks.alarms.signal_cost

bench-full: $(STAMP) $(NATIVE)
	$(BIN)/python -m benchmarks.overhead --full --out runs/bench-full
	$(BIN)/python -m benchmarks.inside_cost --out runs/bench-full

# Ratios of runs/bench against those of a run that was kept; exit 1 when one is 25% worse.
bench-compare: $(STAMP)
	test -e runs/bench/results.csv || $(MAKE) bench
	$(BIN)/python -m benchmarks.compare benchmarks/baseline.csv runs/bench --limit 0.25

bench-baseline: $(STAMP)
	test -e runs/bench/results.csv || $(MAKE) bench
	grep -E '^workload,|,(distmon [a-z]+|foreach_norm|naive clone),(observation|answer),' \
	    runs/bench/results.csv > benchmarks/baseline.csv

# As long as one likes: INPUTS=100000, MINUTES=600.
fuzz: $(STAMP)
	$(BIN)/python -m benchmarks.fuzz --inputs $(or $(INPUTS),20000)

faults: $(STAMP)
	$(BIN)/python -m benchmarks.faults

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),60)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
