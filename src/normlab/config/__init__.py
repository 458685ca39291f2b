"""What users ask for and what they get, as data: configurations, requests, results. No torch."""
