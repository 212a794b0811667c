"""One file for each library that is measured; each runs in a process and a virtual environment of its own."""
