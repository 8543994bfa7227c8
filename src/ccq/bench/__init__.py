"""Measurements of speed and of numerical error; their figures go to benchmarks/results with machine and versions."""
