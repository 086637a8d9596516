"""Law 3: what one operation gives on given inputs, and how far another engine may be from it.

graph.py          the operations of a model, what each reads    definition.py   spec.py's steps as expressions
expression.py     trees of steps, and their values              functions.py    the steps, and tables of alternatives
running_error.py  the bound of any expression, step by step     expected.py     what a bound is made of
roundings.py      how engines round                             formats.py      the types that they round to: grid, scale, block
precision.py      types that engines keep numbers in            products.py     the numbers of matrices
noise.py          errors that are alike everywhere      codes.py        errors that follow the codes of blocks
channels.py       errors that follow channels           levels.py       tensors that are stored in few numbers
"""
