# Two commands do everything: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PYTEST_OPTIONS :=

.PHONY: demo test test-strict test-nightly test-fast lint format proto clean

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	-$(BIN)/python -m tools.chart.get_helm
	touch $@

demo: .venv/ready  ## a local cluster with real pools, transfer and gRPC; three conversations; shut down clean
	$(BIN)/python examples/demo.py

test: .venv/ready  ## the suite but for its nightly part; tests that need hardware skip themselves with the reason
	$(BIN)/python -m pytest -q $(PYTEST_OPTIONS)

test-strict: .venv/ready  ## the same with every time bound as written; for a quiet machine
	TANDEM_TEST_PATIENCE=1 $(BIN)/python -m pytest -q

test-nightly: .venv/ready  ## whole clusters under faults, load, drains and node autoscaling; minutes each, wants a quiet machine
	$(BIN)/python -m pytest -q -m nightly --reruns 1

test-fast: .venv/ready  ## without the slow ones: a minute or two
	$(BIN)/python -m pytest -q -m "not slow"

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy common kernels model kv_transfer prefill_worker decode_worker cluster frontend

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: .venv/ready  ## regenerate common/proto/*_pb2*
	tools/protoc.sh

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
