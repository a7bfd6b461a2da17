"""The kernel judge: does a kernel that may cheat compute what its reference computes?"""
