# Two commands are enough: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TRITON := .venv/.triton

.PHONY: install demo test lint types pytest attack docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/ddc demo --out demo

test: lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Triton's interpreter tests the kernels for GPUs without one; it is large, and nothing but these tests needs it on a CPU
$(TRITON): $(STAMP)
	if [ "$$(uname -sm)" = "Linux x86_64" ]; then $(BIN)/python -m pip install --quiet --constraint constraints.txt 'triton>=3.4'; fi
	touch $(TRITON)

# one thread for each of several processes: quicker than one process with threads, and steady beside other work
# what Python compiles is kept, whatever the environment says: each process would compile the tests again
pytest: $(TRITON)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# the attacks of tests/attack with many more files, folders and requests than in `make test`
attack: $(STAMP)
	DDC_ATTACK=1 OMP_NUM_THREADS=1 $(BIN)/pytest tests/attack --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
