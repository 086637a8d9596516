"""Recorded tensors of a forward pass.

points.py       the table of their names, and the Trace that holds them
normal_form.py  the one form that their arrays have, whatever file they come from
record.py       records a forward pass into a file, tensor by tensor
formats/        the file formats of dumps, ours and other projects'
"""
