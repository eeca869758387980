"""The build, for setup.py, make and CI; not part of the installed package."""
