"""Recorded tensors of a forward pass: their names, how they are recorded, and the files they are kept in."""
