"""Many runs: a queue of configurations on this machine's cores."""
