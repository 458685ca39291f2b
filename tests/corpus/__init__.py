"""Training steps, faulty and sound, for `normlab.check` to tell apart."""
