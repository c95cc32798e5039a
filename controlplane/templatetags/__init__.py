"""Template filters of the operators' pages."""
