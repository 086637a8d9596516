"""Recorded tensors of a forward pass.

points.py       their names and shapes, and the Trace that holds them
record.py       records a forward pass into a file, tensor by tensor
formats/        the file formats of dumps, ours and other projects'
"""
