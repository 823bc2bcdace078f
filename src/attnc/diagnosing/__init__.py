"""Failure signatures of attention that should compute a function, read off its weights and errors at samples."""

from attnc.diagnosing.diagnosis import Diagnosis, diagnose
from attnc.diagnosing.signatures import Symptom

__all__ = ["Diagnosis", "Symptom", "diagnose"]
