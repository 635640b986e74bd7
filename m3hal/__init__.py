"""m3hal: every MiniMax-M3 operator defined once, served by whichever vendor proves it."""
__version__ = "0.1.0"
