"""One head over constant keys and one variable: its keys, their values, and the program that it becomes."""
