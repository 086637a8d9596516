"""Causes read off the numbers of one wrong tensor, where no known mistake makes all of them.

A mistake with numbers in it (the cells that each token reads, the row that each output is) cannot be on a list. Each reading is checked on
all that it claims to explain before it is reported. `table` has them all.
"""
