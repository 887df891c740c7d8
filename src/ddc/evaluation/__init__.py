"""Metrics, the benchmark, the paper's experiments and the report."""
