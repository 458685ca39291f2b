"""Training steps with planted faults, their sound twins, and sound models: what `normlab.check` must tell apart."""
