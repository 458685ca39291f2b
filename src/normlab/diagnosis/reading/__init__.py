"""The residual stream of any ``nn.Module``, read from the numbers of one forward pass."""
