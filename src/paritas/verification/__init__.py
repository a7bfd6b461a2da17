"""`verify()`: does a candidate compute what the reference computes, as a whole or by blocks?"""
