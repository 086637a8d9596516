"""Compiled kernels on disk: files of one function and one signature each, safe for any number of processes.

disk_cache.py    what an entry depends on, and how it is written and read
cache_folder.py  where entries are, which are deleted, and whom they are trusted to
whole_kernels.py compiling a kernel and the functions that it calls as one
private_parts.py what all of this needs of Numba, and whether it is there
"""
