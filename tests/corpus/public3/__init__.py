"""Public reports of 2024 to 2026 and setups of today's kinds, written before any check was run on them."""
