"""The Triton backend of m3hal: see :mod:`m3hal_triton.manifest`."""
