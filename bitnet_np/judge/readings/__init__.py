"""Causes read off the numbers of one wrong tensor, where no known mistake makes all of them.

A mistake with a number in it (a base, positions, a width that a loop stops at) cannot be on a list. Each reading is checked on all that it
claims to explain before it is reported. `table` has them all, and `results` the edits of a result alone.
"""
