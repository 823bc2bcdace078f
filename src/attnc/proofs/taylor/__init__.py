"""The Taylor polynomials of a head about the centres of boxes, with what they leave out."""
