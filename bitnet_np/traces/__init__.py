"""Recorded tensors of a forward pass.

points.py       the table of their names, and the Trace that holds them
labels.py       the points that the labels of a dump stand for: our names, modules of other projects, steps of decoding
normal_form.py  the one form that their arrays have, whatever file they come from
record.py       records a forward pass into a file, tensor by tensor
hooks.py        records models that run in transformers or mlx-lm
token_files.py  files of token ids
llama_base.py   what a model predicts against a base of log-probabilities in llama.cpp's file
arrays.py       arrays of any library, as NumPy's
formats/        the file formats of dumps, ours and other projects'
"""
