# make demo   install and answer a prompt from cached modules
# make test   what to run before a commit, the same examples every time; under 8 minutes
# make test-unit   the tests that need no model and no process; about a minute on two cores
# make test-lab   the same for the lab (lab/): benchmarks, evaluations, reproduction, simulation, training
# make test-long   what takes long of the rest: commands of the docs, benchmarks, short soaks; CI runs it behind make test
# make test-triton   the GPU's kernels in Triton's interpreter, at length; make test has a part of it; no GPU is needed
# make test-families   every family of models against stock transformers, the whole suite; under 10 minutes
# make test-newest   short suites with the newest release of every dependency, in build/newest; before a release, as it downloads for minutes
# make check  ruff and mypy
# make test-cluster   clusters on a Ray Serve of their own, whose processes are killed; some minutes
# make test-page   the page at / in Chromium (apt install chromium), of one server and of a cluster; a minute or two
# make clients   the packages that make test-all tries against a server; without them it says which tests it skips
# make docs   the documentation as a site in build/site; it downloads MkDocs into a venv of its own
# make asan tsan   the kernel's own test under sanitizers, without Python
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test test-unit test-lab test-long test-triton test-families test-newest test-cluster test-page test-all clients check format docs clean asan tsan

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml lab/pyproject.toml constraints.txt
	@echo "1/2 Making $(VENV), and installing into it: a few minutes, for the kernel, which pip compiles without a word, and for torch (see README.md, Installing)."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' --editable lab
	touch $@

demo: install
	@echo "2/2 Answering a prompt over 8 of 12 documents, from cached modules and then without reuse."
	$(BIN)/inlay run examples/records/records.xml --prompt examples/records/prompt.xml --compare

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest tests -n 2 --dist loadfile -m "not long and not slow and not triton" --hypothesis-profile ci

test-unit: install
	$(BIN)/python -m pytest tests/unit -n 2 --dist loadfile -m "not long and not slow and not triton" --hypothesis-profile ci

test-lab: install
	$(BIN)/python -m pytest lab/tests -n 2 --dist loadfile -m "not long and not slow and not triton" --hypothesis-profile ci

test-long: install
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "long and not slow and not triton" --hypothesis-profile ci

test-triton: install
	$(BIN)/python -m pytest -n 2 --dist worksteal -m triton --hypothesis-profile ci

test-families: install
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/model/families tests/model/authoring/memory/test_families.py

# pip gets the names alone, so that it looks beyond the ranges of pyproject.toml. torch stays what it is pinned to, the
# build for the CPU.
NEWEST := build/newest
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(PYTHON) tests/newest.py > $(NEWEST)/requirements.txt
	$(NEWEST)/bin/pip install --disable-pip-version-check --requirement $(NEWEST)/requirements.txt
	$(NEWEST)/bin/pip install --disable-pip-version-check --no-deps .
	$(NEWEST)/bin/python -m pip freeze > $(NEWEST)/tried.txt
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadfile --hypothesis-profile ci -m "not long and not slow and not triton" \
		tests/newest.py tests/model/models tests/model/families tests/server/server/test_completions.py tests/server/server/test_starting.py tests/model/client/test_llm.py

test-cluster: install
	$(BIN)/python -m pytest tests/system/cluster tests/system/test_docs_cluster.py

PAGE := tests/server/server/test_page.py tests/server/server/test_page_browser.py tests/system/cluster/test_page.py
test-page: install
	$(BIN)/python -m pytest $(PAGE)

test-all: check test-page
	$(BIN)/python -m pytest $(addprefix --ignore=,$(PAGE))

# Each in a directory of its own: they ask for versions of the same packages that exclude each other.
clients: install
	while read -r name packages; do \
		$(BIN)/pip install --disable-pip-version-check --upgrade --target build/clients/$$name $$packages || exit 1; \
	done < tests/server/clients/packages.txt
	if command -v npm > /dev/null; then npm install --prefix build/clients/agents $$(cat tests/server/clients/programs.txt); fi

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A warning, such as a link that leads nowhere, ends it.
DOCS := build/docs-venv
docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build --strict

$(DOCS)/.installed: Makefile
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --disable-pip-version-check 'mkdocs-material>=9.6,<10' 'mkdocstrings[python]>=0.29,<2'
	touch $@

asan:
	cmake -S . -B build/asan -DINLAY_SELFTEST=ON -DINLAY_SANITIZE=address,undefined
	cmake --build build/asan --parallel 2
	build/asan/selftest 60

tsan:
	cmake -S . -B build/tsan -DINLAY_SELFTEST=ON -DINLAY_SANITIZE=thread
	cmake --build build/tsan --parallel 2
	build/tsan/selftest 60

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
