"""A finished verification as table, JSON, JUnit and HTML."""
