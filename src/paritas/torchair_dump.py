"""The seed's two functions; built in this session."""
