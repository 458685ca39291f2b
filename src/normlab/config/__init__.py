"""What people ask for and what comes out, as data: configurations, requests, results. No torch."""
