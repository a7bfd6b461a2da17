"""`check_engine()`: did a serving engine return what the reference model computes?"""
