"""deepchecks, which compares data sets and predictions."""

PACKAGE = "deepchecks"
VERSION = "0.19.1"
DOES_NOT_APPLY = "it compares data sets and the predictions of a trained model, and sees no step"
