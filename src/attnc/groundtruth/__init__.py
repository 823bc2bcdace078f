"""Ground truth for interpretability: stock checkpoints whose circuits and causal variables are known, and a scorer."""

from attnc.groundtruth.making import make
from attnc.groundtruth.scoring import score

__all__ = ["make", "score"]
