"""From stored weights to what the prover works on: a stage of attention heads, enclosed."""
