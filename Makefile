# PYTHON makes the virtual environment; everything else runs inside of it.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
HOST ?= 0.5.17

.PHONY: demo test test-all lint unit e2e host install clean

demo: install
	$(BIN)/python examples/demo.py

# what CI runs: under 45 minutes on two cores, and the minutes of each part at the end
test: install
	$(BIN)/python tests/parts.py lint unit e2e host:$(HOST)

test-all: install
	$(BIN)/python tests/parts.py lint unit e2e slow host-whole:0.5.17 host-whole:0.5.21

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
