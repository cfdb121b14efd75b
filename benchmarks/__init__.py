"""Measurements: one file a question, one command each. Results are committed under `benchmarks/results/`."""
