"""Dumps on disk: the store, its index, and opening a dump of any layout."""
