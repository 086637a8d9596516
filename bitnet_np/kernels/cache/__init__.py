"""Compiled kernels on disk: files of one function and one signature each, safe for any number of processes.

disk_cache.py    what an entry depends on, and how it is written and read
cache_folder.py  where entries are, and which are deleted
whole_kernels.py compiling a kernel and the functions that it calls as one
"""
