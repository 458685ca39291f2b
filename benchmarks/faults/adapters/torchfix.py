"""torchfix, which reads source."""

PACKAGE = "torchfix"
VERSION = "0.7.0"
DOES_NOT_APPLY = "it reads source for deprecated or unsafe calls, and runs no step"
