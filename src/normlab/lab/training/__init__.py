"""Training one run, with its checkpoints and outcome, training many, and using, folding or exporting one."""
