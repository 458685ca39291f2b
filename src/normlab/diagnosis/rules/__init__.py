"""From tables to findings: laws of depth, theory, and the rules that compare both with what was measured."""
