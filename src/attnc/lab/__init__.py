"""The lab: every experiment that the papers call for, as one command and one report."""

from attnc.lab.catalogue import EXPERIMENTS, named
from attnc.lab.report import report
from attnc.lab.running import run

__all__ = ["EXPERIMENTS", "named", "report", "run"]
