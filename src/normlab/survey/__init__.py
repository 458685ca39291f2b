"""Many small trainings, as the data of a forecast: their design, their collection, and what is measured."""
