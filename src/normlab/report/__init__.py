"""Self-contained HTML pages, made from run folders without torch."""
