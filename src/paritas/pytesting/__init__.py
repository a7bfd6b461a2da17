"""What a test asks for through the pytest plugin; `_paritas_pytest` holds the hooks themselves."""
