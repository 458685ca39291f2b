"""Forecasts of trainings: the table of runs that they rest on, the forecaster, and how good it is."""
