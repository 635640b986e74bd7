"""The NVIDIA backend of m3hal: see :mod:`m3hal_nvidia.manifest`."""
