"""The lab: experiments on the papers' claims, their report, and the diagnosis of attention that computes a function.

It uses the public API of attnc and nothing else.
"""

from attnc_lab.catalogue import EXPERIMENTS, named
from attnc_lab.diagnosis import Diagnosis, diagnose
from attnc_lab.report import report
from attnc_lab.running import run
from attnc_lab.signatures import Symptom

__all__ = ["EXPERIMENTS", "Diagnosis", "Symptom", "diagnose", "named", "report", "run"]
