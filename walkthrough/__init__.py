"""The course: chapters in pipeline order, each a script of cells; build.py makes the notebooks from them."""
