"""Serving: the look-up ladder, the torch.library ops, and the public calls."""
