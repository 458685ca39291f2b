"""Test one training step against properties that must hold exactly."""
