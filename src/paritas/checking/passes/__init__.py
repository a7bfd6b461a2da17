"""Do the compiler's passes, and its split into forward and backward, keep what a graph means?"""
