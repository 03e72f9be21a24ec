# Everything starts from a fresh clone: `make demo` and `make test` set up .venv themselves.
# PLATFORM=gpu takes the CUDA builds (the default is cpu). PYTHON=/path/to/python picks the interpreter.
PLATFORM ?= cpu
PYTHON ?=
DEMO_ARGS_cpu :=
DEMO_ARGS_gpu := trainer.platform=cuda model.dtype=bfloat16 parallel.tensor_model_parallel_size=1 \
                 rollout.tensor_model_parallel_size=1 --nproc 1

.PHONY: env demo test lint clean

env:
	@PYTHON="$(PYTHON)" bash tools/setup_env.sh $(PLATFORM)

demo: env
	.venv/bin/mrl train configs/demo.yaml --overwrite $(DEMO_ARGS_$(PLATFORM))

test: env
	.venv/bin/python -m pytest -m "not gpu"

lint: env
	.venv/bin/ruff check .
	.venv/bin/mypy

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
