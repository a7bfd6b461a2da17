"""The only door to torch's private parts: what is imported from there is imported here."""
