# PYTHON makes the virtual environment; everything else runs inside of it.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
HOST ?= 0.5.17

.PHONY: demo test test-all test-transformers test-sglang lint unit e2e host install clean

demo: install
	$(BIN)/python examples/demo.py

# what CI runs: under 45 minutes on two cores, and the minutes of each part at the end
test: install
	$(BIN)/python tests/parts.py lint unit transformers:oldest transformers:newest e2e host:$(HOST)

test-all: install
	$(BIN)/python tests/parts.py lint unit transformers:all e2e slow host-whole:0.5.17 host-whole:0.5.21

# the config tests with each supported transformers, in environments of their own without torch
test-transformers: install
	$(BIN)/python tests/parts.py transformers:all

# our uses of SGLang against its wheels; then kits, backend tests and a server against transformers' logprobs on each
test-sglang: install
	$(BIN)/python tests/parts.py sglang-names host:0.5.17 host:0.5.21 host:0.5.23

lint unit e2e: install
	$(BIN)/python tests/parts.py $@

host: install
	$(BIN)/python tests/parts.py host:$(HOST)

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@date +%s > $(VENV)/install-began
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e '.[sglang,test]'
	@date +%s > $(VENV)/installed

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
