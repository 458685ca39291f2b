"""What every room uses: numbers in words, strict reading, files written whole, settings and charts as data.

Nothing here imports torch.
"""
