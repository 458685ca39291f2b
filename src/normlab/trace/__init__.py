"""One training step as its author handed it over (`Setup`), and one instrumented run of it (`Trace`)."""
