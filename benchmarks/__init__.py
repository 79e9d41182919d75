"""Measurements, not tests: `make bench BENCH=sweep`."""
