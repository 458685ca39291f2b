"""A watch over trainings elsewhere: Hugging Face's Trainer, Lightning, torchtitan and plain loops."""
