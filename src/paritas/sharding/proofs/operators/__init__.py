"""The definitions of the library's operators, in the families of the library."""
