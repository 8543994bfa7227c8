"""What the read step does inside a model, and where a model's keys lie."""

from ccq.analysis.diagnosis import DiagnosisResults, diagnose
from ccq.analysis.gate import ReadMeasurement, measure_reads

__all__ = ["DiagnosisResults", "ReadMeasurement", "diagnose", "measure_reads"]
