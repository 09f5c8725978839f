# polyfed: `make demo` and `make test` need nothing but Python 3.11 and a package index.
PYTHON ?= python3
BIN := .venv/bin
RUNS := runs
unexport PYTHONDONTWRITEBYTECODE  # the tests start hundreds of processes, each of which would compile the package anew

.PHONY: demo demo-network test types suite fast-test test-torch test-long test-core test-oldest test-newest coverage \
    mutate mutate-promises torture torture-network fuzz wheel sbom bench bench-sites bench-gpu docs docs-release clean

demo: .venv/ready   ## set up, run the main job on the hospitals' data, leave a report
	$(BIN)/polyfed run --out $(RUNS)/demo

demo-network: .venv/ready-sites   ## a server and four hospitals over a real network, on this machine: half a minute
	rm -rf $(RUNS)/network
	$(BIN)/python examples/network/demo.py --out $(RUNS)/network

test: .venv/ready-dev   ## every check: format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory types suite

types: .venv/ready-dev
	$(BIN)/pyrefly check

suite: .venv/ready-dev   # what fails is run again, with the values in its assertions, whose rewriting takes half of the collection
	$(BIN)/python -m pytest -n 2 --assert=plain || { $(BIN)/python -m pytest --last-failed; false; }

fast-test: .venv/ready-dev   ## about a minute: format, lint, and the first case of every test that tests/slow.txt does not name
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n 2 --fast

test-torch: .venv/ready-dev   ## the tests of fast-test without the compiled kernel
	POLYFED_NATIVE=0 $(BIN)/python -m pytest -n 2 --fast

test-long: .venv/ready-dev   ## every case of every test, then the reproductions that take minutes to hours
	$(BIN)/python -m pytest -n 2 --all
	$(BIN)/python -m pytest -m long

test-core: BESIDE := $(shell cd src; ls -d polyfed_* | paste -sd,)
test-core: .venv/ready-dev   ## the core's own tests, with every package beside it hidden
	$(BIN)/python -m pytest -n 2 --fast --without $(BESIDE) $(patsubst src/polyfed/%/__init__.py,tests/%,$(wildcard src/polyfed/*/__init__.py))

build/constraints-oldest.txt: pyproject.toml   # the lower bounds of its dependencies, of the readers of tables and of what sites need
	mkdir -p build
	sed -n 's/^    "\([A-Za-z0-9_.-]*\)>=\([0-9.]*\)",$$/\1==\2/p; /^tables\|^sites/s/[^"]*"\([^">]*\)>=\([0-9.]*\)"]*/\1==\2\n/gp' \
	    $< > $@

test-oldest: OLDEST := -c build/constraints-oldest.txt
test-oldest: build/constraints-oldest.txt   ## fast-test's tests under the oldest packages that pyproject.toml takes
test-newest:   ## the same under the newest there are, whatever constraints.txt says
test-oldest test-newest: test-%:  # in environments of their own, without the extras that hold some packages back
	rm -rf build/venv-$*
	$(PYTHON) -m venv build/venv-$*
	build/venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(OLDEST) -e '.[tables,sites]' \
	    pytest pytest-xdist hypothesis statsmodels lifelines
	build/venv-$*/bin/python -m pytest -n 2 --fast --without flwr,ray

coverage: .venv/ready-dev   ## which lines and branches of src the tests run, in build/coverage/report.txt
	rm -rf build/coverage
	mkdir -p build/coverage
	$(BIN)/coverage run -m pytest -n 2
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report > build/coverage/report.txt
	tail -n 3 build/coverage/report.txt

mutate: .venv/ready-dev   ## change one thing at a time: do the tests notice? ONLY="fedamp cfl" COUNT=10 SEED=1 MINUTES=60
	$(BIN)/python tools/mutate.py $(ONLY) --count $(or $(COUNT),5) --seed $(or $(SEED),0) --minutes $(or $(MINUTES),inf)

mutate-promises: .venv/ready-dev   ## the same of privacy, policies, thresholds and folders, from tools/promises.jsonl: ONLY="privacy audit"
	$(BIN)/python tools/mutate_promises.py $(ONLY)

torture: .venv/ready-dev   ## kill commands again and again: does every file come out the same? CASES=100 SEED=0 ONLY=run,tune
	$(BIN)/python tools/torture.py --cases $(or $(CASES),100) --seed $(or $(SEED),0) $(if $(ONLY),--only "$(ONLY)")

torture-network: .venv/ready-dev   ## kill what carries the messages of real sites: ONLY=port,site METHODS=scaffold SEED=0 STORM=120 SECURE=20
	$(BIN)/python tools/torture_network.py --seed $(or $(SEED),0) $(if $(ONLY),--only $(ONLY)) \
	    $(if $(METHODS),--methods $(METHODS)) $(if $(STORM),--storm $(STORM)) $(if $(SECURE),--secure $(SECURE))

fuzz: .venv/ready-dev   ## hostile configurations, settings, calls of all that is public, files and folders, new ones in every run, 30 times as many as in the tests: N=100 SEED=7
	POLYFED_FUZZ=$(or $(N),30) $(BIN)/python -m pytest tests/fuzz --all $(if $(SEED),--hypothesis-seed=$(SEED))

wheel: .venv/ready   ## a wheel with the compiled kernel for this platform, in dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

sbom: .venv/ready   ## for a security officer, in build/release: packages with versions and licences (CycloneDX), dist's hashes
	rm -rf build/release build/venv-sbom
	mkdir -p build/release
	$(PYTHON) -m venv build/venv-sbom
	build/venv-sbom/bin/python -m pip install --quiet --disable-pip-version-check 'cyclonedx-bom>=7'
	build/venv-sbom/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible \
	    --output-file build/release/sbom.json
	cd dist && sha256sum * | tee ../build/release/SHA256SUMS

bench: .venv/ready-dev   ## a round of the nets that people federate, the plain loop and JAX (pip install 'polyfed[bench]') in turns: ONLY="GRU ViT" RECORD=1
	$(BIN)/python benchmarks/nets.py $(if $(ONLY),--only $(ONLY)) $(if $(RECORD),--record)

bench-sites: .venv/ready-dev   ## 200 sites at one server, messages of 1 MB: seconds a round and memory
	$(BIN)/python benchmarks/sites.py

bench-gpu: .venv/ready-dev   ## on a machine with a GPU, under 40 minutes, into build/gpu.md: DRY=1 tries it on the processor; PFL=FOLDER
	$(BIN)/python benchmarks/gpu.py $(if $(DRY),--dry) $(if $(PFL),--pfl $(PFL))

docs: .venv/ready-docs   ## the documentation site, in build/site
	$(BIN)/mkdocs build

docs-release: .venv/ready-docs   ## keep the site of a release beside the earlier ones, in the branch gh-pages: VERSION=0.1.0
	@test -n "$(VERSION)" || { echo 'docs-release: VERSION is not set, expected such as VERSION=0.1.0'; exit 2; }
	PATH="$(CURDIR)/$(BIN):$$PATH" mike deploy --update-aliases $(VERSION) latest
	PATH="$(CURDIR)/$(BIN):$$PATH" mike set-default latest

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# torch comes first and pinned, so that no other package can pull in another build of it
.venv/ready: pyproject.toml constraints.txt src/polyfed/native/kernel.cpp src/polyfed/native/train.inc
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e .
	touch $@

.venv/ready-dev: .venv/ready
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps dp-accounting absl-py dm-tree
	touch $@

.venv/ready-sites: .venv/ready
	$(PIP) -e '.[sites]'
	touch $@

.venv/ready-docs: .venv/ready
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info src/polyfed/native/*.so
