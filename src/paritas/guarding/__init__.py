"""`paritas run`: a script with every `torch.compile` in it guarded."""
