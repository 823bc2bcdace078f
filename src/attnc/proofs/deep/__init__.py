"""Programs of several stages: how they are cut, what a stage can say, and what the errors of heads become."""
