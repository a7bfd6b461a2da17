"""Checks on real ranks: processes, or threads of this process."""
