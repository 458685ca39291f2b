"""Probes for models in other trainers: Hugging Face's and Lightning's."""
