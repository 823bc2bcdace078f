"""What is claimed of a program, and what supports the claim: the proofs, and in folders what they are made of."""
