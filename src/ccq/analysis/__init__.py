"""What the read step does inside a model."""

from ccq.analysis.gate import ReadMeasurement, measure_reads

__all__ = ["ReadMeasurement", "measure_reads"]
