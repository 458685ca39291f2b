"""Test one training step by properties that hold exactly."""
