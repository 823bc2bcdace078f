"""Pictures of a network: target, output, error, and the keys that the attention selects.

matplotlib is an optional extra. It is imported in this package and nowhere else, inside functions, and only its
object-oriented interface is used: no pyplot, no backend chosen, no setting changed.
"""

from attnc.plots.certificate import plot_certificate
from attnc.plots.demonstration import plot_demonstration
from attnc.plots.drawing import figure, plot
from attnc.plots.incontext import plot_attention, plot_function, plot_loss

__all__ = ["figure", "plot", "plot_attention", "plot_certificate", "plot_demonstration", "plot_function", "plot_loss"]
