# Each target is one line that also runs without make.
.PHONY: all lint test bench readme samples
all: lint test

lint:
	ruff check . && ruff format --check . && mypy

test:
	pytest -q

bench:
	python benchmarks/vs_verl.py

readme:
	python tests/readme_blocks.py README.md

samples:
	@echo "python sample_data/make_samples.py --engine FOLDER (needs transformers and ctranslate2; the dumps are shipped)"
