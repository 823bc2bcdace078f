"""The parts of an expression that heads compute, where their values lie, and how errors travel through them."""
