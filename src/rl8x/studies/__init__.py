"""Studies: trainings under several configurations and seeds, evaluated over a space of environments."""
