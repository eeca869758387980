"""What setup.py, make and CI need to build the project; not part of the installed package."""
