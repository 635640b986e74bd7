"""The AMD backend of m3hal: see :mod:`m3hal_amd.manifest`."""
