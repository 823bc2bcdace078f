"""The Taylor polynomials of a head about the centres of boxes, with bounds of their remainders."""
