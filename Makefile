# `make demo` and `make test` are all a newcomer needs; the first use creates .venv.
PYTHON ?= python3
BIN := .venv/bin
# One thread a process: two processes on two cores then run undisturbed, and sums come out the same every time.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
# Where Python may not write bytecode, each process compiles the package again: a third of a second, thousands of times.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test costs multi device slow oracle corpus engines storage clients trackers xla kills monitor processors versions flakes gpu wheels types check fix bench docs build

help:            ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):[^#]*## */  \1\t/' | expand -t 12

.venv/.installed: pyproject.toml setup.py constraints.txt src/accelerate/__init__.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	# Without bytecode of the 11,000 modules, of which the first import compiles what it needs.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	touch $@

setup: .venv/.installed  ## create .venv with the tested versions

demo: setup      ## train on 1, 2 and 4 processes, compare, plot (demo_output/)
	$(BIN)/python examples/demo.py --output_dir demo_output

test: setup      ## run the tests, without the costly cases that the suites below run
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

costs: setup     ## run the same tests, and list the folders, files and tests that take the most CPU time
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -p tests.cpu_seconds tests

multi: setup     ## run the tests that need several processes
	$(BIN)/python -m pytest tests/multi

device: setup    ## build an imitation of an accelerator (g++, a minute, once) and train on it
	RUN_SLOW=1 $(BIN)/python -m pytest -q tests/device
	# Tests of the CPU and the oracle's fast set, with ranks on the device.
	RUN_SLOW=1 TEST_DEVICE=sim $(BIN)/python -m pytest -q -p tests.device.plugin $(ON_DEVICE)
	TEST_DEVICE=sim $(BIN)/python -m pytest -q -p tests.device.plugin tests/oracle

ON_DEVICE := $(addprefix tests/multi/test_,$(addsuffix .py,accelerator averaging background_saves checkpointing \
	collectives coordinated_retry data_loader fsdp1 fsdp2 gathering inference local_sgd main_only_calls metrics \
	micro_batches one_rank_reads open_window progress reduction_order shard_saves))

slow: setup      ## what `make test` leaves out for its time: examples at full length, long pages, every launcher and fault (minutes)
	RUN_SLOW=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/seeds tests/multi/test_launch.py tests/multi/test_compiled.py tests/multi/test_wrapped_before_prepare.py tests/multi/test_recompute.py \
		tests/multi/test_hangs.py tests/multi/test_elastic.py tests/contract/test_fsdp_folders.py tests/unit/data_loader/test_shares.py \
		tests/migrate tests/multi/test_pretend.py tests/unit/test_without_posix.py tests/unit/estimate/test_trace.py \
		tests/multi/test_first_causes.py tests/multi/test_world.py tests/multi/test_background_saves.py tests/multi/test_notebook.py tests/unit/benchmarks \
		tests/multi/test_cores_per_rank.py tests/multi/test_gathering.py tests/unit/commands/test_doctor.py \
		tests/multi/test_no_deadlock.py tests/multi/test_padding_of_resumed.py tests/unit/checkpointing/test_many_ranks.py \
		tests/unit/commands/test_monitor_of_many_ranks.py tests/diloco tests/docs/test_code_blocks.py \
		tests/examples/test_by_feature.py tests/multi/test_equal_draws.py tests/multi/test_estimates.py \
		tests/multi/test_main_only_forms.py tests/multi/test_pretended_ranks.py tests/multi/test_reduction_order.py \
		tests/multi/test_scaler_update.py tests/multi/test_data_loader.py tests/unit/commands/test_other_commands.py \
		tests/unit/data_loader/test_torchdata.py tests/unit/data_loader/test_resumed_draws.py

oracle: setup    ## exactness: every sample once, exact resume, 50 random kills, gradients; ends with a table
	RUN_SLOW=1 $(BIN)/python -m pytest -q tests/oracle tests/batch_parts

engines: setup   ## install mpirun, Slurm, Ray, ... and run the tests that start them (minutes)
	tests/engines/setup.sh
	$(BIN)/python -m pytest -m engines tests/engines

storage: setup   ## install a server and a client of S3 beside .venv, and run the tests that need them
	test -x .storage/bin/python || $(BIN)/python -m venv .storage
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > .storage/packages
	cp .storage/packages "$$(.storage/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth"
	.storage/bin/python -m pip install --quiet --disable-pip-version-check "moto[server,s3]>=5" "s3fs>=2024.6"
	PYTHONPATH=src .storage/bin/python -m pytest -q tests/unit/checkpointing/test_remote.py

# $(call beside,ENVIRONMENT): an environment that borrows what .venv has (torch above all) and adds to it.
define beside
	test -x $(1)/bin/python || $(BIN)/python -m venv $(1)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth"
endef

clients: setup   ## install transformers, diffusers, imagen-pytorch, skorch, ... beside .venv, and run them on this package (minutes)
	$(call beside,.clients)
	.clients/bin/python -m pip install --quiet --disable-pip-version-check -c tests/clients/constraints.txt \
		transformers diffusers peft trl sentence-transformers lm-eval bitsandbytes torchao \
		schedulefree pytorch-accelerated setfit tensorboard
	# torchvision's wheel asks for the libraries of a torch with CUDA; its Python part does without.
	.clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c tests/clients/constraints.txt \
		torchvision timm
	.clients/bin/python -m pip install --quiet --disable-pip-version-check -c tests/clients/constraints.txt \
		denoising-diffusion-pytorch rectified-flow-pytorch imagen-pytorch skorch fastai
	.clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .clients/peer \
		accelerate==1.15.0
	cp tests/clients/torchvision_on_cpu.py "$$(.clients/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")"
	echo "import torchvision_on_cpu" > \
		"$$(.clients/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torchvision_on_cpu.pth"
	PYTHONPATH=$(CURDIR)/src .clients/bin/python -m pytest -q tests/clients --record docs/clients.md \
		tests/unit/test_big_models_of_transformers.py tests/unit/estimate/test_of_transformers.py tests/unit/test_quantize.py \
		$(wildcard tests/multi/test_*_of_transformers.py tests/multi/test_adapters.py tests/multi/test_qlora.py \
		tests/multi/test_streamed_adapters.py) "tests/docs/test_code_blocks.py::test_the_code_of_a_page_runs[docs/guides/qlora.md]"

trackers: setup  ## install the nine tracking services beside .venv, log to each offline, read back, kill backends (minutes)
	$(call beside,.trackers)
	.trackers/bin/python -m pip install --quiet --disable-pip-version-check -c tests/trackers/constraints.txt \
		tensorboard wandb mlflow aim comet-ml clearml dvclive swanlab trackio
	PYTHONPATH=$(CURDIR)/src .trackers/bin/python -m pytest -q tests/trackers

deepspeed: setup  ## install DeepSpeed and transformers beside .venv, and run ZeRO for real on CPU ranks (minutes)
	test -x .deepspeed/bin/python || $(BIN)/python -m venv .deepspeed
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > .deepspeed/packages
	cp .deepspeed/packages "$$(.deepspeed/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth"
	DS_BUILD_OPS=0 .deepspeed/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		deepspeed==0.19.8 transformers==5.23.0 ninja==1.13.2
	rm -f .deepspeed/extensions/*/lock  # a run that was killed while it compiled would be waited for, for ever
	# What every rank would compile when it first communicates, once and without a time limit of a test.
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.deepspeed/extensions DS_ACCELERATOR=cpu \
		.deepspeed/bin/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.deepspeed/extensions PYTHONPATH=src \
		.deepspeed/bin/python -m pytest -q tests/deepspeed tests/seeds/test_001_deepspeed.py \
		"tests/examples/test_by_feature.py::test_an_example_learns[deepspeed_with_config_support]" \
		"tests/examples/test_by_feature.py::test_an_example_learns_on_two_ranks[deepspeed_with_config_support]"

corpus: setup    ## `verify`, `bisect`, `reproduce` and `doctor` on small scripts with a planted fault or cause in each, and on right ones (an hour)
	RUN_SLOW=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/verify tests/rewind tests/reproduce \
		tests/doctor/test_corpus.py

meshes: setup    ## every mesh of 2 and 4 ranks against one process, and every checkpoint under every other (minutes)
	RUN_SLOW=1 $(BIN)/python -m pytest -q tests/multi/test_meshes.py tests/multi/test_pipeline.py tests/multi/test_coordinated_retry.py \
		tests/multi/test_adopted.py tests/multi/test_unreached.py tests/multi/test_matrix_optimizers.py tests/multi/test_streamed_weights.py \
		tests/multi/test_own_buffers.py tests/multi/test_fsdp1.py tests/multi/test_fsdp2.py tests/multi/test_norm_precision.py \
		tests/multi/test_open_window.py tests/multi/test_stateful_models.py tests/multi/test_balance.py

xla:             ## install torch_xla and its torch 2.9 into .xla (1 GB to download), train on 4 virtual devices (minutes)
	tests/xla/setup.sh
	PYTHONPATH=src .xla/bin/python -m pytest -q tests/xla
	# The same environment shows that torch 2.9 will do.
	USE_TORCH_XLA=0 PYTHONPATH=src .xla/bin/python -m pytest -q tests/unit/precision tests/unit/test_accelerator.py \
	  tests/unit/test_optimizer.py tests/unit/test_collectives.py tests/multi/test_fsdp1.py tests/multi/test_fsdp2.py

kills: setup     ## kill runs inside saving (300), preempt them (200), flip bits, lose replicas, check the hours of killed runs (an hour)
	RUN_SLOW=1 $(BIN)/python -m pytest -q tests/multi/test_kills.py tests/multi/test_preemption.py tests/multi/test_ledger_kills.py \
		tests/multi/test_flight_record.py tests/multi/test_hardware_check.py tests/multi/test_lost_replica.py \
		tests/multi/test_memory_kill.py tests/multi/test_lost_meshes.py tests/multi/test_lost_loaders.py tests/diloco/test_lost_islands.py
	RUN_SLOW=1 $(BIN)/python -m pytest -q -n 0 -m engines tests/engines/test_lost_hosts.py

processors: setup  ## run the tests that compute under each instruction set this processor has, on 1 and 2 threads (minutes)
	$(BIN)/python tests/processors.py

versions: setup  ## run the unit, contract, multi and oracle suites on other Pythons and torches, read the newest torch (hours)
	$(BIN)/python tests/versions.py

N ?= 10
flakes: setup    ## run the whole suite N times (N=10), every second time beside a load, and list each failure (hours)
	$(BIN)/python -m tests.flakes --num_runs $(N)

gpu:             ## on a machine with an H100 or H200: does it run, what does it cost; writes docs/gpu.md (at most 25 minutes)
	test -z "$(wildcard wheels/*.whl)" || $(PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
		--upgrade --target .gpu wheels/*.whl
	# Host threads for what one process prepares; a part that fails leaves the others, and the page says so.
	OMP_NUM_THREADS=8 $(PYTHON) -m benchmarks.gpu; status=$$?; $(PYTHON) -m benchmarks.gpu --page docs/gpu.md; exit $$status

wheels: setup    ## what `make gpu` can't fetch on a machine without a network, into wheels/ (torchao for torch 2.11)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest wheels \
		--python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 torchao==0.17.0

monitor: setup   ## look at the live page of a run in headless Chromium (apt install chromium); remakes docs/images
	DOCS_IMAGES=1 $(BIN)/python -m pytest -q -m browser tests/monitor

types: setup     ## what an editor knows of the installed package: pyright --verifytypes, at least 98 % (a minute)
	$(BIN)/python tests/verify_types.py --list

check: setup     ## lint, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_architecture.py

fix: setup       ## format, and repair what the linter can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup     ## measure (each file prints its own table)
	set -e; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file; done

docs: setup      ## build the pages into site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

build: setup     ## wheel and sdist into dist/
	$(BIN)/python -m build
