"""What the read step does inside a model, and where a model's keys lie."""

from ccq.analysis.diagnosis import DiagnosisResults, diagnose
from ccq.analysis.gate import ReadMeasurement, collect_gate_values, measure_reads

__all__ = [
    "DiagnosisResults",
    "ReadMeasurement",
    "collect_gate_values",
    "diagnose",
    "measure_reads",
]
