"""The parts of fuzz_gguf.py.

seeds.py           the sound files that are changed         cases.py       one case: a changed file, read and used
edits.py           changes that know no format              hf_folders.py  changes to Hugging Face folders
gguf_document.py   changes to GGUF files                    gguf_bytes.py  the bytes of GGUF files, right or wrong
"""
