"""Dumps and files, ours and other systems', behind one reader."""
