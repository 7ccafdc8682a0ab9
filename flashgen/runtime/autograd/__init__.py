"""Calls whose gradients are asked for: past torch's dispatcher, through it, and under transforms of functions."""
