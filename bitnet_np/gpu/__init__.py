"""The host side of the GPU backend."""
