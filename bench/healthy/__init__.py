"""Public training programs, and synthetic data for them."""
