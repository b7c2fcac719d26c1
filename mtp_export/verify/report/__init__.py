"""Report of a finished verification as terminal table, JSON, JUnit and HTML."""
