"""The ground that every room stands on. It knows nothing of models.

errors.py        the family of errors, and how values are shown in messages
validate.py      checks of what callers pass in
extras.py        optional dependencies, imported with a clear error if they are missing
tables.py        tables, and text of files, as text for people
progress.py      progress of long work, reported to functions that the caller passes in
whole_file.py    files that appear only when they are complete
tensor_types.py  ggml's tensor types, as a table
block_formats.py where codes and scales lie in a block of such a type
blas.py          the threads of NumPy's matrix products
"""
