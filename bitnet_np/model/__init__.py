"""The records that are a model, and what is known of them without a forward pass.

records.py    Config, Layer, Model: flat arrays, with their shapes
families.py   architectures, as a table
rope.py       RoPE's frequencies
packing.py    the layouts of ternary matrices       ternarize.py  ternary matrices out of what files hold
widen.py      tables of numbers, as float32         dense.py      a model as the definition reads it
checks.py     whether a Model's arrays are what its Config says
matrix_facts.py  the kinds of a Model's matrices, and those whose weights are all equal
"""
