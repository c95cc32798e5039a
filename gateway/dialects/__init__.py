"""The API surfaces clients speak: how a body is read and how errors are said. Pure functions, no I/O."""
