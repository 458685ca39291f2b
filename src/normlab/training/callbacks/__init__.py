"""What looks at a run while it trains, without changing its numbers."""
