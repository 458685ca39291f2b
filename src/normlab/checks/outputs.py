"""Properties."""
