"""Probes for models that other people's trainers train: Hugging Face's and Lightning's."""
