"""tinytorchtest, which has the checks of torchtest."""

PACKAGE = "tinytorchtest"
VERSION = "1.2.3"
DOES_NOT_APPLY = (
    "its checks are those of torchtest, which is tried: parameters that change or stay, NaN, ranges"
)
