"""Algorithms that train a language model, and the shells they share."""
