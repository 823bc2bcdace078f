"""The parts of an expression that heads compute: their ranges, and how an expression is lowered to them."""
