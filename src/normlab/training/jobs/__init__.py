"""Many runs: a queue of configurations on this machine's cores or on a Ray cluster."""
