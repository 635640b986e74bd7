"""The Intel backend of m3hal: see :mod:`m3hal_gaudi.manifest`."""
